"""What all tests share: one thread each, since several processes run tests at once; the same examples in every run.

Without a GPU, Triton's kernels run in its interpreter. It must be told before Triton is imported, by whatever test is
collected first.
"""

import os
import socket
import subprocess
import sys
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


@pytest.fixture(scope="session")
def start_ranks() -> Callable[..., None]:
    """start_ranks(program, size, *arguments): a Python file in so many processes, which meet by torch's environment
    variables (RANK, WORLD_SIZE, MASTER_ADDR, ...); returns when all have ended with 0."""

    def start(program: str, size: int, *arguments: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        who = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        command = [sys.executable, "-W", "ignore", program, *map(str, arguments)]
        ranks = [subprocess.Popen(command, env=os.environ | own) for own in who]
        try:
            assert [rank.wait(timeout=1200) for rank in ranks] == [0] * size, f"{size} ranks of {program}"
        finally:
            for rank in ranks:
                rank.kill()

    return start
