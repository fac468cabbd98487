"""What was altered in a run folder between two starts, or under a run."""

import os
from pathlib import Path
from typing import Any

import pytest
from run_folders import TEXTS, damage, logged, make_run, snapshot

from precision.errors import UserError
from trainer.checkpoint import list_checkpoints
from trainer.run.location import OWN_FOLDERS
from trainer.run.names import CHECKPOINTS, EVENTS, METRICS, TENSORS
from trainer.sinks.jsonl import JsonLines
from trainer.sinks.log_file import LogFile


def test_a_line_half_written_at_the_kill_is_dropped(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(200,), lines=(100, 200))
    for name in (METRICS, EVENTS):
        with (path / name).open("a") as file:
            file.write('{"step": 200, "loss/lm": 0.3')
    opened(runs, resume="auto")
    assert logged(path) == [100, 200] and logged(path, EVENTS) == [100, 200]


def test_a_whole_last_line_without_its_newline_is_dropped_too(runs: Path, opened: Any) -> None:
    """The next line would be appended to it."""
    path = make_run(runs, checkpoints=(200,), lines=(100,))
    with (path / METRICS).open("a") as file:
        file.write('{"step": 200}')
    opened(runs, resume="auto")
    assert logged(path) == [100] and (path / METRICS).read_bytes().endswith(b"\n")


def test_metrics_that_are_all_earlier_stay_byte_for_byte(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(300,))
    before = (path / METRICS).read_bytes()
    run = opened(runs, resume="auto")
    assert (path / METRICS).read_bytes() == before and run.notes == []


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(100, 200))
    damage(path / CHECKPOINTS / "step_00000200")
    run = opened(runs, resume="auto")
    assert run.first_step == 100 and logged(path) == [0, 100]
    note = run.notes[0]
    assert (note.kind, note.step) == ("checkpoint", 200)
    assert "damaged" in note.message and "step_00000200/rank00000.safetensors has 20 bytes instead of" in note.message
    assert [entry.name for entry in list_checkpoints(path / CHECKPOINTS)] == ["step_00000100"]
    assert (path / CHECKPOINTS / "step_00000200.set_aside").is_dir()


def test_a_run_whose_every_checkpoint_is_damaged_is_refused_not_started_over(runs: Path, opened: Any) -> None:
    path = make_run(runs, checkpoints=(100, 200))
    for checkpoint in list_checkpoints(path / CHECKPOINTS):
        damage(checkpoint)
    before = snapshot(path)
    with pytest.raises(
        ValueError, match=r"every checkpoint of .* is damaged .*step_00000200/rank00000.safetensors"
    ) as refusal:
        opened(runs, resume="auto")
    assert "\n" not in str(refusal.value) and snapshot(path) == before


def test_a_folder_that_was_emptied_under_its_run_is_filled_again(runs: Path, opened: Any) -> None:
    """`rm -rf runs/a/*` leaves the lock: it is this process's own, and no other one's."""
    run, messages = opened(runs), list[str]()
    for path in run.path.iterdir():
        if path.name != ".lock":
            path.unlink()
    run.recreate_if_deleted(4, lambda kind, step, message, **what: messages.append(message))
    assert (run.path / "config.yaml").read_text() == TEXTS["config.yaml"] and "is created again" in messages[0]
    with pytest.raises(ValueError, match="in use by process"):
        opened(runs, resume="auto")


