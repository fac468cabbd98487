"""A small corpus of Python files, prepared once for all tests of the session."""

import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.data import Bins, DataConfig, Prepared, Source, prepare
from trainer.data.bins import Shard

MakeConfig = Callable[..., DataConfig]


def config_of(folder: Path, cache: Path, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {
        "source": Source.text,
        "path": str(folder),
        "cache_dir": str(cache),
        "validation_fraction": 0.2,
    }
    return DataConfig(**(settings | changes))


def write_corpus(folder: Path, num_files: int) -> None:
    """The beginnings of the first modules of the standard library, a third of them in a subfolder."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-f]*.py"))[:num_files]
    for number, module in enumerate(modules):
        target = folder / ("inner" if number % 3 == 0 else ".") / module.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(module.read_bytes()[:12_000].decode(errors="ignore").encode())


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 30 files, not to be changed."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, 30)
    return folder


@pytest.fixture(scope="session")
def prepared(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """That folder prepared for 512 entries, not to be changed."""
    return prepare(config_of(corpus_folder, tmp_path_factory.mktemp("cache")), 512)


@pytest.fixture(scope="session")
def make_bins(prepared: Prepared) -> Callable[[Path], Bins]:
    """(folder) -> a file of 3,000 tokens, each its own place, so that a token says where it comes from."""

    def make(folder: Path) -> Bins:
        np.arange(3000, dtype="<u2").tofile(folder / "train.bin")
        sidecar = replace(prepared.train.sidecar, num_tokens=3000, dtype="uint16", vocab_size=3000)
        return Bins([Shard(folder / "train.bin", sidecar)])

    return make


@pytest.fixture(scope="session")
def bins(make_bins: Callable[[Path], Bins], tmp_path_factory: pytest.TempPathFactory) -> Bins:
    """Such a file, not to be changed."""
    return make_bins(tmp_path_factory.mktemp("bins"))


@pytest.fixture
def own_corpus(tmp_path: Path) -> Path:
    """A folder of ten files that the test may change."""
    write_corpus(tmp_path / "corpus", 10)
    return tmp_path / "corpus"


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """(folder, changes...) -> DataConfig with a cache of the test's own."""
    return lambda folder, **changes: config_of(folder, tmp_path / "cache", **changes)
