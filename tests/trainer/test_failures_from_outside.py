"""The world outside of a run: disks that fill up, folders that go, files of data that are damaged, signals."""

import contextlib
import fcntl
import os
import pty
import resource
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_lines import events, metrics
from torch import Tensor

from trainer.config import Config
from trainer.config.data import source_configs
from trainer.data import DamagedShard
from trainer.data.corpus import choose_held_out, scan
from trainer.launch import signals
from trainer.launch.liveness.rank_group import RankGroup
from trainer.launch.world import World
from trainer.step.guard import TrainingStopped
from trainer.trainer import Trainer

Configs = Callable[..., Config]
ROOT = Path(__file__).parents[2]
LIMIT = 300_000  # bytes of a file: fewer than a checkpoint has, more than anything else here


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture
def disk() -> Iterator[Callable[[bool], None]]:
    """Fill the disk, or free it: files cannot grow beyond LIMIT."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(full: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT if full else before[0], before[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def at(trainer: Trainer, step: int, do: Callable[[], object]) -> None:
    """Have something happen before a step."""
    original = trainer._step

    def stepped(tokens: Tensor) -> None:
        if trainer.step == step:
            do()
        original(tokens)

    trainer._step = stepped  # type: ignore[method-assign]


def test_a_full_disk_costs_checkpoints_and_not_the_run(config: Configs, disk: Callable[[bool], None]) -> None:
    trainer = Trainer(config("run.name=a", "checkpoint.every=1", "checkpoint.keep=0"))
    at(trainer, 3, lambda: (trainer.run.checkpointer.wait_for_save(), disk(True)))
    at(trainer, 5, lambda: (trainer.run.checkpointer.wait_for_save(), disk(False)))
    run = trainer.train().folder
    assert checkpoints(run) == [f"step_{step:08d}" for step in (1, 2, 5, 6)]
    alerts = events(run, "alert")
    assert [(alert["step"], alert["rule"]) for alert in alerts] == [(3, "checkpoint"), (4, "checkpoint")]
    assert "File too large" in alerts[0]["message"] and "step_00000003" in alerts[0]["path"]
    assert len(metrics(run)) == 7


def test_a_run_whose_end_cannot_be_saved_reports_it_after_its_summary(
    config: Configs, disk: Callable[[bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(config("run.name=a", "checkpoint.every=2"))
    at(trainer, 6, lambda: (trainer.run.checkpointer.wait_for_save(), disk(True)))
    with pytest.raises(
        TrainingStopped, match=r"training has finished, .* not saved: .*step 6 .*File too large.* before is intact"
    ) as end:
        trainer.train()
    assert end.value.exit_code == 1 and "validation loss" in capsys.readouterr().out
    run = trainer.run.folder.path
    assert len(events(run, "alert")) == 2  # tried twice
    assert checkpoints(run)[-1] == "step_00000004"
    disk(False)
    assert Trainer(config("run.name=a", "checkpoint.every=2", "run.resume=auto")).train().step == 6
    assert checkpoints(run)[-1] == "step_00000006"


def test_a_stopped_run_that_cannot_save_is_not_called_saved(config: Configs, disk: Callable[[bool], None]) -> None:
    trainer = Trainer(config("run.name=a"))
    at(trainer, 2, lambda: (disk(True), signal.raise_signal(signal.SIGTERM)))
    with pytest.raises(
        TrainingStopped, match=r"stopped by SIGTERM after step 2, not saved: checkpoint of step 2"
    ) as end:
        trainer.train()
    assert end.value.exit_code == 1
    assert [event["message"] for event in events(trainer.run.folder.path, "signal")] == [
        "stopped by SIGTERM after step 2; not saved"
    ]


def test_a_folder_deleted_under_the_run_is_made_again_and_can_be_resumed(config: Configs) -> None:
    trainer = Trainer(config("run.name=a", "checkpoint.every=2"))
    run = trainer.run.folder.path
    before = {name: (run / name).read_bytes() for name in ("config.yaml", "precision_plan.txt", "backends.json")}
    at(trainer, 4, lambda: (trainer.run.checkpointer.wait_for_save(), shutil.rmtree(run)))
    trainer.train()
    assert {name: (run / name).read_bytes() for name in before} == before
    assert checkpoints(run) == ["step_00000004", "step_00000006"]
    assert [line["step"] for line in metrics(run)] == [4, 5, 6, 6]
    told = [(alert["rule"], alert["step"]) for alert in events(run, "alert")]
    assert ("disk", 4) in told
    with pytest.raises(ValueError, match="exists"):
        Trainer(config("run.name=a"))
    again = Trainer(config("run.name=a", "run.resume=auto", "trainer.max_steps=7"))
    assert again.step == 6
    again.train()
    assert events(run, "data") == []  # the same data: nothing to say


def test_data_cut_off_under_a_run_end_it_in_one_line(config: Configs, tmp_path: Path) -> None:
    trainer = Trainer(config("run.name=a", "checkpoint.every=1", f"data.cache_dir={tmp_path / 'cache'}"))
    path = trainer.run.data.train.path
    at(trainer, 3, lambda: os.truncate(path, 100))
    with pytest.raises(DamagedShard, match=r"train\.bin: ends at byte 100; .*: delete .* run\.resume=auto") as end:
        trainer.train()
    assert "\n" not in str(end.value)
    more = ("run.resume=auto", f"data.cache_dir={tmp_path / 'cache'}")
    with pytest.raises(ValueError, match=r"train\.bin: has 100 bytes, its sidecar says"):
        Trainer(config("run.name=a", *more))
    shutil.rmtree(path.parent)  # as the line says
    assert Trainer(config("run.name=a", *more)).train().step == 6


def test_a_validation_text_that_has_changed_is_reported_at_the_resume(
    config: Configs, corpus: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    words = (f"data.path={folder}", "run.name=a", "run.resume=auto")
    run = Trainer(config(*words, "trainer.max_steps=1")).train().folder
    held_out = choose_held_out(scan(*source_configs(config(*words).data)).documents, 0.3)[0].path
    (folder / held_out).write_text("something else " * 99)  # the training text is what it was
    Trainer(config(*words, "trainer.max_steps=1")).train()
    (event,) = events(run, "data")
    assert event["message"].endswith("validation.bin has changed, and so loss/validation will")


def test_what_is_left_out_of_the_data_is_counted_and_reported(config: Configs, corpus: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    (folder / "latin.txt").write_bytes("é a".encode("latin-1"))
    words = (f"data.path={folder}", f"data.cache_dir={tmp_path / 'cache'}", "trainer.max_steps=2")
    with pytest.raises(ValueError, match=r"data\.skip_damaged=false: latin\.txt, byte 0 in line 1: not UTF-8 text: "):
        Trainer(config("run.name=a", *words))
    assert not (tmp_path / "runs").exists()
    run = Trainer(config("run.name=a", "data.skip_damaged=true", *words)).train().folder
    assert [line["data/skipped_shards"] for line in metrics(run, "loss/total")] == [1, 1]
    (event,) = events(run, "data")
    assert "latin.txt (not UTF-8 text, byte 0 in line 1)" in event["message"]
    assert (event["count"], event["paths"]) == (1, ["latin.txt"])
    clean = Trainer(config("run.name=b", "trainer.max_steps=2")).train().folder
    assert events(clean, "data") == [] and metrics(clean)[0]["data/skipped_shards"] == 0


PREPARES = """
import importlib, runpy, sys, time
from pathlib import Path

