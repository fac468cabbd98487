"""Trackers: TensorBoard and W&B get what was logged, continue after a resume, and never stop training."""

import json
import os
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
import wandb
from run_lines import events, metrics
from screens import Screen, settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.config import WandbMode
from trainer.run.run_folder import RunFolder
from trainer.sinks import Sinks
from trainer.sinks import trackers as trackers_module
from trainer.sinks import wandb_tracker as wandb_module

METRICS = {"step": 20, "loss/lm": 5.1234, "optim/lr": 3e-4}


# ---------------------------------------------------------------------------------------------------- TensorBoard


def scalars(folder: Path, key: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(key)]


def test_tensorboard_files_are_readable_and_resume_purges_later_steps(run: RunFolder, screen: Screen) -> None:
    for first, last in ((0, 5), (3, 6)):  # killed after step 5, resumed from step 3
        run.resumed_from = run.path / "checkpoints" / f"step_{first:08d}"
        with Sinks(settings(tensorboard=True), run, 200, screen.console) as sinks:
            for step in range(first + 1, last + 1):
                sinks.metrics({"step": step, "loss/lm": float(step + 10 * first)})
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 34.0), (5, 35.0), (6, 36.0)]
    assert scalars(run.path / "tensorboard", "loss/lm") == expected


def test_a_rewind_purges_what_will_be_run_again(run: RunFolder, screen: Screen) -> None:
    with Sinks(settings(tensorboard=True), run, 200, screen.console) as sinks:
        for course, steps in enumerate((range(1, 6), range(3, 7))):
            for step in steps:
                sinks.metrics({"step": step, "loss/lm": float(step + 10 * course)})
            if course == 0:
                sinks.rewind(2)
    expected = [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0), (6, 16.0)]
    assert scalars(run.path / "tensorboard", "loss/lm") == expected
    assert [(line["step"], line["loss/lm"]) for line in metrics(run.path)] == expected


