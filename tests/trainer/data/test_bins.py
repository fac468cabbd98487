"""Bins hold what was written, and anything else is refused in one line that names the file."""

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from precision.errors import UserError
from trainer.data import Bins, DamagedShard, Prepared, check_whole
from trainer.data.bins import FORMAT, Sidecar, dtype_for
from trainer.data.shard_writer import ShardWriter


def write(path: Path, documents: list[list[list[int]]], vocab_size: int = 1000) -> Bins:
    writer = ShardWriter(path, Sidecar(FORMAT, "here", 0, 0, 0, dtype_for(vocab_size), "", vocab_size, 0, "t", "s"))
    for document in documents:
        for piece in document:
            writer.add(np.array(piece), piece is document[-1], 1)
    writer.close()
    return Bins.open([path], "t")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_the_vocabulary_chooses_the_dtype_and_no_id_is_lost(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    bins = write(tmp_path / "x.bin", [[[vocab_size - 1, 1]]], vocab_size)
    assert bins.tokens.dtype == dtype
    assert bins.tokens.tolist() == [0, vocab_size - 1, 1, 0]


def truncate(folder: Path) -> None:
    content = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(content[:-2])


def alter(folder: Path) -> None:
    content = bytearray((folder / "train.bin").read_bytes())
    content[100] ^= 1
    (folder / "train.bin").write_bytes(content)


def remove(folder: Path) -> None:
    (folder / "train.bin").unlink()


def remove_sidecar(folder: Path) -> None:
    (folder / "train.json").unlink()


def cut_sidecar(folder: Path) -> None:
    (folder / "train.json").write_text((folder / "train.json").read_text()[:-20])


def change(**values: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        sidecar = json.loads((folder / "train.json").read_text())
        (folder / "train.json").write_text(json.dumps(sidecar | values))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"train\.bin: has \d+ bytes, its sidecar says \d+"),
        (alter, r"train\.bin: the contents are not those"),
        (remove, r"train\.bin: the file is missing"),
        (remove_sidecar, r"train\.json: the file is missing"),
        (cut_sidecar, r"train\.json: cannot be read"),
        (change(num_tokens="7"), r"train\.json: has a value that makes no sense"),
        (change(dtype="float32"), r"train\.json: has a value that makes no sense"),
        (change(extra=1), r"train\.json: cannot be read"),
        (change(format=99), r"train\.json: has format 99"),
    ],
)
def test_damage_is_named(prepared: Prepared, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = shutil.copytree(prepared.folder, tmp_path / "damaged")
    check_whole(Bins.open([folder / "train.bin"], prepared.tokenizer_hash).shards, False)
    damage(folder)
    with pytest.raises(ValueError, match=message + r"[^\n]*: delete [^\n]*damaged and prepare the data again$"):
        check_whole(Bins.open([folder / "train.bin"], prepared.tokenizer_hash).shards, False)


def test_bins_of_another_tokenizer_are_refused(prepared: Prepared) -> None:
    with pytest.raises(ValueError, match=r"packed with tokenizer [0-9a-f]{12}, not with ffffffffffff"):
        Bins.open([prepared.train.path], "f" * 64)


def test_a_file_cut_off_under_a_run_is_named_and_one_deleted_stays_readable(tmp_path: Path) -> None:
    bins = write(tmp_path / "x.bin", [[list(range(1, 101))]])
    (tmp_path / "x.bin").rename(tmp_path / "y.bin")
    (tmp_path / "y.bin").unlink()
    assert bins.gather(np.array([24]), 4).tolist() == [[96, 97, 98, 99, 100]]

    bins = write(tmp_path / "x.bin", [[list(range(1, 101))]])
    os.truncate(tmp_path / "x.bin", 60)
    assert bins.gather(np.array([6]), 4).tolist() == [[24, 25, 26, 27, 28]]
    with pytest.raises(DamagedShard, match=r"bins .*x\.bin: ends at byte 60; it was whole when the run began: delete "):
        bins.gather(np.array([0, 7]), 4)
    with pytest.raises(DamagedShard, match="ends at byte 60"):
        _ = bins.tokens


def test_a_token_outside_the_vocabulary_is_refused_before_it_reaches_a_gpu(tmp_path: Path) -> None:
    bins = write(tmp_path / "x.bin", [[list(range(1, 101))]])
    with (tmp_path / "x.bin").open("r+b") as file:  # in place, under the run
        file.seek(20)
        file.write(b"\xff\xff")
    assert bins.gather(np.array([0]), 4).tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(DamagedShard, match=r"has the token 65535 and a vocabulary of 1000 entries"):
        bins.gather(np.array([2]), 4)


def test_several_bins_have_as_many_files_open_as_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.bin", [[[1, 2]]])
    monkeypatch.setattr("trainer.data.bins.SPARE_FILES", 10)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 25, before[1]))
        bins = [Bins.open([tmp_path / "x.bin"] * 20, "t") for _ in range(3)]
        assert Bins.join(bins).num_tokens == 60 * 3 + 1
        monkeypatch.setattr(resource, "getrlimit", lambda _: (9, 9))
        with pytest.raises(UserError, match=r"raise that limit \(ulimit -Hn\), or prepare"):
            Bins.open([tmp_path / "x.bin"], "t")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
