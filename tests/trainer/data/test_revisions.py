"""Datasets of the hub: the commit that was read is written down, and no folder has text of two.

There is no hub here, but the cache that `datasets` keeps of it, with a folder for each commit.
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.data import DataConfig, Prepared, Source, prepare
from trainer.data.bins import Bins

OLD, NEW = "a" * 40, "b" * 40
Commit = Callable[[str, int], None]


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commit:
    """(commit, number): this commit of org/name is downloaded; its documents all have the number."""
    datasets = pytest.importorskip("datasets")
    from datasets.arrow_writer import ArrowWriter

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def download(name: str, number: int) -> None:
        place = tmp_path / "hf" / "org___name" / "default" / "0.0.0" / name
        place.mkdir(parents=True)
        features = datasets.Features({"text": datasets.Value("string")})
        with ArrowWriter(path=str(place / "name-train.arrow"), features=features) as writer:
            for i in range(60):
                writer.write({"text": f"commit {number}, document {i} of it, with some more words. " * 40})
            writer.finalize()
        split = {"name": "train", "num_examples": 60, "dataset_name": "name"}
        info = datasets.DatasetInfo(features=features, splits={"train": split}, version="0.0.0")
        info.config_name, info.dataset_name = "default", "name"
        info.write_to_directory(str(place))
        age = 100 - number
        for path in (place, *place.iterdir()):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))

    return download


@pytest.fixture
def data(prepared: Prepared, tmp_path: Path) -> DataConfig:
    """A dataset of the hub, without a revision."""
    own = {"tokenizer": str(prepared.tokenizer_path), "cache_dir": str(tmp_path / "cache")}
    return DataConfig(source=Source.hf, path="org/name", validation_fraction=0.2, workers=1, **own)  # type: ignore


def revisions(folder: Path) -> dict[str, str]:
    return json.loads((folder / "prepared.json").read_text())["revisions"]


def numbers(bins: Bins, prepared: Prepared) -> set[str]:
    from trainer.data import load_tokenizer

    text = load_tokenizer(prepared.tokenizer_path).decode(bins.tokens[:].tolist())
    return {words.split(",")[0] for words in text.split("commit ")[1:]}


def test_the_commit_is_written_down_and_the_prepared_data_stay(commit: Commit, data: DataConfig) -> None:
    commit(OLD, 1)
    first = prepare(data, 512)
    assert revisions(first.folder) == {"hf": OLD} and not list(first.folder.glob("revisions*"))
    commit(NEW, 2)
    assert prepare(data, 512).folder == first.folder, "nothing is asked again"
    with pytest.raises(
        ValueError, match=r"data\.path=org/name: `datasets` has commit bbbbbbbbbbbb here, not aaaaaaaaaaaa"
    ):
        prepare(replace(data, revision=OLD), 512)
    newer = prepare(replace(data, revision=NEW), 512)
    assert revisions(newer.folder) == {"hf": NEW} and numbers(newer.train, newer) == {"2"}
    streamed = prepare(replace(data, revision=NEW, streaming=True), 512)
    assert revisions(streamed.folder) == {"hf": NEW}


def test_what_was_begun_with_a_commit_is_not_finished_with_another(
    commit: Commit, data: DataConfig, tmp_path: Path
) -> None:
    commit(OLD, 1)

    def dies(what: str, done: int, total: int) -> None:
        if any(Path(data.cache_dir).glob("*.partial/done-*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(data, 512, dies)
    (partial,) = Path(data.cache_dir).glob("*.partial")
    assert json.loads((partial / "revisions.json").read_text()) == {"hf": OLD} and any(partial.glob("done-*"))
    commit(NEW, 2)
    with pytest.raises(ValueError, match="not aaaaaaaaaaaa: prepare where") as refusal:
        prepare(data, 512)
    assert "\n" not in str(refusal.value) and f"set data.revision={NEW}" in str(refusal.value)
    (tmp_path / "hf" / "org___name" / "default" / "0.0.0" / NEW).rename(tmp_path / "away")
    finished = prepare(data, 512)
    assert revisions(finished.folder) == {"hf": OLD} and numbers(finished.train, finished) == {"1"}


def test_what_was_begun_from_the_disk_is_not_finished_from_a_stream(data: DataConfig, tmp_path: Path) -> None:
    """Its shards would begin at other documents."""
    datasets, count = pytest.importorskip("datasets"), 6_000
    text = [f"document {i}, {'with some more words. ' * 17}" for i in range(count)]
    datasets.Dataset.from_dict({"text": text}).save_to_disk(str(tmp_path / "saved"))
    data = replace(data, path=str(tmp_path / "saved"), shard_mb=1)

    def dies(what: str, done: int, total: int) -> None:
        if any(Path(data.cache_dir).glob("*.partial/done-*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(data, 512, dies)
    finished = prepare(replace(data, streaming=True), 512)
    assert sum(bins.sidecar.num_documents for bins in (finished.train, finished.validation)) == count
