"""Which rank is named, and when an alert says so."""

import math
from collections.abc import Mapping

import pytest
import torch

from trainer.health.alerts import Alert, Alerts
from trainer.health.power import Reading
from trainer.health.rules.resources import Straggler
from trainer.health.stragglers import Stragglers, compare
from trainer.launch.world import World
from trainer.step import stage_clock
from trainer.step.stage_clock import StageClock

CPU = torch.device("cpu")


def test_the_slowest_is_held_against_the_median_of_the_others() -> None:
    gpus = [Reading(sm_mhz=1700, celsius=60), Reading(sm_mhz=1650, celsius=61), Reading(sm_mhz=1200, celsius=88)]
    found = compare([0.010, 0.012, 0.022], [0.3, 0.0, 0.1], gpus)
    assert found == {
        "ranks/data_wait": pytest.approx(0.25), "ranks/data_rank": 0,
        "ranks/gpu_slowness": pytest.approx(1.0), "ranks/gpu_rank": 2,
        "ranks/gpu_clock_mhz": 1200, "ranks/gpu_celsius": 88,
    }  # fmt: skip


def test_shapes_without_a_measurement_are_left_out() -> None:
    assert set(compare([math.nan] * 2, [0.0, 0.1], [Reading()] * 2)) == {"ranks/data_wait", "ranks/data_rank"}
    assert set(compare([1.0, 2.0], [0.0, 0.1], [Reading()] * 2)) >= {"ranks/gpu_rank", "ranks/gpu_slowness"}
    assert Stragglers(World(CPU), compares=True).read(1.0, []) == {}, "a process alone"


def said(*lines: Mapping[str, float]) -> list[Alert]:
    alerts, found = Alerts([Straggler(0.1)]), []
    for step, line in enumerate(lines, 1):
        found += alerts.check({"step": step, "perf/step_seconds": 1.0, **line})
    return found


SLOW = {"ranks/gpu_slowness": 0.3, "ranks/gpu_rank": 5, "ranks/gpu_clock_mhz": 1180.0, "ranks/gpu_celsius": 87.0}
LATE = {"ranks/data_wait": 0.2, "ranks/data_rank": 1}


def test_a_slow_gpu_is_named_once_with_clock_and_temperature() -> None:
    (alert,) = said(*[SLOW] * 10)
    assert (alert.rule, alert.step, alert.value, alert.threshold) == ("straggler", 6, 0.3, 0.1)
    assert "the GPU of rank 5 is 30 % slower than the others' (at 1180 MHz, 87 °C), for 5 lines" in alert.message


def test_late_data_is_named_where_it_takes_time() -> None:
    (alert,) = said(*[LATE] * 7)
    assert "rank 1 waits 20 % of a step longer for its data" in alert.message
    assert said(*[{**LATE, "perf/step_seconds": 0.01}] * 7) == [], "2 ms"


def test_another_rank_is_another_alert() -> None:
    slow, late = said(*[SLOW] * 10, *[LATE] * 10)
    assert (slow.rank, slow.step, late.rank, late.step) == (5, 6, 1, 15) and late.what()["rank"] == 1
    assert [alert.rank for alert in said(*[SLOW] * 10, *[{**SLOW, "ranks/gpu_rank": 3}] * 10)] == [5, 3]


def test_ranks_that_are_slow_in_turn_are_no_stragglers() -> None:
    assert said(*[{**SLOW, "ranks/gpu_rank": step % 2} for step in range(20)]) == []
    assert said(*[SLOW, SLOW, {**SLOW, "ranks/gpu_slowness": 0.05}, SLOW, SLOW] * 4) == []
    assert said(*[{}] * 10) == []


def test_the_bubble_is_what_is_left_beside_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = StageClock(CPU), iter([0.0, 1.0, 3.0, 6.0, 8.0, 10.0])
    monkeypatch.setattr(stage_clock.time, "perf_counter", lambda: next(now))
    with clock.step():
        for _ in range(2):
            with clock.computes():
                pass
    assert clock.idle_share == pytest.approx(0.6)
    line = Stragglers(World(CPU), compares=False, bubble=(clock, 0.5)).read(1.0, [])
    assert line == {"perf/bubble": pytest.approx(0.6), "perf/bubble_forecast": 0.5}
