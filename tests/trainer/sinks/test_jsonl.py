"""Lines of JSON: whole ones only, whatever the disk does."""

import errno
import os
import shutil
import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from full_disk import full_disk
from run_lines import lines

from trainer.files import replace_file, trim
from trainer.sinks.jsonl import JsonLines


def test_lines_from_many_threads_stay_whole(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "x.jsonl", pytest.fail)

    def work(worker: int) -> None:
        for i in range(200):
            sink.write({"worker": worker, "i": i, "padding": "x" * (i * 50)})

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    found = lines(tmp_path / "x.jsonl")
    assert sorted((entry["worker"], entry["i"]) for entry in found) == [(w, i) for w in range(4) for i in range(200)]


def test_numbers_come_back_exactly_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "x.jsonl", pytest.fail)
    entry = {"a": 0.1 + 0.2, "b": 2**60, "c": 5e-324, "nan": float("nan"), "inf": float("inf"), "text": "naïve\n"}
    sink.write(entry)
    assert lines(tmp_path / "x.jsonl") == [entry | {"nan": None, "inf": None}]  # visible before close
    sink.close()


def test_a_full_disk_takes_back_the_half_line_and_is_reported_once(tmp_path: Path) -> None:
    warnings: list[str] = []
    path = tmp_path / "x.jsonl"
    sink = JsonLines(path, warnings.append)
    sink.write({"step": 1})
    with full_disk(path.stat().st_size + 5):
        for step in (2, 3):
            sink.write({"step": step})
    sink.write({"step": 4})
    sink.close()
    assert lines(path) == [{"step": 1}, {"step": 4}]
    assert len(warnings) == 2 and str(path) in warnings[0]
    assert warnings[1] == f"{path} can be written again; 2 lines lost"


def test_lines_are_dropped_of_files_larger_than_memory(tmp_path: Path) -> None:
    path, row = tmp_path / "x.jsonl", " " * 2000
    path.write_bytes(b"".join(f'{{"step": {step}, "row": "{row}"}}\n'.encode() for step in range(5000)))
    tracemalloc.start()
    dropped = trim(path, 3999)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dropped == (1000, 0) and peak < 1_000_000
    assert [line["step"] for line in lines(path)] == list(range(4000))


def test_a_file_that_cannot_be_replaced_stays_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    replace_file(path, b"old")
    with full_disk(10), pytest.raises(OSError, match=r"recovery\.json"):
        replace_file(path, b"new, and too long")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_a_file_deleted_under_the_run_is_started_again(tmp_path: Path) -> None:
    warnings: list[str] = []
    path = tmp_path / "run" / "x.jsonl"
    path.parent.mkdir()
    sink = JsonLines(path, warnings.append)
    sink.write({"names": ["a"]}, first=True)
    sink.write({"step": 1})
    shutil.rmtree(path.parent)
    for step in (2, 3):
        sink.write({"step": step})
    sink.close()
    assert lines(path) == [{"names": ["a"]}, {"step": 2}, {"step": 3}]
    assert warnings == [f"{path} was deleted or moved: a new one starts here"]


def test_a_disk_that_is_away_for_a_moment_costs_the_lines_of_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, warnings = tmp_path / "x.jsonl", list[str]()

    def away(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    sink = JsonLines(path, warnings.append)
    for step in (1, 2):
        sink.write({"step": step})
    sink.trim(1)  # the next write opens another file
    with monkeypatch.context() as disk:
        disk.setattr("trainer.sinks.jsonl.open_own", away)
        sink.write({"step": 2})
        disk.setattr(os, "fstat", away)
        sink.write({"step": 3})
    sink.write({"step": 4})
    sink.close()
    assert [entry["step"] for entry in lines(path)] == [1, 4]
    assert [text.removeprefix(f"{path} ") for text in warnings] == [
        "cannot be written (Stale file handle); lines are being lost",
        "can be written again; 2 lines lost",
    ]


def test_a_file_that_grows_beyond_its_limit_keeps_lines_of_all_steps(tmp_path: Path) -> None:
    """Every tenth line is ten times as long: neither kind disappears, in no part of the run."""
    limit, said, path, steps = 60_000, [], tmp_path / "x.jsonl", range(10, 20_010, 10)
    sink = JsonLines(path, pytest.fail, limit, said.append)
    sink.write({"names": {"fp8": ["a", "b"]}})
    for step in steps:
        sink.write({"step": step, "padding": "x" * (1000 if step % 100 == 0 else 100)})
        assert path.stat().st_size <= limit
    sink.close()
    head, *rest = lines(path)
    found = [entry["step"] for entry in rest]
    assert head == {"names": {"fp8": ["a", "b"]}} and found == sorted(set(found)) and found[-1] == steps[-1]
    for eighth in range(8):
        here = [step for step in found if step * 8 // (steps[-1] + 1) == eighth]
        assert any(step % 100 == 0 for step in here) and any(step % 100 for step in here), eighth
    assert len(said) == 1 and f"{path} exceeds 60,000 bytes" in said[0]


def test_a_file_that_cannot_be_made_shorter_grows_and_is_tried_again_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def full(path: Path) -> None:
        tried.append(path.stat().st_size)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.sinks.jsonl.thin", full)
    sink = JsonLines(tmp_path / "x.jsonl", pytest.fail, 1000, lambda text: None)
    for step in range(1000):
        sink.write({"step": step})
    sink.close()
    assert [entry["step"] for entry in lines(tmp_path / "x.jsonl")] == list(range(1000))
    assert tried and all(later >= 2 * earlier for earlier, later in pairwise(tried))
