"""A small run (`small.SMALL`) with any override."""

from collections.abc import Callable
from pathlib import Path

import pytest
from composed import config_of
from small import SMALL, write_corpus

from trainer.config import Config

Small = Callable[..., list[str]]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text files."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), factor=7919, names=65521)


@pytest.fixture
def overrides(corpus: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Overrides of a small run in this test's folder; more can be added."""
    cache = tmp_path_factory.getbasetemp() / "data_cache"

    def build(*more: str) -> list[str]:
        places = [f"data.path={corpus}", f"data.cache_dir={cache}", f"run.dir={tmp_path / 'runs'}"]
        return [*SMALL, *places, *more]

    return build


@pytest.fixture
def config(overrides: Small) -> Callable[..., Config]:
    """The config of a small run."""
    return lambda *more: config_of(overrides(*more))
