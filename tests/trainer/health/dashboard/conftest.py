"""A long run, for all tests of a process."""

import pytest
from made_runs import make_run, opened

from trainer.health.dashboard.read import Run


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """4,000 steps in FP8, logged every second one; read."""
    return opened(make_run(tmp_path_factory.mktemp("long") / "fp8_delayed"))
