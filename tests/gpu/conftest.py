"""Tests that need a GPU: skipped without one."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder where torch sees no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
