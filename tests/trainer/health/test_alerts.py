"""An alert is raised once, again when its condition returns, and a resumed run knows the alerts raised before."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_lines import events

from trainer.config import Config
from trainer.health.alerts import QUIET, Alert, Alerts, Entry, History, Rule
from trainer.step.guard import TrainingStopped
from trainer.trainer import Trainer

Configs = Callable[..., Config]


class Above(Rule):
    """The numbers under "x" that are above 1, by name."""

    name = "above"

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        if "x" not in metrics:
            return None
        wrong = sorted(((x, name) for name, x in metrics["x"].items() if x > 1), reverse=True)
        return [Alert(self.name, step, f"{name} is {x}", x, 1.0, tensor=name) for x, name in wrong]


class AboveOnce(Above):
    name, lasting = "above_once", True


class AboveHere(Above):
    name, of_process = "above_here", True


def said(alerts: Alerts, *values: dict[str, float] | float | None, first: int = 10) -> list[tuple[int, str]]:
    """Steps and messages, of lines ten steps apart. A number: of the tensor a."""
    lines = [{"step": first + 10 * i} | ({} if x is None else {"x": x if isinstance(x, dict) else {"a": x}})
             for i, x in enumerate(values)]  # fmt: skip
    return [(alert.step, alert.message) for line in lines for alert in alerts.check(line)]


def test_a_lasting_condition_alerts_once() -> None:
    assert said(Alerts([Above()]), 0, 2, 3, 4, *[5] * 50) == [(20, "a is 2")]


def test_it_alerts_again_after_a_recovery() -> None:
    well = [0] * QUIET
    assert said(Alerts([Above()]), 2, *well, 3) == [(10, "a is 2"), (10 * QUIET + 20, "a is 3")]
    assert said(Alerts([Above()]), 2, *well[1:], 3, *well[1:], 3) == [(10, "a is 2")]  # not well for long enough
    assert said(Alerts([Above()]), 2, *[None] * 50, 3) == [(10, "a is 2")]  # lines that say nothing about it


def test_a_lasting_condition_alerts_again_after_repeat_steps() -> None:
    assert [step for step, _ in said(Alerts([Above()], repeat=100), *[2] * 25)] == [10, 110, 210]
    assert [step for step, _ in said(Alerts([AboveOnce()], repeat=100), *[2] * 25)] == [10]


def test_many_tensors_are_one_alert_and_a_new_one_is_news() -> None:
    alerts = Alerts([Above()])
    both = {"a": 2.0, "b": 5.0, "c": 0.0}
    assert said(alerts, both, both) == [(10, "b is 5.0 (and 1 more)")]
    assert said(alerts, *[both] * QUIET, both | {"c": 9.0}, first=30) == [(80, "c is 9.0 (and 2 more)")]


def test_alerts_one_after_the_other_do_not_flood() -> None:
    lines = [{str(i): 2.0 for i in range(n)} for n in range(1, 31)]
    assert len(said(Alerts([Above()]), *lines)) <= 30 / QUIET + 1


def test_after_a_rewind_it_is_news_again() -> None:
    alerts = Alerts([Above()])
    assert said(alerts, *[0] * 10, 2, 2) == [(110, "a is 2")]
    assert said(alerts, *[0] * 6, 2, first=50) == [(110, "a is 2")]


def test_a_history_forgets_what_comes_again() -> None:
    history = History(3)
    for step, value in [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]:
        history.add(step, value)
    assert (history.steps, history.values, history.before(4)) == ([2, 3, 4], [2.0, 3.0, 4.0], [2.0, 3.0])
    history.add(3, 5.0)
    assert (history.steps, history.values, history.last) == ([2, 3], [2.0, 5.0], (3, 5.0))


def test_a_resumed_run_knows_the_lines_before(tmp_path: Path) -> None:
    """Also with lines that are cut off, without a file, and with NaN as JSON has it."""
    metrics, tensors = tmp_path / "metrics.jsonl", tmp_path / "tensors.jsonl"
    lines = [{"step": 10, "x": {"a": 2.0}}, {"step": 10, "loss/validation": None}, {"step": 20, "x": {"a": 3.0}}]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 30, "x"')
    for rule, news in ((Above(), []), (AboveHere(), [(30, "a is 4")])):
        alerts = Alerts([rule])
        alerts.replay(metrics, tensors)
        assert said(alerts, 4, first=30) == news


def test_names_are_found_however_long_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sees(Rule):
        name = "sees"
        rows: list[Entry | None]
        steps: tuple[int, ...] = ()

        def check(self, step: int, metrics: Entry, tensors: Entry | None) -> None:
            self.steps += (step,)
            self.rows = [*getattr(self, "rows", []), tensors]

    monkeypatch.setattr("trainer.health.alerts.TAIL", 2000)
    metrics, tensors = tmp_path / "metrics.jsonl", tmp_path / "tensors.jsonl"
    metrics.write_text("".join(json.dumps({"step": i}) + "\n" for i in range(1, 1001)))
    entries = [{"names": {"fp8": ["a"]}}, *({"step": i, "fp8": {"scale": [1.0]}} for i in range(1, 1001))]
    tensors.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    rule = Sees()
    Alerts([rule]).replay(metrics, tensors)
    assert 20 < len(rule.rows) < 500
    assert rule.steps == tuple(range(rule.steps[0], 1001)), "no gap, which a rule would take for a whole past"
    assert rule.rows[-1] == {"step": 1000, "fp8": {"scale": [1.0]}, "names": {"fp8": ["a"]}}


def test_a_healthy_run_raises_no_alert_and_one_that_diverges_does(config: Configs) -> None:
    """Whole runs: 22 steps with a fitting learning rate, 6 with one a thousand times too high, which then resumes."""
    busy = "health.alerts.throughput_drop=null"  # as the machine may be
    fit = ("+recipe=fp8_delayed", "optim.lr=3e-3", "health.every=10", "run.name=fit", busy)
    assert events(Trainer(config(*fit, "trainer.max_steps=22")).train().folder, "alert") == []
    # E4M3 ends at 448, and E5M2, which had scales of gradients 128 times as large, at 57344
    other = ("precision.scaling.backward=e4m3", "run.resume=auto")
    run = Trainer(config(*fit, *other, "trainer.max_steps=24")).train().folder
    assert not [event for event in events(run, "alert") if event["rule"] == "scale_drop"], "another format is no drop"

    wild = (busy, "optim.lr=10", "run.name=wild", "checkpoint.every=0")
    run = Trainer(config(*wild, "trainer.max_steps=6")).train().folder
    (alert,) = [event for event in events(run, "alert") if event["rule"] == "loss_rise"]
    assert alert["value"] > alert["threshold"] and "diverges" in alert["message"] and alert["step"] <= 6
    Trainer(config(*wild, "trainer.max_steps=9", "run.resume=auto")).train()
    assert len([event for event in events(run, "alert") if event["rule"] == "loss_rise"]) == 1


def test_alerts_can_be_off(config: Configs) -> None:
    trainer = Trainer(config("health.alerts.enabled=false", "optim.lr=10", "trainer.max_steps=5"))
    try:
        run = trainer.train().folder
    except TrainingStopped:
        run = trainer.run.folder.path
    assert '"rule"' not in (run / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("saturated=2", r"health\.alerts\.saturated=2\.0: out of range; set a number above 0 and up to 1, or null"),
        ("scale_drop=0.5", r"health\.alerts\.scale_drop=0\.5: .*above 1"),
        ("throttled=10", r"health\.alerts\.throttled=10\.0: out of range; set a number above 0 and up to 1"),
        ("gpu_celsius=nan", r"health\.alerts\.gpu_celsius=nan: out of range"),
        ("gpu_memory_errors=-1", r"health\.alerts\.gpu_memory_errors=-1: out of range; set a number of 0 or more"),
        ("repeat=0", r"health\.alerts\.repeat=0"),
        ("webhook=example.org", r"health\.alerts\.webhook: .* set http"),
        ("command=no-such-program", r"health\.alerts\.command: no program 'no-such-program' here"),
        ("command='a \"b'", r"health\.alerts\.command: No closing quotation; quote it"),
    ],
)
def test_impossible_thresholds_are_refused(config: Configs, setting: str, says: str) -> None:
    from trainer.forecast.preflight import check

    with pytest.raises(ValueError, match=says):
        check(config(f"health.alerts.{setting}"))
