"""Power and heat: what a thread gathers from a GPU, what ranks make of it together, and that a run logs it."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pynvml
import pytest
import torch
from run_lines import events, metrics

from trainer.config import Config
from trainer.config.health import PowerConfig
from trainer.config.schema import Switch
from trainer.health import nvml as ours
from trainer.health import power
from trainer.health.nvml import find_by
from trainer.health.power import MeteredGpus, PowerMeter, Reading, Sampler, combine, find_gpus
from trainer.launch.world import World
from trainer.trainer import Trainer

UUID = "0a1b2c3d-1111-2222-3333-444455556666"
CPU = World(torch.device("cpu"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time that the test advances."""
    now = [1000.0]
    monkeypatch.setattr(power.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def sampler(idle: Callable[[], bool] = lambda: False) -> Sampler:
    return Sampler(find_by(UUID), 1.0, idle)


def samples(s: Sampler, gpu: Any, clock: Callable[[float], None], *steps: dict[str, int]) -> Reading:
    """One sample for the start, then one a second for each step of settings; what a line then takes."""
    s.sample()
    for step in steps:
        gpu.set(**step)
        clock(1.0)
        s.sample()
    return s.take()


def test_power_is_the_difference_of_the_energy_counter(nvml, clock) -> None:
    gpu = nvml.add(f"GPU-{UUID}")
    s = sampler()
    reading = samples(s, gpu, clock, {"energy": 10**9 + 400_000}, {"energy": 10**9 + 1_000_000})
    assert reading.watts == pytest.approx(500)
    gpu.set(energy=10**9 + 1_100_000)
    clock(0.5)
    s.sample()
    assert s.take().watts == pytest.approx(200)


def test_a_line_without_a_new_sample_repeats_what_is_known(nvml, clock) -> None:
    gpu = nvml.add(f"GPU-{UUID}")
    s = sampler()
    assert all(math.isnan(value) for value in s.take()[:-2])
    first = samples(s, gpu, clock, {"energy": 10**9 + 600_000, "temperature": 66})
    assert (first.watts, first.celsius) == (pytest.approx(600), 66)
    assert s.take() == first


def test_without_a_counter_power_is_the_mean_of_the_readings(nvml, clock) -> None:
    gpu = nvml.add(f"GPU-{UUID}")
    gpu.refuse(pynvml.NVML_ERROR_NOT_SUPPORTED, "energy")
    gpu.set(power=300_000)
    assert samples(sampler(), gpu, clock, {"power": 500_000}, {"power": 700_000}).watts == pytest.approx(500)


def test_time_outside_training_does_not_count(nvml, clock) -> None:
    gpu = nvml.add(f"GPU-{UUID}")
    idle = [False]
    s = sampler(lambda: idle[0])
    s.sample()
    for paused, energy, hot in ((False, 700, 60), (True, 800, 90), (False, 900, 60), (False, 1600, 60)):
        idle[0] = paused
        gpu.set(energy=10**9 + 1000 * energy, temperature=hot)
        clock(1.0)
        s.sample()
    reading = s.take()
    assert reading.watts == pytest.approx(700) and reading.celsius == 90  # heat counts at any time


def test_reasons_are_shares_of_the_time(nvml, clock) -> None:
    gpu = nvml.add(f"GPU-{UUID}")
    reading = samples(sampler(), gpu, clock, *({"reasons": bits} for bits in (0, 0x04, 0x24, 0x48, 0x80)))
    assert (reading.throttled, reading.power_cap) == (pytest.approx(0.8), pytest.approx(0.4))
    assert (reading.thermal, reading.hardware) == (pytest.approx(0.4), pytest.approx(0.4))


@pytest.mark.parametrize("reasons", [0x01, 0x02, 0x100, 0x10])
def test_idling_and_clocks_that_were_set_are_no_throttling(nvml, clock, reasons: int) -> None:
    gpu = nvml.add(f"GPU-{UUID}")
    reading = samples(sampler(), gpu, clock, {"reasons": reasons, "sm_clock": 345})
    assert (reading.throttled, reading.speed) == (0, 1)


def test_what_throttling_costs_is_measured_by_the_clock(nvml, clock) -> None:
    gpu = nvml.add(f"GPU-{UUID}")
    s = sampler()
    capped = {"reasons": 0x04, "sm_clock": 1485}
    assert samples(s, gpu, clock, capped).speed == pytest.approx(0.75)  # of the maximum, 1980
    # locked to 1650 from outside: what it reaches without throttling is the measure from then on
    free = {"reasons": 0x02, "sm_clock": 1650}
    reading = samples(s, gpu, clock, free, capped)
    assert reading.speed == pytest.approx((1 + 1 + 0.9) / 3, abs=0.05)
    assert samples(s, gpu, clock, capped).speed == pytest.approx(0.9)


def test_readings_that_a_gpu_lacks_are_left_out_and_the_rest_stays(nvml, clock) -> None:
    gpu = nvml.add(f"GPU-{UUID}")
    gpu.refuse(pynvml.NVML_ERROR_NOT_SUPPORTED, "reasons", "memory_temperature", "ecc")
    reading = samples(sampler(), gpu, clock, {"energy": 10**9 + 600_000})
    keys = combine([reading], True, tokens=1200, seconds=2.0, steps=4).keys()
    assert keys == {f"gpu/{key}" for key in ("power_watts", "joules_per_token", "joules_per_step", "temperature_c",
                                             "clock_mhz", "memory_clock_mhz")}  # fmt: skip


def test_the_thread_samples_and_bears_a_gpu_that_is_lost(nvml) -> None:
    gpu = nvml.add(f"GPU-{UUID}")
    s = Sampler(find_by(UUID), 0.1)
    s.start()
    wait_for(lambda: not math.isnan(s.take().watts))
    gpu.refuse(pynvml.NVML_ERROR_GPU_IS_LOST)
    wait_for(lambda: s.take().lost == 1)
    assert math.isnan(s.take().watts)
    s.close()
    assert not any(thread.name == "power" for thread in threading.enumerate())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


A = Reading(watts=600, celsius=60, memory_celsius=80, sm_mhz=1600, memory_mhz=3200, throttled=0.9, power_cap=0.9,
            thermal=0.0, hardware=0.0, speed=0.8, ecc_errors=0)  # fmt: skip
B = Reading(watts=500, celsius=75, memory_celsius=70, sm_mhz=1000, memory_mhz=3200, throttled=0.5, power_cap=0.1,
            thermal=0.4, hardware=0.0, speed=0.5, ecc_errors=1)  # fmt: skip


def test_ranks_together_power_is_added_up_and_else_the_worst_counts() -> None:
    assert combine([A, B], True, tokens=1000, seconds=2.0, steps=4) == {
        "gpu/power_watts": 1100,
        "gpu/joules_per_token": pytest.approx(2.2),
        "gpu/joules_per_step": pytest.approx(550),
        "gpu/temperature_c": 75,
        "gpu/memory_temperature_c": 80,
        "gpu/clock_mhz": 1000,
        "gpu/memory_clock_mhz": 3200,
        "gpu/throttled_share": 0.9,
        "gpu/throttled_power_cap": 0.9,
        "gpu/throttled_thermal": 0.4,
        "gpu/throttled_hardware": 0.0,
        "gpu/tokens_lost": pytest.approx(1000),  # at half speed, as many again would have been done
        "gpu/ecc_errors": 1,
        "gpu/hottest_rank": 1,
        "gpu/hottest_memory_rank": 0,
        "gpu/throttled_rank": 1,
    }


def test_energy_per_token_is_left_out_if_a_gpu_is_not_metered() -> None:
    together = combine([A, Reading()], False, tokens=1000, seconds=2.0, steps=4)
    assert together["gpu/power_watts"] == 600 and "gpu/joules_per_token" not in together
    assert combine([Reading()], True, 1000, 2.0, 4) == {}


class Pair(World):
    """Two ranks, seen from rank 0; `other` is what rank 1 says."""

    def __init__(self, device: str, *other: Any) -> None:
        super().__init__(torch.device(device), size=2)
        object.__setattr__(self, "other", list(other))

    def gather(self, value: Any) -> list[Any]:
        return [value, vars(self)["other"][0]]

    def gather_numbers(self, row: list[float]) -> list[list[float]]:
        return [row, vars(self)["other"][0]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's GPU is the one with this UUID."""
    monkeypatch.setattr(ours, "identity", lambda device: (UUID, ""))


@pytest.mark.usefixtures("here")
def test_a_gpu_that_ranks_share_is_metered_once(nvml) -> None:
    nvml.add(f"GPU-{UUID}")
    auto = PowerConfig(Switch.auto, 1.0)
    shared = find_gpus(auto, Pair("cuda", (f"GPU-{UUID}", "")))
    assert shared.gpu is not None and (shared.ranks, shared.whole, shared.problem) == ([0], True, "")
    assert find_gpus(auto, Pair("cuda", ("GPU-another", ""))).ranks == [0, 1]
    lacking = Pair("cuda", ("", "no NVML there"))
    found = find_gpus(auto, lacking)
    assert (found.ranks, found.whole, found.problem) == ([0], False, "rank 1: no NVML there")
    with pytest.raises(ValueError, match=r"health.power.enabled=true: rank 1: no NVML there; or set health.power.enab"):
        find_gpus(PowerConfig(Switch.true, 1.0), lacking)


@pytest.mark.parametrize(
    ("switch", "device", "why"), [("auto", "cpu", "no GPU"), ("false", "cuda", "health.power.enabled=false")]
)
def test_off_on_a_cpu_and_when_asked_is_reported_in_the_log_alone(
    switch: str, device: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, world = PowerConfig(Switch(switch), 1.0), World(torch.device(device))
    found = find_gpus(config, world)
    assert found == MeteredGpus(None, [], False, "")
    events: list[Any] = []
    meter = PowerMeter(found, config, world, lambda *what, **more: events.append(what))
    with caplog.at_level("INFO", "trainer"):
        meter.start(0, lambda: False)
    assert [record.getMessage() for record in caplog.records] == [f"power and temperature are not measured: {why}"]
    assert not events and meter.read(1, 100, 1.0, 1) == {}


@pytest.mark.usefixtures("here")
def test_without_nvml_a_run_on_a_gpu_reports_it_once(nvml) -> None:
    nvml.fail_init(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    found = find_gpus(PowerConfig(Switch.auto, 1.0), Pair("cuda", ("", "NVML cannot be used")))
    events: list[Any] = []
    meter = PowerMeter(found, PowerConfig(Switch.auto, 1.0), CPU, lambda *what, **more: events.append(what))
    meter.start(0, lambda: False)
    assert [meter.read(step, 100, 1.0, 1) for step in range(1, 4)] == [{}, {}, {}]
    assert len(events) == 1 and events[0][:2] == ("power", 0)
    assert events[0][2].startswith("off: rank 0 (and 1 more): NVML cannot be used (Driver Not Loaded)")
    meter.close()


def test_a_gpu_lost_on_another_rank_is_reported_once_and_the_others_continue() -> None:
    events: list[Any] = []
    world = Pair("cuda", list(Reading(lost=1.0)))
    config = PowerConfig(Switch.auto, 1.0)
    meter = PowerMeter(
        MeteredGpus(None, [0, 1], True, ""), config, world, lambda *what, **more: events.append((what, more))
    )
    for step in (1, 2):
        assert "gpu/joules_per_token" not in meter.read(step, 100, 1.0, 1)
    (what, more), *others = events
    assert not others and more == {"rank": 1, "failed": True}
    assert what[2].startswith("NVML has lost the GPU of rank 1")


def test_energy_per_token_waits_for_the_power_of_every_gpu() -> None:
    """A rank's first sample may come after the first line, and a GPU may have no sensor of its power."""
    other = Pair("cuda", list(Reading()))
    meter = PowerMeter(MeteredGpus(None, [0, 1], True, ""), PowerConfig(Switch.auto, 1.0), other, lambda *what: None)
    meter._sampler = Mock(take=lambda: A)
    line = meter.read(1, 1000, 2.0, 4)
    assert line["gpu/power_watts"] == 600 and "gpu/joules_per_token" not in line
    vars(other)["other"][0] = list(B)
    assert meter.read(2, 1000, 2.0, 4)["gpu/joules_per_token"] == pytest.approx(2.2)


@pytest.mark.usefixtures("here")
def test_a_run_logs_power_and_heat(
    nvml, config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small run on the CPU whose GPU is the library's: hot, and slowed by it."""
    gpu = nvml.add(f"GPU-{UUID}")
    gpu.set(reasons=0x20, sm_clock=990, temperature=91)
    monkeypatch.setattr(power, "find_gpus", lambda config, world: MeteredGpus(ours.find(world.device), [0], True, ""))
    monkeypatch.setattr("trainer.build.find_gpus", power.find_gpus)
    trainer = Trainer(config("run.name=warm", "trainer.max_steps=8", "health.power.seconds=0.1"))
    step = trainer._step

    def spend(tokens: torch.Tensor) -> None:
        step(tokens)
        time.sleep(0.05)
        gpu.struct.value[0] += 40_000  # millijoules

    monkeypatch.setattr(trainer, "_step", spend)
    trainer.train()
    run = tmp_path / "runs" / "warm"
    last = metrics(run, "gpu/power_watts")[-1]
    assert last["gpu/temperature_c"] == 91 and last["gpu/clock_mhz"] == 990 and last["gpu/throttled_thermal"] == 1
    assert last["gpu/tokens_lost"] == pytest.approx(4 * 24)  # half the clock: as many tokens again
    assert last["gpu/joules_per_token"] == pytest.approx(last["gpu/power_watts"] / last["perf/tokens_per_second"])
    assert last["gpu/joules_per_step"] == pytest.approx(last["gpu/joules_per_token"] * 4 * 24)
    assert {"throttled", "gpu_celsius"} <= {alert.get("rule") for alert in events(run, "alert")}
    assert "metering NVIDIA H200 GPU-" in (run / "logs" / "rank0.log").read_text()