def test_links_planted_in_a_run_folder_are_not_written_through(runs: Path, tmp_path: Path, opened: Any) -> None:
    path, victim = make_run(runs, checkpoints=(100,)), tmp_path / "victim"
    victim.write_text("mine")
    for name in ("config.yaml", "overrides.txt", "precision_plan.txt"):
        (path / f".{name}.new").symlink_to(victim)
    changed = {**TEXTS, "config.yaml": "lr: 2\n", "precision_plan.txt": "other\n"}
    opened(runs, resume="auto", texts=changed).close()
    assert victim.read_text() == "mine" and not list(path.glob(".*.new"))
    (path / "logs").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in (".lock", METRICS, TENSORS, EVENTS, "logs/rank0.log", "logs", "profile", "tensorboard", "wandb"):
        own = path / name
        if own.is_dir():
            own.rmdir()
        own.unlink(missing_ok=True)
        own.symlink_to(elsewhere if name in OWN_FOLDERS else victim)
        before = snapshot(path)
        with pytest.raises(UserError, match=rf"{own}: is a link"):
            opened(runs, resume="auto")
        at = own / "rank0.log" if name in OWN_FOLDERS else own
        for write in (JsonLines, LogFile) if at == own else (LogFile,):
            with pytest.raises(UserError, match=rf"{own}: is a link"):
                write(at, print)
        assert victim.read_text() == "mine" and snapshot(path) == before and not list(elsewhere.iterdir())
        own.unlink()


def test_checkpoints_may_be_links_of_the_users_own_to_folders_of_no_other_run(
    runs: Path, tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(runs, checkpoints=(100, 200))
    one, all_of_them = path / CHECKPOINTS / "step_00000200", path / CHECKPOINTS
    for moved in (one, all_of_them):
        place = tmp_path / f"big-{moved.name}"
        moved.rename(place)
        moved.symlink_to(place)
        run = opened(runs, resume="auto")
        assert run.first_step == 200 and run.resumed_from == one
        run.close()
    real = os.lstat(one), os.lstat(all_of_them)
    for planted, status in zip((one, all_of_them), real, strict=True):
        stranger = os.stat_result((*status[:4], status.st_uid + 1, *status[5:]))
        lstat = Path.lstat
        monkeypatch.setattr(Path, "lstat", lambda at, p=planted, s=stranger, of=lstat: s if at == p else of(at))
        before = snapshot(tmp_path)
        with pytest.raises(UserError, match=rf"{planted}: is a link that another user \(uid {stranger.st_uid}\) made"):
            opened(runs, resume="auto")
        assert snapshot(tmp_path) == before
        monkeypatch.undo()
    other = make_run(tmp_path / "others", checkpoints=(100, 300))
    all_of_them.unlink()
    all_of_them.symlink_to(other / CHECKPOINTS)
    with pytest.raises(UserError, match=rf"{all_of_them}: is a link into the run {other}, which has its own"):
        opened(runs, resume="auto")


@pytest.mark.parametrize("damage", ['{"step": null}', '{"step": "7"}', '{"step": 1e400}', "[" * 100_000, "\0", "[1]"])
def test_damaged_lines_are_dropped_and_reported(runs: Path, opened: Any, damage: str) -> None:
    path = make_run(runs, checkpoints=(200,), lines=(100, 200))
    for name in (METRICS, TENSORS, EVENTS):
        with (path / name).open("a") as file:
            file.write(damage + '\n{"step": 150, "kind": "x"}\n')
    run = opened(runs, resume="auto")
    said = [f"1 damaged line dropped from {name}" for name in (METRICS, TENSORS, EVENTS)]
    assert [note.message for note in run.notes] == said
    assert logged(path) == [100, 200, 150] and logged(path, TENSORS) == [150]


@pytest.mark.parametrize("content", [b"lr: 1\xff\n", b"\x80", b"lr: [", b"a: &a [1]\nb: *a\n", b"[" * 5000])
def test_damaged_texts_do_not_keep_a_run_from_resuming(runs: Path, opened: Any, content: bytes) -> None:
    path = make_run(runs, checkpoints=(200,), lines=(100,))
    for name in TEXTS:
        (path / name).write_bytes(content)
    run = opened(runs, resume="auto")
    assert [note.message for note in run.notes] == [
        f"other settings than before: {path / 'config.yaml'} is damaged and cannot be compared"
    ]
    assert {name: (path / name).read_text() for name in TEXTS} == TEXTS
    assert (path / "config.before_step_00000200.yaml").read_bytes() == content
