"""Rules about heat and clocks: each fires on what it is for, and none on a GPU that is merely at work."""

from collections.abc import Mapping

import pytest

from trainer.health.alerts import Alert, Alerts, Rule
from trainer.health.rules.power import GpuCelsius, GpuMemoryCelsius, GpuMemoryErrors, Throttled

AT_WORK = {
    "gpu/power_watts": 699.0, "gpu/temperature_c": 71, "gpu/memory_temperature_c": 84, "gpu/clock_mhz": 1450,
    "gpu/throttled_share": 1.0, "gpu/throttled_power_cap": 1.0, "gpu/throttled_thermal": 0.0,
    "gpu/throttled_hardware": 0.0, "gpu/tokens_lost": 90_000.0, "gpu/ecc_errors": 0,
}  # fmt: skip


def rules() -> list[Rule]:
    return [Throttled(0.05), GpuCelsius(85), GpuMemoryCelsius(95), GpuMemoryErrors(0)]


def lines(*changes: Mapping[str, float]) -> list[Alert]:
    """What is said in a run whose lines are of a GPU at work, but for these changes."""
    alerts, said = Alerts(rules()), []
    for i, each in enumerate(changes, 1):
        said += alerts.check({"step": 10 * i, **AT_WORK, "gpu/power_watts": 690 + i / 10, **each})
    return said


def test_full_load_at_the_power_limit_is_no_alarm() -> None:
    assert lines(*[{}] * 50) == []


def test_a_run_without_gpu_keys_is_not_judged() -> None:
    assert [rule.check(1, {"step": 1, "loss/lm": 2.0}, None) for rule in rules()] == [None] * 4
    nothing = {"gpu/throttled_thermal": None, "gpu/throttled_hardware": float("nan"), "gpu/temperature_c": None}
    assert [rule.check(1, nothing, None) for rule in rules()] == [None] * 4


@pytest.mark.parametrize(("why", "says"), [("thermal", "heat slows"), ("hardware", "board's own protection")])
def test_throttling_that_lasts(why: str, says: str) -> None:
    slow = {f"gpu/throttled_{why}": 0.3, "gpu/throttled_rank": 5}
    (alert,) = lines({}, slow, slow, slow)
    assert (alert.rule, alert.step, alert.value, alert.threshold) == ("throttled", 30, 0.3, 0.05)
    assert says in alert.message and "GPU of rank 5 for 30 % of the time, to 1450 MHz" in alert.message


def test_a_moment_of_throttling_is_no_alarm() -> None:
    moment = {"gpu/throttled_hardware": 0.5}
    assert lines({}, moment, {}, {}, moment, {}) == []
    assert lines(*[{"gpu/throttled_thermal": 0.04}] * 20) == []
    repeated = {**moment, "gpu/power_watts": 640.0}  # by lines that come sooner than samples
    assert lines({}, *[repeated] * 9, {}) == []


def test_heat() -> None:
    core, memory = lines({}, {"gpu/temperature_c": 88, "gpu/hottest_rank": 2}, {}, {"gpu/memory_temperature_c": 97})
    assert (core.rule, core.step, core.value) == ("gpu_celsius", 20, 88)
    assert "the core of the GPU of rank 2 is at 88 °C (health.alerts.gpu_celsius=85)" in core.message
    assert (memory.rule, memory.step) == (
        "gpu_memory_celsius",
        40,
    ) and "the memory of the GPU is at 97" in memory.message
    assert lines(*[{"gpu/temperature_c": 85, "gpu/memory_temperature_c": 95}] * 3) == []


def test_failing_memory_alerts_once() -> None:
    (alert,) = lines({}, *[{"gpu/ecc_errors": 2}] * 30)
    assert alert.rule == "gpu_memory_errors" and alert.message.startswith("2 errors in GPU memory")
    (one,) = lines({"gpu/ecc_errors": 1})
    assert one.message.startswith("1 error in GPU memory")
