"""Tests that need a GPU: skipped without one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from precision import PrecisionConfig

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs" / "precision"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder where torch sees no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


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