def long(*how, **more):
    Path("prepares").touch()
    time.sleep(600)

importlib.import_module("trainer.data.tokenizer_sample").train_tokenizer = long
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_signal_while_data_is_prepared_is_reported_and_leaves_nothing_behind(
    overrides: Callable[..., list[str]], tmp_path: Path, programs: Any
) -> None:
    words = [word for word in overrides(f"data.cache_dir={tmp_path / 'cache'}", "run.name=a") if "console" not in word]
    process, deadline = programs.start("-c", PREPARES, ROOT / "train.py", *words, cwd=tmp_path), time.monotonic() + 300
    while not (tmp_path / "prepares").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert (process.returncode, error) == (143, "octet: terminated\n")
    assert not (tmp_path / "runs").exists()
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix not in (".lock", ".partial")] == []


def test_an_interrupt_that_a_library_has_swallowed_stops_the_run_after_its_first_step(config: Configs) -> None:
    rank_group = RankGroup()
    rank_group.join({})
    try:
        with contextlib.suppress(BaseException):  # as a library may do while the run is put together
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(TrainingStopped, match=r"stopped by SIGINT after step 1, saved"):
        Trainer(config("run.name=a"), world=World(torch.device("cpu"), rank_group=rank_group)).train()


def test_a_terminal_that_goes_stops_the_run(overrides: Callable[..., list[str]], tmp_path: Path) -> None:
    words = [word for word in overrides("run.name=a", "trainer.max_steps=100000") if "console" not in word]
    mine, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, cwd=tmp_path,
        preexec_fn=lambda: (signal.signal(signal.SIGHUP, signal.SIG_DFL), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )  # fmt: skip
    os.close(terminal)
    run, began = tmp_path / "runs" / "a", time.monotonic()
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 3:
        if select.select([mine], [], [], 0.05)[0]:
            os.read(mine, 1 << 16)
        assert time.monotonic() < began + 300 and process.poll() is None
    os.close(mine)
    assert process.wait(300) == 128 + signal.SIGHUP
    (event,) = events(run, "signal")
    step = event["step"]
    assert event["message"] == f"stopped by SIGHUP after step {step}; saved"
    assert checkpoints(run) == [f"step_{step:08}"]


