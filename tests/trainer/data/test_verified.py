"""Tokens are hashed once: then again where size or time are others, or when asked for; ranks share the work."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from run_folders import snapshot

from trainer.data import DataConfig, check_whole, find_or_build, prepare
from trainer.data.bins import Shard
from trainer.data.prepared import open_prepared

MakeConfig = Callable[..., DataConfig]


def on_ranks(folders: list[Path], everything: bool = False) -> list[str | None]:
    """`check_whole` on as many ranks as folders, each of which opens its own; what they raise."""
    meeting, box = threading.Barrier(len(folders)), list[Any](folders)

    def one(rank: int) -> str | None:
        def gather(value: Any, named: str = "") -> list[Any]:
            box[rank] = value
            meeting.wait()
            found = list(box)
            meeting.wait()
            return found

        try:
            check_whole(open_prepared(folders[rank]).shards, everything, rank, gather)
        except ValueError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(one, range(len(folders))))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that are read whole."""
    names: list[str] = []
    plain = Shard.sha256
    monkeypatch.setattr(Shard, "sha256", lambda self: (names.append(self.path.name), plain(self))[1])
    return names


@pytest.fixture
def data(make_config: MakeConfig, own_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Several shards, packed here."""
    monkeypatch.setattr("trainer.data.folder_builder.MEGABYTE", 20_000)
    return make_config(own_corpus, shard_mb=1, workers=1)


def flip(path: Path, keep_time: bool = False) -> None:
    status, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_start_reads_nothing_that_was_read_before(data: DataConfig, hashed: list[str], tmp_path: Path) -> None:
    folder = prepare(data, 300).folder
    prepare(data, 300)
    assert hashed == []  # not even once: they were hashed as they were written
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    shards = open_prepared(copy).shards
    assert len(shards) > 3
    check_whole(shards, False)
    assert sorted(hashed) == sorted(shard.path.name for shard in shards)
    hashed.clear()
    check_whole(open_prepared(copy).shards, False)
    assert hashed == []
    os.utime(shards[1].path)
    check_whole(open_prepared(copy).shards, False)
    assert hashed == [shards[1].path.name]


def test_an_altered_file_is_refused_at_each_start(data: DataConfig) -> None:
    folder = prepare(data, 300).folder
    flip(folder / "train-00001.bin")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"train-00001\.bin: the contents are not those [^\n]*: delete "):
            prepare(data, 300)


def test_damage_that_leaves_the_time_as_it_was_is_found_when_all_is_read(data: DataConfig) -> None:
    folder = prepare(data, 300).folder
    flip(folder / "train-00001.bin", keep_time=True)
    assert not prepare(data, 300).built
    data.verify = True
    with pytest.raises(ValueError, match=r"train-00001\.bin: the contents are not those"):
        prepare(data, 300)


@pytest.mark.parametrize("damage", ["remove", "flip", "forge"])
def test_a_list_that_is_gone_or_damaged_is_as_none(data: DataConfig, hashed: list[str], damage: str) -> None:
    folder = prepare(data, 300).folder
    listing = folder / "verified.json"
    if damage == "remove":
        listing.unlink()
    elif damage == "flip":
        flip(listing)
    else:
        content = json.loads(listing.read_text())
        del content["digest"]
        listing.write_text(json.dumps(content))
    prepare(data, 300)
    assert len(hashed) == len(open_prepared(folder).shards)


def test_ranks_read_a_part_each_and_all_refuse_what_one_finds(data: DataConfig, hashed: list[str]) -> None:
    folder = find_or_build(data, 300).folder
    assert on_ranks([folder] * 3) == [None] * 3
    assert hashed == []
    assert on_ranks([folder] * 3, everything=True) == [None] * 3
    assert sorted(hashed) == sorted(shard.path.name for shard in open_prepared(folder).shards)  # each once
    (folder / "verified.json").unlink()
    flip(folder / "train-00001.bin")
    found = on_ranks([folder] * 3)
    assert len(set(found)) == 1 and "train-00001.bin: the contents are not those" in str(found[0])
    assert not (folder / "verified.json").exists()


def test_nodes_with_copies_of_their_own_read_them_all(data: DataConfig, hashed: list[str], tmp_path: Path) -> None:
    folder = prepare(data, 300).folder
    other = shutil.copytree(folder, tmp_path / "copy")
    count = len(open_prepared(folder).shards)
    assert on_ranks([folder, folder, other, other], everything=True) == [None] * 4
    assert len(hashed) == 2 * count
    flip(other / "train-00001.bin", keep_time=True)
    (found,) = set(on_ranks([folder, folder, other, other], everything=True))
    assert re.match(r"rank [23]: bins ", str(found))
    assert f"{other / 'train-00001.bin'}: the contents are not those" in str(found)


def test_a_node_with_another_text_is_refused(
    data: DataConfig, make_config: MakeConfig, own_corpus: Path, tmp_path: Path
) -> None:
    folder = prepare(data, 300).folder
    stale = shutil.copytree(own_corpus, tmp_path / "stale")
    file = sorted(path for path in stale.rglob("*") if path.is_file())[0]
    file.write_text(file.read_text() + "one sentence more\n")
    tokenizer = folder / "tokenizer.json"
    other = prepare(make_config(stale, shard_mb=1, workers=1, tokenizer=str(tokenizer)), 300).folder
    (found,) = set(on_ranks([folder, folder, other, other]))
    assert re.match(rf"data: rank 2 \(.*{other}\) and 1 more would train on another text than the others: ", str(found))


def test_a_folder_that_cannot_be_written_is_reported(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(prepare(data, 300).folder, tmp_path / "copy", copy_function=shutil.copyfile)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("trainer.data.verified.write_signed", refuse)
    with pytest.warns(UserWarning, match=r"verified\.json: cannot be written \(Permission denied\), .* at each start"):
        check_whole(open_prepared(copy).shards, False)


def test_a_shard_that_was_damaged_after_its_process_was_killed_is_packed_again(data: DataConfig) -> None:
    """So is one whose record is: what of it was wrong would be signed as it is."""
    folder = prepare(data, 300).folder
    whole = snapshot(folder)
    for damaged in ("train-00000.bin", "train-00000.json", "done-00001.json"):
        shutil.rmtree(folder)

        def stop(what: str, done: int, total: int) -> None:
            if what == "packing the text" and done == total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(data, 300, stop)
        (partial,) = folder.parent.glob("*.partial")
        flip(partial / damaged)
        assert snapshot(prepare(data, 300).folder) == whole
