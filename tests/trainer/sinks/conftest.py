"""A run's folder, and a screen."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from screens import Screen

from trainer.run.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    made = RunFolder(tmp_path / "runs", "a", "never", "bf16", {"config.yaml": "trainer: {seed: 1}\n"})
    yield made
    made.close()


@pytest.fixture
def screen() -> Screen:
    return Screen()
