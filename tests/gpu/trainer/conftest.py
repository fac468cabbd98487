"""Engines on the GPU, and their steps, from the same config as training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composed import config_of

from trainer.config import Config
from trainer.forecast.preflight import check
from trainer.step.engine import Engine, build_engine

CONFIGS = Path(__file__).parents[3] / "configs"
DEVICE = torch.device("cuda")


@pytest.fixture
def config() -> Callable[..., Config]:
    """deepseek_tiny on the GPU, with any overrides."""

    def build(*overrides: str) -> Config:
        return config_of([f"trainer.device={DEVICE.type}", *overrides])

    return build


@pytest.fixture
def engine(config: Callable[..., Config]) -> Callable[..., Engine]:
    """The engine of such a config, at step 0; without CUDA graphs unless these are asked for."""

    def build(*overrides: str) -> Engine:
        made = config("data=text", f"data.path={CONFIGS}", "cuda_graph=false", *overrides)
        check(made)
        return build_engine(made, DEVICE)

    return build
