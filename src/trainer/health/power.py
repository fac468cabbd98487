"""Power and heat of the run's GPUs, at each logged line: watts, joules a token, temperatures, clocks, throttling.

Each rank has a thread that queries NVML about its GPU every `health.power.seconds`. The training loop never calls NVML:
at a logged line it takes what the thread gathered since the line before, and the ranks exchange it in one small message
between hosts.

    thread   sample . . sample . . sample . . sample . . sample        each interval between two samples counts
    loop          line                     line                 line   a line has those that ended since the last line

Power is the difference of the GPU's energy counter over the time between samples, or the mean of its power readings if
there is no counter. An interval that begins or ends outside training (evaluation, a checkpoint) does not count, as for
tokens per second. So

    gpu/joules_per_token = gpu/power_watts / perf/tokens_per_second

is the energy of training a token: of all the job's GPUs, without the rest of the machine. A line that comes before the
next sample repeats the last values.

Throttling: a sample's reasons and clock stand for the interval that ends with it. Let t_i be the share of the time at
clock c_i with any reason to throttle, and c the highest clock seen with none (before one is seen, the GPU's maximum).
Work then proceeds at f = 1 - sum_i t_i (1 - c_i / c) of the full speed, if speed follows the clock, and

    gpu/tokens_lost = tokens * (1 / f - 1)        of the slowest GPU, for which the others wait

This is an upper estimate: work that waits for memory or for other GPUs follows the clock less. It includes the cost of
the power limit, which every GPU under full load pays.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from precision.errors import UserError
from trainer.config.health import PowerConfig
from trainer.config.schema import Switch
from trainer.health.nvml import HARDWARE, IDLE, POWER_CAP, THERMAL, THROTTLED, Gpu, GpuLost, Unavailable, find
from trainer.launch.world import World

NONE = math.nan


class Reading(NamedTuple):
    """Measurements of a rank's GPU since the line before. NaN: unknown."""

    watts: float = NONE
    celsius: float = NONE
    """Maximum."""
    memory_celsius: float = NONE
    """Maximum."""
    sm_mhz: float = NONE
    """Mean over time."""
    memory_mhz: float = NONE
    """Mean over time."""
    throttled: float = NONE
    """Share of the time with any reason to throttle."""
    power_cap: float = NONE
    """Share of the time at the power limit."""
    thermal: float = NONE
    hardware: float = NONE
    speed: float = NONE
    """f of the module docstring."""
    ecc_errors: float = NONE
    """Uncorrected errors since the thread started."""
    lost: float = 0.0
    """1: NVML no longer reaches the GPU."""


@dataclass
class _Window:
    """The intervals since the line before. sums: by quantity, of value * seconds and of seconds, where it is known."""

    sums: dict[str, list[float]] = field(default_factory=dict)
    celsius: float = NONE
    memory_celsius: float = NONE

    def add(self, name: str, value: float | None, seconds: float) -> None:
        if value is not None:
            total = self.sums.setdefault(name, [0.0, 0.0])
            total[0] += value * seconds
            total[1] += seconds


@dataclass
class _Sample:
    seconds: float
    joules: float | None
    watts: float | None
    training: bool


