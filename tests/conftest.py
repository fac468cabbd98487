"""What all tests share: one thread each, since several processes run tests at once; the same examples in every run.

Without a GPU, Triton's kernels run in its interpreter. It must be told before Triton is imported, by whatever test is
collected first.
"""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; programs that tests start inherit it

import pytest
import torch
from hypothesis import settings
from omegaconf import OmegaConf

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from precision import PrecisionConfig

settings.register_profile("octet", deadline=None, derandomize=True)
settings.load_profile("octet")

CONFIGS = Path(__file__).parents[1] / "configs" / "precision"


def load(name: str, **overrides: object) -> PrecisionConfig:
    """A precision config by file name; overrides by dotted key with __ for dots, e.g. scaling__method='current'."""
    merged = OmegaConf.merge(OmegaConf.structured(PrecisionConfig), OmegaConf.load(CONFIGS / f"{name}.yaml"))
    for key, value in overrides.items():
        OmegaConf.update(merged, key.replace("__", "."), value)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, PrecisionConfig)
    return config


@pytest.fixture
def recipe() -> Callable[..., PrecisionConfig]:
    return load
