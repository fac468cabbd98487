"""Trackers: TensorBoard and W&B say what was logged, go on after a resume, and never stop training."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.errors import CommError

from trainer.config import ConsoleConfig, LoggingConfig, TensorboardConfig, WandbConfig, WandbMode
from trainer.rundir import RunDir
from trainer.sinks import Sinks
from trainer.sinks import trackers as trackers_module

METRICS = {"step": 20, "loss/lm": 5.1234, "optim/lr": 3e-4}


def settings(*, tensorboard: bool = False, mode: WandbMode | None = None) -> LoggingConfig:
    return LoggingConfig(
        every=10,
        console=ConsoleConfig(True),
        tensorboard=TensorboardConfig(tensorboard),
        wandb=WandbConfig(mode is not None, "octet-tests", None, mode or WandbMode.auto),
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    made = RunDir(tmp_path / "runs", "a", "never", "bf16", {"config.yaml": "trainer: {seed: 1}\n"})
    yield made
    made.close()


class Screen:
    """A console whose output can be read."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self.console = Console(file=self._file, width=100, highlight=False, _environ={})

    @property
    def text(self) -> str:
        return self._file.getvalue()


@pytest.fixture
def screen() -> Screen:
    return Screen()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------- TensorBoard


def scalars(folder: Path, key: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(key)]


def test_tensorboard_files_are_readable_and_resume_purges_later_steps(run: RunDir, screen: Screen) -> None:
    for first, last in ((0, 5), (3, 6)):  # killed after step 5, resumed from step 3
        run.first_step = first
        with Sinks(settings(tensorboard=True), run, 200, screen.console) as sinks:
            for step in range(first + 1, last + 1):
                sinks.metrics({"step": step, "loss/lm": float(step + 10 * first)})
    assert scalars(run.path / "tensorboard", "loss/lm") == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 34.0),
        (5, 35.0),
        (6, 36.0),
    ]


def test_a_tracker_that_is_not_installed_is_refused_in_one_line(
    run: RunDir, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"logging.tensorboard.enabled=true: needs tensorboard, .* pip install"):
        trackers_module.require("tensorboard", "logging.tensorboard.enabled")


# ---------------------------------------------------------------------------------------------------- W&B


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb.teardown()  # it remembers the environment of its first use
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def offline_runs(run: RunDir) -> list[str]:
    """The ids of the runs that wandb wrote."""
    return sorted(path.stem.removeprefix("run-") for path in run.path.glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.usefixtures("no_key")
def test_wandb_is_offline_without_a_key_and_a_resumed_run_keeps_its_id(run: RunDir, screen: Screen) -> None:
    with Sinks(settings(mode=WandbMode.auto), run, 200, screen.console) as sinks:
        assert sinks.state_dict() == {"wandb_id": None}
        sinks.metrics(METRICS)
        state = json.loads(json.dumps(sinks.state_dict()))
    assert "offline; `wandb sync " in screen.text and offline_runs(run) == [state["wandb_id"]]

    with Sinks(settings(), run, 200, screen.console) as sinks:  # resumed without W&B: the id is not forgotten
        sinks.load_state_dict(state)
        sinks.metrics(METRICS)
        assert sinks.state_dict() == state

    with Sinks(settings(mode=WandbMode.offline), run, 200, screen.console) as sinks:
        sinks.load_state_dict(state)
        sinks.metrics(METRICS)
        assert sinks.state_dict() == state
    assert offline_runs(run) == [state["wandb_id"]] * 2
    assert all(path.stat().st_size > 0 for path in run.path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.usefixtures("no_key")
def test_wandb_that_does_not_answer_becomes_offline(
    run: RunDir, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = wandb.init

    def unreachable(**arguments: Any) -> Any:
        if arguments["mode"] == "online":
            raise CommError("connection\nrefused")
        return init(**arguments)

    monkeypatch.setattr(wandb, "init", unreachable)
    with Sinks(settings(mode=WandbMode.online), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
        sinks.metrics(METRICS)
    assert screen.text.count("W&B does not answer (connection refused): tracking offline\n") == 1
    assert len(offline_runs(run)) == 1


@pytest.mark.usefixtures("no_key")
def test_wandb_that_breaks_is_given_up_and_training_goes_on(
    run: RunDir, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sinks(settings(mode=WandbMode.offline), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
        assert sinks._wandb is not None

        def lost(*_: Any, **__: Any) -> None:
            raise ConnectionResetError("Connection lost")

        broken = sinks._wandb._run
        monkeypatch.setattr(broken, "log", lost)
        for _ in range(3):
            sinks.metrics(METRICS)
        monkeypatch.undo()
        broken.finish()
    assert screen.text.count("W&B failed and is given up for this run: Connection lost") == 1
    assert len(lines(run.path / "metrics.jsonl")) == 4


def test_wandb_mode_disabled_is_respected(
    run: RunDir, screen: Screen, monkeypatch: pytest.MonkeyPatch, no_key: None
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with Sinks(settings(mode=WandbMode.auto), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
        assert sinks.state_dict() == {"wandb_id": None}
    assert "W&B is disabled by WANDB_MODE" in screen.text and offline_runs(run) == []