def test_nohup_keeps_a_run_going_without_its_terminal(config: Configs) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        rank_group = RankGroup()
        rank_group.join({})
        trainer = Trainer(config("run.name=a"), world=World(torch.device("cpu"), rank_group=rank_group))
        at(trainer, 2, lambda: signal.raise_signal(signal.SIGHUP))
        assert trainer.train().step == 6
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait_for_the_end_of_the_step(
    config: Configs, monkeypatch: pytest.MonkeyPatch, second: signal.Signals
) -> None:
    monkeypatch.setattr(signals, "ONE_SECONDS", 0.01)
    trainer = Trainer(config("run.name=a", "checkpoint.every=2"))
    at(trainer, 4, lambda: [(signal.raise_signal(number), time.sleep(0.02)) for number in (signal.SIGINT, second)])
    # SIGINT is ignored below a shell's background job, and SIGTERM would end the tests
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, second)}
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    run = trainer.run.folder.path
    assert checkpoints(run) == ["step_00000002"] and metrics(run)[-1]["step"] == 3


def test_a_signal_that_comes_twice_at_once_is_one(config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` sends it: to the process, and to its group."""
    monkeypatch.setattr(signals, "ONE_SECONDS", 60.0)  # at once, however busy the machine is
    trainer = Trainer(config("run.name=a", "checkpoint.every=2"))
    at(trainer, 4, lambda: [signal.raise_signal(signal.SIGTERM) for _ in range(2)])
    with pytest.raises(TrainingStopped, match="stopped by SIGTERM after step 4, saved"):
        trainer.train()
    assert checkpoints(trainer.run.folder.path)[-1] == "step_00000004"


def test_a_terminal_that_closes_after_a_signal_does_not_end_the_save(
    config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "ONE_SECONDS", 0.01)
    trainer = Trainer(config("run.name=a", "checkpoint.every=2"))
    both = signal.SIGTERM, signal.SIGHUP
    at(trainer, 4, lambda: [(signal.raise_signal(number), time.sleep(0.02)) for number in both])
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)  # nohup ignores it
    try:
        with pytest.raises(TrainingStopped, match=r"stopped by SIG\w+ after step 4, saved"):
            trainer.train()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_during_a_save_saves_the_next_step(config: Configs) -> None:
    trainer = Trainer(config("run.name=saves", "checkpoint.every=2"))
    save = trainer.run.save

    def signalled(step: int) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        save(step)

    trainer.run.save = signalled  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped, match=r"stopped by SIGTERM after step 3, saved") as end:
        trainer.train()
    assert end.value.exit_code == 143
    assert checkpoints(trainer.run.folder.path) == ["step_00000002", "step_00000003"]


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_signal_before_or_during_an_evaluation_saves_before_its_end(
    config: Configs, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The job may be killed before a long evaluation ends."""
    trainer = Trainer(config("run.name=a", "eval.every=2", "eval.batches=3"))
    folder, activity = trainer.run.folder.path / "checkpoints", trainer.run.sinks.activity
    evaluated: list[tuple[str, list[str]]] = []

    def see(text: str) -> None:
        evaluated.append((text, checkpoints(folder.parent) if folder.exists() else []))
        if when == "during" and text.startswith("evaluating 2/"):
            signal.raise_signal(signal.SIGTERM)
        activity(text)

    monkeypatch.setattr(trainer.run.sinks, "activity", see)
    save = trainer.run.save
    trainer.run.save = lambda step: (save(step), trainer.run.checkpointer.wait_for_save())  # type: ignore
    if when == "before":
        at(trainer, 2, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(TrainingStopped, match=r"stopped by SIGTERM after step 2, saved"):
        trainer.train()
    texts, saved = zip(*evaluated, strict=True)
    assert texts == ("evaluating 2/6", "evaluating 4/6", "evaluating 6/6")
    assert list(saved) == [[] if when == "during" else ["step_00000002"], *[["step_00000002"]] * 2]
    assert [line["step"] for line in metrics(folder.parent, "loss/validation")] == [2]


def test_a_signal_in_the_last_evaluation_is_reported_and_the_evaluation_continues(config: Configs) -> None:
    trainer = Trainer(config("run.name=a"))
    activity, told = trainer.run.sinks.activity, []

    def interrupted(what: str) -> None:
        activity(what)
        if not told:
            signal.raise_signal(signal.SIGINT)
        told.append(what)

    trainer.run.sinks.activity = interrupted  # type: ignore[method-assign]
    assert trainer.train().step == 6
    count = int(told[-1].rpartition("/")[2].replace(",", ""))
    assert len(told) > 1 and told[-1] == f"evaluating {count}/{count}"
    (event,) = events(trainer.run.folder.path, "signal")
    assert event["message"].startswith("SIGINT: all steps are trained, and the last evaluation continues; a second")


def test_a_signal_in_the_last_step_skips_the_last_evaluation(config: Configs) -> None:
    trainer = Trainer(config("run.name=a", "eval.every=0"))
    at(trainer, 6, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(TrainingStopped, match="stopped by SIGTERM after step 6, saved"):
        trainer.train()
    run = trainer.run.folder.path
    assert not metrics(run, "loss/validation")
    assert Trainer(config("run.name=a", "eval.every=0", "run.resume=auto")).train().validation_loss > 0