def test_a_rewind_on_a_full_disk_costs_tensorboard_and_not_the_run(run: RunFolder, screen: Screen) -> None:
    with Sinks(settings(tensorboard=True), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
        assert sinks._tensorboard is not None

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        sinks._tensorboard._open = full  # type: ignore[assignment]
        sinks.rewind(2)
        sinks.metrics(METRICS)
    assert screen.text.count("TensorBoard files cannot be written") == 1


def test_a_tracker_that_is_not_installed_is_refused_in_one_line(
    run: RunFolder, screen: Screen, monkeypatch: pytest.MonkeyPatch
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


def offline_runs(run: RunFolder) -> list[str]:
    """The ids of the runs that wandb wrote."""
    return sorted(path.stem.removeprefix("run-") for path in run.path.glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.usefixtures("no_key")
def test_wandb_is_offline_without_a_key_and_a_resumed_run_keeps_its_id(run: RunFolder, screen: Screen) -> None:
    run.path = run.path.rename(run.path.with_name("my run"))
    with Sinks(settings(mode=WandbMode.auto), run, 200, screen.console) as sinks:
        assert sinks.state_dict()["wandb_id"] is None
        sinks.metrics(METRICS)
        state = json.loads(json.dumps(sinks.state_dict()))
    command = screen.text.partition("offline; `")[2].partition("`")[0]
    assert Path(shlex.split(command)[2]).is_dir() and command.startswith("wandb sync ")
    assert offline_runs(run) == [state["wandb_id"]]

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


def alerts(run: RunFolder) -> list[str]:
    return [e["message"] for e in events(run.path) if e["kind"] == "alert" and e["rule"] == "wandb"]


def test_wandb_that_does_not_answer_becomes_offline_without_a_wait(
    run: RunFolder, screen: Screen, monkeypatch: pytest.MonkeyPatch, no_key: None
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # a closed port
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(wandb_module, "INIT_SECONDS", 1.0)
    setup, told, in_time = wandb.setup, threading.Event(), list[bool]()

    def late(*how: Any) -> Any:
        in_time.append(told.wait(60))
        return setup(*how)

    monkeypatch.setattr(wandb, "setup", late)
    with Sinks(settings(mode=WandbMode.online), run, 200, screen.console) as sinks:
        sinks.load_state_dict({"wandb_id": "abcd1234"})  # a run to continue with
        for _ in range(100):
            sinks.metrics(METRICS)
        told.set()
        assert sinks.state_dict()["wandb_id"] == "abcd1234"
    assert in_time and all(in_time), "metrics were taken while it asked"
    (alert,) = alerts(run)
    assert alert.endswith("tracking offline") and "\n" not in alert
    assert screen.text.count("tracking offline\n") == 1
    assert offline_runs(run) == ["abcd1234"] and next(run.path.glob("wandb/offline-*/*.wandb")).stat().st_size > 5000


@pytest.mark.usefixtures("no_key")
def test_wandb_takes_steps_that_go_back(run: RunFolder, screen: Screen) -> None:
    """A row for each line, whatever its step: it would drop them if `step` were its own count."""
    seen: list[Any] = []
    with Sinks(settings(mode=WandbMode.offline), run, 200, screen.console) as sinks:
        for step in (1, 2, 3):
            sinks.metrics({"step": step, "recovery/rewinds": 0})
        sinks.rewind(1)
        for step in (2, 3):
            sinks.metrics({"step": step, "recovery/rewinds": 1})
        assert sinks._wandb is not None
        sinks._wandb._put(lambda ours: seen.extend([ours.step, ours.summary["step"], ours.summary["recovery/rewinds"]]))
    assert seen == [5, 3, 1], "rows of history, and what came last"
    assert alerts(run) == []


@pytest.mark.usefixtures("no_key")
def test_alerts_go_to_wandb_and_the_address_of_the_webhook_does_not(run: RunFolder, screen: Screen) -> None:
    (run.path / "config.yaml").write_text("health: {every: 77, alerts: {webhook: 'http://127.0.0.1:9/se-cr-et'}}\n")
    sent: list[Any] = []
    with Sinks(settings(mode=WandbMode.offline), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
        assert sinks._wandb is not None
        sinks._wandb._put(lambda ours: sent.append(ours.config["health"]))
        sinks._wandb._put(lambda ours: setattr(ours, "alert", lambda **alert: sent.append(alert)))
        sinks.event("alert", 20, "kurtosis grows", rule="kurtosis_power")
        sinks.event("checkpoint", 20, "step 20 saved")
    config, alert = sent
    assert config == {"every": 77, "alerts": {"webhook": "(not shown)"}}
    assert alert == {"title": "kurtosis_power", "text": "kurtosis grows", "level": "WARN"}


@pytest.mark.usefixtures("no_key")
def test_wandb_that_breaks_is_given_up_and_training_continues(run: RunFolder, screen: Screen) -> None:
    def lost(run: Any) -> None:
        run.finish()
        raise ConnectionResetError("Connection lost")

    with Sinks(settings(mode=WandbMode.offline), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
        assert sinks._wandb is not None
        sinks._wandb._put(lost)
        for _ in range(3):
            sinks.metrics(METRICS)
    assert alerts(run) == ["W&B failed and is given up for this run: Connection lost"]
    assert len(metrics(run.path)) == 4


@pytest.mark.usefixtures("no_key")
def test_wandb_that_hangs_holds_up_nothing(run: RunFolder, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_module, "CLOSE_SECONDS", 1.0)
    monkeypatch.setattr(wandb_module, "WAITING", 10)
    go_on, ended = threading.Event(), list[bool]()

    def stall(run: Any) -> None:
        ended.append(go_on.wait(300))

    with Sinks(settings(mode=WandbMode.offline), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
        assert sinks._wandb is not None and sinks._wandb._thread is not None
        sinks._wandb._put(stall)
        for _ in range(20):
            sinks.metrics(METRICS)
        sinks.close()
        assert ended == [], "it is back before W&B is"
        go_on.set()
        sinks._wandb._thread.join(30)
    behind, unfinished = alerts(run)
    assert behind.startswith("W&B is 10 lines behind") and unfinished.startswith("W&B has not taken everything in 1 s")


def test_wandb_mode_disabled_is_respected(
    run: RunFolder, screen: Screen, monkeypatch: pytest.MonkeyPatch, no_key: None
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with Sinks(settings(mode=WandbMode.auto), run, 200, screen.console) as sinks:
        sinks.metrics(METRICS)
    assert "W&B is disabled by WANDB_MODE" in screen.text and offline_runs(run) == []
