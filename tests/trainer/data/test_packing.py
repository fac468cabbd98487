"""Several processes, kills in between, any number of shards: always the same documents in the same order, once."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import snapshot
from small import steady

from precision.errors import RunError, UserError
from trainer.data import Bins, DataConfig, Loader, Prepared, Source, prepare
from trainer.data.bins import FORMAT, Shard, Sidecar
from trainer.data.shard_writer import ShardWriter

MakeData = Callable[..., DataConfig]

KILLED = """
import os, signal, sys
from pathlib import Path
from trainer.data import DataConfig, Source, prepare
module = sys.modules["trainer.data.folder_builder"]
module.MEGABYTE = 10_000
data = DataConfig(source=Source.files, path=sys.argv[1], glob="*.jsonl", tokenizer=sys.argv[2], cache_dir=sys.argv[3],
                  validation_fraction=0.2, shard_mb=1, workers=2)

def progress(what, done, total):
    if len(list(Path(sys.argv[3]).glob("*.partial/done-*.json"))) >= 3:
        os.kill(os.getpid(), signal.SIGKILL)

prepare(data, 512, progress)
"""


@pytest.fixture
def make_data(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeData:
    """(cache, settings ...) -> a corpus of a dozen shards of 10 kB."""
    monkeypatch.setattr("trainer.data.folder_builder.MEGABYTE", 10_000)
    monkeypatch.setattr("trainer.data.sources.BLOCK_BYTES", 1 << 20)
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abcdefghijkl":
        lines = [json.dumps({"text": f"{name} {n} " * (n % 40 + 1)}) for n in range(100)]
        (folder / f"{name}.jsonl").write_text("\n".join([*lines, '{"text": ""}']))
    fixed = {"source": Source.files, "path": str(folder), "glob": "*.jsonl", "tokenizer": str(prepared.tokenizer_path)}
    fixed |= {"validation_fraction": 0.2, "shard_mb": 1}

    def make(cache: str, **settings: object) -> DataConfig:
        return DataConfig(**{**fixed, "cache_dir": str(tmp_path / cache), **settings})

    return make


def test_the_number_of_processes_and_kills_change_nothing(make_data: MakeData, programs: Any, tmp_path: Path) -> None:
    alone = prepare(make_data("one", workers=1), 512)
    assert len(alone.train.shards) == 12 and alone.train.sidecar.num_documents > 900
    assert sum(each.count for each in alone.skipped) == 12
    whole = snapshot(alone.folder)
    held_out = len(alone.validation.shards)
    assert 1 < held_out < 12, "files of `shard_mb` each, which ranks share to verify them"
    expected = {"tokenizer.json", "prepared.json"}
    for side, count in (("train-", 12), ("validation.", held_out)):
        expected |= {f"{side}{n:05}.{suffix}" for n in range(count) for suffix in ("bin", "json")}
    assert set(whole) == expected

    data = make_data("killed", workers=2)
    (script := tmp_path / "prepares.py").write_text(KILLED)  # at its top: workers must not run it again
    process = programs.run(script, data.path, data.tokenizer, data.cache_dir)
    assert process.returncode == -signal.SIGKILL
    (partial,) = Path(data.cache_dir).glob("*.partial")
    finished = {path.name.replace("done", "train").replace("json", "bin") for path in partial.glob("done-*.json")}
    files = {name: (partial / name).stat().st_ino for name in finished}
    assert 3 <= len(finished) < 12
    result = prepare(data, 512)
    assert result.built and snapshot(result.folder) == whole
    kept = {name: (result.folder / name).stat().st_ino for name in finished}
    assert kept == files  # what was done was not done again
    assert [path for path in Path(data.cache_dir).iterdir() if path.is_dir()] == [result.folder]


def test_a_killed_worker_is_reported_and_finished_shards_are_kept(make_data: MakeData) -> None:
    data = make_data("cache", workers=2)

    def kill(what: str, done: int, total: int) -> None:
        if what == "packing the text" and any(Path(data.cache_dir).glob("*.partial/done-*.json")):
            for worker in multiprocessing.active_children()[:1]:
                worker.kill()

    with pytest.raises(
        RuntimeError, match=r"data\.workers: a process that prepares a shard was killed .*; start again"
    ):
        prepare(data, 512, kill)
    assert any(Path(data.cache_dir).glob("*.partial/done-*.json"))
    assert prepare(data, 512).train.sidecar == prepare(make_data("one", workers=1), 512).train.sidecar


def test_ctrl_c_is_for_the_first_process_also_while_workers_start(make_data: MakeData) -> None:
    data = make_data("cache", workers=2)
    masks: list[str] = []

    def look(what: str, done: int, total: int) -> None:
        status = [Path(f"/proc/{worker.pid}/status").read_text() for worker in multiprocessing.active_children()]
        masks.extend(line.split()[1] for text in status for line in text.splitlines() if line.startswith("SigBlk"))

    prepare(data, 512, look)
    assert masks and all(int(mask, 16) >> (signal.SIGINT - 1) & 1 for mask in masks)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_does_not_import_torch() -> None:
    """It takes a second and 200 MB in each."""
    code = "import sys, trainer.data.workers; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_process_that_cannot_be_started_is_no_fault_of_the_cache(
    make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*command: object, **how: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", refused)
    with pytest.raises(RunError, match=r"^data\.workers: a process cannot be started \(Resource .*: set"):
        prepare(make_data("one", workers=2), 512)
    monkeypatch.setattr("trainer.data.packing.Packer.pack", refused)  # any other error of the system
    with pytest.raises(UserError, match=r"cannot be written \(Resource .*\): correct that, or set"):
        prepare(make_data("one", workers=1), 512)


def test_a_mistake_that_a_worker_finds_ends_all_and_is_one_line(make_data: MakeData) -> None:
    data = make_data("cache", workers=2)
    with (Path(str(data.path)) / "h.jsonl").open("a") as file:
        file.write("\n{bad")
    with pytest.raises(ValueError, match=r"data\.skip_damaged=false: h\.jsonl, line \d+: not JSON: repair"):
        prepare(data, 512)
    # what other shards have become is not lost when damage is allowed then
    (partial,) = Path(data.cache_dir).glob("*.partial")
    result = prepare(replace(data, skip_damaged=True), 512)
    assert not partial.exists() and [each.count for each in result.skipped if each.why == "not JSON"] == [1]


def test_each_token_of_all_shards_is_a_target_once_an_epoch(make_data: MakeData) -> None:
    bins = prepare(make_data("one", workers=1), 512).train
    stream = np.concatenate(
        [shard.read(n > 0, shard.sidecar.num_tokens - (n > 0)) for n, shard in enumerate(bins.shards)]
    )
    assert len(bins.shards) == 12 and bins.num_tokens == len(stream) and (bins.tokens == stream).all()
    ends = np.flatnonzero(stream == bins.sidecar.end_of_text)
    assert len(ends) == bins.sidecar.num_documents + 1 and (np.diff(ends) > 1).all()  # no end of text twice in a row
    loader = Loader(bins, steady(37, 4), seed=3)
    seen = np.zeros(len(stream), int)
    for _ in range(loader.num_windows // 4):
        batch = loader.next().numpy()
        for row, window in zip(batch, loader.windows_at(loader.served), strict=True):
            assert (row == stream[window * 37 : window * 37 + 38]).all()
            seen[window * 37 + 1 : window * 37 + 38] += 1
    assert seen.max() == 1 and seen.sum() >= (loader.num_windows - 3) * 37


def test_more_shards_than_files_may_be_open(make_data: MakeData, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held out of each is put together; a process may have some hundred files open."""
    most, opened = 0, Shard.open

    def counted(path: Path, tokenizer_hash: str) -> Shard:
        nonlocal most
        shard = opened(path, tokenizer_hash)
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        most = max(most, sum("/held-" in link for link in links))
        return shard

    monkeypatch.setattr(Shard, "open", counted)
    prepare(make_data("one", workers=1), 512)
    assert most == 1


def test_a_seam_is_one_token(tmp_path: Path) -> None:
    like = Sidecar(FORMAT, "x", 0, 0, 0, "uint16", "", 99, 0, "t", "s")
    for n, documents in enumerate([[[1, 2], [3]], [[4]], [[5, 6]]]):
        writer = ShardWriter(tmp_path / f"train-{n}.bin", like)
        for ids in documents:
            writer.add(np.array(ids), True, 1)
        writer.close()
    bins = Bins.open(sorted(tmp_path.glob("*.bin")), "t")
    assert bins.tokens.tolist() == [0, 1, 2, 0, 3, 0, 4, 0, 5, 6, 0]
    assert bins.num_windows(2) == 5
    assert bins.gather(np.arange(5), 2).tolist() == [[0, 1, 2], [2, 0, 3], [3, 0, 4], [4, 0, 5], [5, 6, 0]]
    assert (bins.sidecar.num_documents, bins.path.name) == (4, "train-*.bin")
    assert Bins.join([bins, bins]).tokens.tolist() == [*bins.tokens.tolist(), *bins.tokens.tolist()[1:]]
