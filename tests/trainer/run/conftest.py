"""Where run folders are, and what opens them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folders import TEXTS

from trainer.run.run_folder import RunFolder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens run folders and closes them at the end."""
    made: list[RunFolder] = []

    def open_run(runs: Path, name: str | None = "a", resume: str = "never", **more: Any) -> RunFolder:
        run = RunFolder(runs, name, resume, "fp8_delayed", more.pop("texts", TEXTS), **more)
        made.append(run)
        return run

    yield open_run
    for run in made:
        run.close()
