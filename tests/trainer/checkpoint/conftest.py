"""What the checkpoint tests share."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.checkpoint import Checkpointer


class Events:
    """Records its calls."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, str, dict[str, Any]]] = []

    def __call__(self, kind: str, step: int, message: str, **what: Any) -> None:
        self.heard.append((kind, step, message, what))


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def checkpointer(folder: Path, events: Events) -> Iterator[Checkpointer]:
    made = Checkpointer(folder, 2, events)
    yield made
    made.close()


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Any, Any], None]:
    """Asserts that two trees are the same: structure, types, dtypes, shapes and bits."""
    return _assert_same


def _assert_same(left: Any, right: Any) -> None:
    """Same structure, types, dtypes, shapes and bits."""
    assert type(left) is type(right), (left, right)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            _assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            _assert_same(one, other)
    elif isinstance(left, float) and math.isnan(left):
        assert math.isnan(right)
    else:
        assert left == right
