"""Run folders are read as far as they are written, read on later, and again when what was read is true no longer."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import make_run, opened

from trainer.health.dashboard import read
from trainer.health.dashboard.page import page, payload
from trainer.health.dashboard.read import Run


def lines(path: Path, *entries: dict[str, Any] | str, mode: str = "a") -> None:
    """Entries as JSON lines; a text as it is."""
    with path.open(mode) as file:
        file.writelines(one if isinstance(one, str) else json.dumps(one) + "\n" for one in entries)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two logged steps."""
    lines(tmp_path / "metrics.jsonl", {"step": 1, "loss/lm": 5.0}, {"step": 2, "loss/lm": 4.0, "moe/entropy": 0.9})
    return tmp_path


def course(run: Run, key: str = "loss/lm") -> dict[int, float]:
    series = run.series[key]
    return dict(zip(series.steps, series.values, strict=True))


def test_a_growing_run_is_read_incrementally(folder: Path) -> None:
    run = opened(folder)
    assert course(run) == {1: 5.0, 2: 4.0} and course(run, "moe/entropy") == {2: 0.9}
    lines(folder / "metrics.jsonl", '{"step": 3, "loss')  # half a line waits
    run.poll()
    assert course(run) == {1: 5.0, 2: 4.0}
    lines(folder / "metrics.jsonl", '/lm": 3.0}\n', {"step": 3, "loss/validation": 3.5})
    lines(folder / "events.jsonl", {"step": 3, "kind": "alert", "message": "x"})
    run.poll()
    assert course(run) == {1: 5.0, 2: 4.0, 3: 3.0} and run.last("loss/validation") == 3.5
    assert [event["kind"] for event in run.events] == ["alert"]


def test_lines_without_metrics_are_skipped(folder: Path) -> None:
    odd = ["garbage\n", "[1]\n", '{"step": 1e400}\n', '{"step": "9"}\n', "[" * 100_000 + "\n"]
    odd += [f'{{"a": {10**400}}}\n', '{"loss/lm": 1}\n', '{"step": null}\n', '{"step": 9, "loss/lm": null}\n']
    lines(folder / "metrics.jsonl", *odd, {"step": 10, "loss/lm": 1.0})
    lines(folder / "tensors.jsonl", {"step": 1, "fp8": {"scale": [1.0]}}, {"names": 3}, "\x00\n", {"step": 2, "fp8": 1})
    lines(folder / "events.jsonl", {"step": 1}, {"kind": 7})
    run = opened(folder)
    assert course(run) == {1: 5.0, 2: 4.0, 10: 1.0} and not run.grids and not run.events


@pytest.mark.filterwarnings("error")
def test_a_page_is_made_of_damaged_files(tmp_path: Path) -> None:
    """Bits flipped at random: no traceback, no warning."""
    whole = make_run(tmp_path / "whole", 20)
    for number in range(60):
        folder = shutil.copytree(whole, tmp_path / "run")
        chance = random.Random(number)
        path = chance.choice(sorted(path for path in folder.iterdir() if path.is_file()))
        content = bytearray(path.read_bytes())
        for _ in range(3):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        run = opened(folder)
        assert "</html>" in page(payload([run], "x"))
        shutil.rmtree(folder)


def test_a_file_that_is_replaced_is_read_again(folder: Path) -> None:
    run = opened(folder)
    lines(folder / "metrics.jsonl", {"step": 1, "loss/lm": 5.0}, mode="w")  # a resumed run drops lines
    run.poll()
    assert course(run) == {1: 5.0} and not run.poll()
    lines(folder / "metrics.jsonl", {"step": 2, "loss/lm": 4.5}, {"step": 3, "loss/lm": 4.2})
    run.poll()
    assert course(run) == {1: 5.0, 2: 4.5, 3: 4.2}
    # as long as before, and longer: known by what it ends in
    lines(folder / "metrics.jsonl", *({"step": step, "loss/lm": 6.5} for step in range(1, 6)), mode="w")
    run.poll()
    assert course(run) == dict.fromkeys(range(1, 6), 6.5)


def test_a_run_that_goes_back_takes_the_new_course(folder: Path) -> None:
    names = {"names": {"fp8": ["a", "b"]}}
    columns = [{"step": step, "fp8": {"scale": [step, 2.0]}} for step in (1, 2)]
    lines(folder / "tensors.jsonl", names, *columns)
    run = opened(folder)
    lines(folder / "metrics.jsonl", {"step": 1, "loss/lm": 5.5}, {"step": 3, "loss/lm": 3.0})
    lines(folder / "tensors.jsonl", names, {"step": 1, "fp8": {"scale": [7.0, None]}})
    run.poll()
    assert course(run) == {1: 5.5, 3: 3.0} and not run.series["moe/entropy"].steps
    grid = run.grids["fp8/scale"]
    assert list(grid.steps) == [1]
    np.testing.assert_array_equal(grid.matrix(2), [[7.0, np.nan]])


def test_rows_that_change_on_a_resume(folder: Path) -> None:
    first, other = {"names": {"fp8": ["a", "b"]}}, {"names": {"fp8": ["c", "b"]}}
    tensors = folder / "tensors.jsonl"
    lines(tensors, first, {"step": 1, "fp8": {"scale": [1.0, 2.0]}}, other, {"step": 2, "fp8": {"scale": [3.0, 4.0]}})
    lines(tensors, {"step": 2, "shadow": {"cosine": {"x": 0.5}}, "load": [[1, 2]]})
    run = opened(folder)
    assert run.rows["fp8"] == ["a", "b", "c"] and run.rows["shadow"] == ["x"] and run.load == (2, [[1, 2]])
    np.testing.assert_array_equal(run.grids["fp8/scale"].matrix(3), [[1, 2, np.nan], [np.nan, 4, 3]])


def test_a_folder_that_comes_later_and_goes(tmp_path: Path) -> None:
    run = opened(tmp_path / "later")
    assert not run.there and not run.series
    run.path.mkdir()
    lines(run.path / "metrics.jsonl", {"step": 1, "loss/lm": 5.0})
    (run.path / "config.yaml").write_text("precision: {name: bf16}\n")
    run.poll()
    assert run.there and run.config["precision"]["name"] == "bf16"
    for path in run.path.iterdir():
        path.unlink()
    run.path.rmdir()
    run.poll()
    assert not run.there and course(run) == {1: 5.0}  # what was read stays


def test_of_a_file_that_is_too_long_every_nth_line_is_read(long_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (long_run.path / "tensors.jsonl").stat().st_size
    monkeypatch.setattr(read, "BUDGET", size // 10)
    run = opened(long_run.path)
    assert run.stride == 11
    assert 150 < len(run.grids["fp8/scale"].steps) < 250  # of 2000
    assert len(run.grids["fp8/error"].steps) == 40  # looks are few: all of them
    assert len(run.series["loss/lm"].steps) == 2000


def test_a_long_run_is_decimated(long_run: Run) -> None:
    assert long_run.stride == 1 and len(long_run.grids["fp8/scale"].steps) == 2000
    assert long_run.last_step == 4000 and len(long_run.rows["fp8"]) == 162
