"""Helpers of the precision tests: the recipes of configs/precision, and a small model of plain layers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from precision import PrecisionConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "precision"


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
