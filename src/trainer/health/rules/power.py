"""Rules about the GPUs' heat and clocks, from the gpu/ keys (`trainer.health.power`).

A GPU at its power limit works as intended and raises no alert. Alerts are about what an administrator can repair: poor
air or water cooling, power throttling by the supply, failing memory.
"""

from typing import ClassVar

from precision.errors import counted
from trainer.health.alerts import Alert, Entry, Rule, number


class Throttled(Rule):
    """Heat or the board's own protection slowed a GPU for more than this share of the time, in two lines in a row."""

    name, of_process = "throttled", True

    def __init__(self, share: float):
        self._share, self._before = share, 0.0
        self._reading: tuple[float | None, ...] = ()

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        shares = {why: number(metrics, f"gpu/throttled_{why}") for why in ("hardware", "thermal")}
        known = {why: share for why, share in shares.items() if share is not None}
        reading = (*shares.values(), number(metrics, "gpu/power_watts"))
        if not known or reading == self._reading:  # lines more frequent than samples repeat the last one
            return None
        self._reading = reading
        why = max(known, key=lambda each: known[each])
        share, before = known[why], self._before
        self._before = share
        if min(share, before) <= self._share:
            return []
        how = {"thermal": "heat slows", "hardware": "the board's own protection (heat, current, power brake) slows"}
        clock = number(metrics, "gpu/clock_mhz")
        at = f", to {clock:.0f} MHz" if clock is not None else ""
        message = (
            f"{how[why]} {_gpu_of_rank(metrics, 'throttled_rank')} for {100 * share:.0f} % of the time{at}; all ranks "
            "wait for it: check fans, airflow and power supply (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE` there)"
        )
        return [Alert(self.name, step, message, share, self._share)]


class _TemperatureLimit(Rule):
    """A GPU was warmer than this at any sample since the line before."""

    of_process = True
    key: ClassVar[str]
    what: ClassVar[str]
    rank: ClassVar[str]

    def __init__(self, celsius: float):
        self._celsius = celsius

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        hot = number(metrics, self.key)
        if hot is None:
            return None
        if hot <= self._celsius:
            return []
        message = (
            f"{self.what} of {_gpu_of_rank(metrics, self.rank)} is at {hot:.0f} °C "
            f"(health.alerts.{self.name}={self._celsius:g}): it will throttle soon, then shut down; cool it, or "
            "lower its power limit (`nvidia-smi -pl`)"
        )
        return [Alert(self.name, step, message, hot, self._celsius)]


class GpuCelsius(_TemperatureLimit):
    """The core is too hot."""

    name, key, what, rank = "gpu_celsius", "gpu/temperature_c", "the core", "hottest_rank"


class GpuMemoryCelsius(_TemperatureLimit):
    """The memory is too hot."""

    name, key, what, rank = "gpu_memory_celsius", "gpu/memory_temperature_c", "the memory", "hottest_memory_rank"


class GpuMemoryErrors(Rule):
    """More than this many uncorrectable ECC errors since the process started."""

    name, of_process, lasting = "gpu_memory_errors", True, True

    def __init__(self, count: float):
        self._count = count

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        errors = number(metrics, "gpu/ecc_errors")
        if errors is None:
            return None
        if errors <= self._count:
            return []
        message = (
            f"{counted(int(errors), 'error')} in GPU memory that ECC could not correct: numbers may be wrong. "
            "Resume from a checkpoint before it, on another GPU; "
            "`nvidia-smi -q -d ECC,ROW_REMAPPER` shows which one is failing"
        )
        return [Alert(self.name, step, message, errors, self._count)]


def _gpu_of_rank(metrics: Entry, key: str) -> str:
    rank = number(metrics, f"gpu/{key}")
    return "the GPU" if rank is None else f"the GPU of rank {rank:.0f}"