class Sampler:
    """Samples one GPU in its own thread. idle(): whether the run is doing something other than training."""

    def __init__(self, gpu: Gpu, seconds: float, idle: Callable[[], bool] = lambda: False) -> None:
        self._gpu, self._seconds, self._idle = gpu, seconds, idle
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._window, self._known = _Window(), Reading()
        self._before: _Sample | None = None
        self._free_mhz = 0.0  # highest clock seen without throttling
        self._ecc: tuple[int, int] | None = None  # at the start, now
        self._lost = False
        self._thread = threading.Thread(target=self._run, name="power", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. A thread that hangs in the driver is left behind."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def take(self) -> Reading:
        """Return what was gathered since the last call, or the last reading if there is nothing new. Never waits."""
        with self._lock:
            window = self._window
            if window.sums:
                self._window = _Window()
                means = {name: total / seconds for name, (total, seconds) in window.sums.items()}
                self._known = Reading(celsius=window.celsius, memory_celsius=window.memory_celsius, **means)
            if self._ecc is not None:
                self._known = self._known._replace(ecc_errors=self._ecc[1] - self._ecc[0])
            return Reading(lost=1.0) if self._lost else self._known

    def sample(self) -> None:
        """Take one sample. Raises `GpuLost` if the GPU is unreachable."""
        gpu = self._gpu
        joules, now = gpu.joules(), time.perf_counter()
        watts, reasons, sm, memory = gpu.watts(), gpu.reasons(), gpu.sm_mhz(), gpu.memory_mhz()
        celsius, memory_celsius, ecc = gpu.celsius(), gpu.memory_celsius(), gpu.ecc_errors()
        sample = _Sample(now, joules, watts, not self._idle())
        before, self._before = self._before, sample
        with self._lock:
            if ecc is not None:
                self._ecc = (ecc if self._ecc is None else self._ecc[0], ecc)
            window = self._window
            window.celsius = _higher(window.celsius, celsius)
            window.memory_celsius = _higher(window.memory_celsius, memory_celsius)
            if before is None or not (before.training and sample.training):
                return
            span = max(now - before.seconds, 1e-9)
            window.add("watts", _power(before, sample), span)
            window.add("sm_mhz", sm, span)
            window.add("memory_mhz", memory, span)
            if reasons is None:
                return
            for name, bits in _REASONS.items():
                window.add(name, 1.0 if reasons & bits else 0.0, span)
            if sm is not None:
                window.add("speed", self._speed(reasons, sm), span)

    def _speed(self, reasons: int, mhz: float) -> float:
        """Return the clock over the clock without throttling; 1 while nothing throttles."""
        if not reasons & THROTTLED:
            if not reasons & IDLE:
                self._free_mhz = max(self._free_mhz, mhz)
            return 1.0
        free = self._free_mhz or self._gpu.max_sm_mhz or mhz
        return min(max(mhz, 1.0) / free, 1.0)

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._stop.wait(max(due - time.monotonic(), 0.0)):
                self.sample()
                due = max(due + self._seconds, time.monotonic())  # missed samples are not made up
        except Exception as error:  # GpuLost or any other: a stale reading must not pass for a current one
            with self._lock:
                self._lost = True
            logging.getLogger(__name__).warning("NVML has lost %s: %s", self._gpu.uuid, error)


_REASONS = {"throttled": THROTTLED, "power_cap": POWER_CAP, "thermal": THERMAL, "hardware": HARDWARE}


def _power(before: _Sample, sample: _Sample) -> float | None:
    """Return the watts between two samples: by the energy counter, else by the readings at both ends."""
    if before.joules is not None and sample.joules is not None:
        return (sample.joules - before.joules) / max(sample.seconds - before.seconds, 1e-9)
    known = [watts for watts in (before.watts, sample.watts) if watts is not None]
    return sum(known) / len(known) if known else None


def _higher(a: float, b: float | None) -> float:
    return a if b is None else b if math.isnan(a) else max(a, b)


@dataclass
class MeteredGpus:
    """The GPU that a rank meters, and the coverage of the job."""

    gpu: Gpu | None
    ranks: list[int]
    """Metered ranks. Of ranks that share a GPU, the first."""
    whole: bool
    """Whether these are all GPUs of the job."""
    problem: str
    """Why some are missing, or ""."""


def find_gpus(config: PowerConfig, world: World) -> MeteredGpus:
    """Find each rank's GPU. A collective. Raises UserError on every rank if metering is required and impossible."""
    if config.enabled is Switch.false or (config.enabled is Switch.auto and world.device.type != "cuda"):
        return MeteredGpus(None, [], False, "")
    gpu, problem = None, ""
    try:
        gpu = find(world.device)
    except (Unavailable, GpuLost) as error:
        problem = str(error)
    uuids = world.gather((gpu.uuid or f"rank {world.rank}" if gpu else "", problem))
    missing = [(rank, why) for rank, (uuid, why) in enumerate(uuids) if not uuid]
    problem = ""
    if missing:
        rank, why = missing[0]
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        problem = f"rank {rank}{others}: {why}" if world.is_distributed else why
        if config.enabled is Switch.true:
            raise UserError(f"health.power.enabled=true: {problem}; or set health.power.enabled=auto")
    first = {uuid: rank for rank, (uuid, _) in reversed(list(enumerate(uuids))) if uuid}
    own = gpu if gpu is not None and world.rank in first.values() else None
    return MeteredGpus(own, sorted(first.values()), not missing, problem)


class PowerMeter:
    """Power and heat of the job, for `metrics.jsonl`. event: `Sinks.event`."""

    def __init__(self, found: MeteredGpus, config: PowerConfig, world: World, event: Callable[..., None]) -> None:
        self._found, self._config, self._world, self._event = found, config, world, event
        self._sampler: Sampler | None = None
        self._lost: set[int] = set()
        self.readings: list[Reading] = []
        """Readings of the latest line by rank; empty if nothing is metered."""

    def start(self, step: int, idle: Callable[[], bool]) -> None:
        """Start sampling and log what is metered, or why nothing is. idle: as for `Sampler`."""
        log, gpu = logging.getLogger(__name__), self._found.gpu
        if self._found.problem:
            means = "some GPUs are not metered" if self._found.ranks else "off"
            self._event("power", step, f"{means}: {self._found.problem}")
        elif not self._found.ranks:
            why = "health.power.enabled=false" if self._config.enabled is Switch.false else "no GPU"
            log.info("power and temperature are not measured: %s", why)
        if gpu is None:
            return
        limit = f", limit {gpu.limit_watts:.0f} W" if gpu.limit_watts is not None else ""
        part = "; the run uses a slice of it, and measurements are of the whole GPU" if gpu.sliced else ""
        log.info("metering %s %s%s%s", gpu.name, gpu.uuid, limit, part)
        self._sampler = Sampler(gpu, self._config.seconds, idle)
        self._sampler.start()

    def read(self, step: int, tokens: int, seconds: float, steps: int) -> dict[str, float]:
        """Return the gpu/ keys of a logged line, the same on all ranks; empty if nothing is metered. A collective.

        tokens (of all ranks), seconds of training and `steps` are counted since the line before.
        """
        if not self._found.ranks:
            return {}
        own = self._sampler.take() if self._sampler is not None else Reading()
        readings = self.readings = [Reading(*row) for row in self._world.gather_numbers(list(own))]
        for rank in self._found.ranks:
            if readings[rank].lost and rank not in self._lost:
                self._lost.add(rank)
                message = f"NVML has lost the GPU of rank {rank}; its power and temperature are no longer measured"
                self._event("power", step, message, rank=rank, failed=True)
        whole = self._found.whole and not any(math.isnan(readings[rank].watts) for rank in self._found.ranks)
        return combine(readings, whole, tokens, seconds, steps)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()


def combine(readings: list[Reading], whole: bool, tokens: int, seconds: float, steps: int) -> dict[str, Any]:
    """Reduce readings by rank to the gpu/ keys: the sum of the power, the worst value of the rest. A key that no rank
    has is left out.

    whole: whether all GPUs of the job are included; energy per token needs that.
    """
    values: dict[str, Any] = {}

    def worst(key: str, name: str, of: Callable[[list[float]], float]) -> None:
        known = [value for reading in readings if not math.isnan(value := getattr(reading, name))]
        if known:
            values[f"gpu/{key}"] = of(known)

    worst("power_watts", "watts", sum)
    if whole and tokens and "gpu/power_watts" in values:
        joules = values["gpu/power_watts"] * seconds
        values |= {"gpu/joules_per_token": joules / tokens, "gpu/joules_per_step": joules / steps}
    worst("temperature_c", "celsius", max)
    worst("memory_temperature_c", "memory_celsius", max)
    worst("clock_mhz", "sm_mhz", min)
    worst("memory_clock_mhz", "memory_mhz", min)
    worst("throttled_share", "throttled", max)
    worst("throttled_power_cap", "power_cap", max)
    worst("throttled_thermal", "thermal", max)
    worst("throttled_hardware", "hardware", max)
    speeds = [reading.speed for reading in readings if not math.isnan(reading.speed)]
    if speeds:
        values["gpu/tokens_lost"] = tokens * (1 / min(speeds) - 1)
    worst("ecc_errors", "ecc_errors", sum)
    if len(readings) > 1:
        _name(values, "hottest_rank", [reading.celsius for reading in readings], -math.inf)
        _name(values, "hottest_memory_rank", [reading.memory_celsius for reading in readings], -math.inf)
        slowed = [_higher(reading.thermal, reading.hardware) for reading in readings]
        _name(values, "throttled_rank", slowed, 0.0)
    return values


def _name(values: dict[str, Any], key: str, of: list[float], above: float) -> None:
    """Store the rank with the largest value under `key`, if that is greater than `above`."""
    rank = max(range(len(of)), key=lambda i: -math.inf if math.isnan(of[i]) else of[i])
    if of[rank] > above:
        values[f"gpu/{key}"] = rank
