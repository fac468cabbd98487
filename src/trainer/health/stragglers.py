"""The rank that the others wait for, and the bubble of a pipeline: a few numbers of each rank at a logged line.

Collectives make all ranks as slow as the slowest. Inside a step every rank waits for others, so step times name no
rank. Each rank therefore measures work of its own that waits for none:

    GPU     a product of fixed size, a few milliseconds, behind the logged step, while the GPU is as warm as it gets:
            its own time against the median of the others'
    data    what the host waits for the rank's sequences before a step: beyond the median of the others', as a share of
            the step

A line has, the same on all ranks (`ranks/`): gpu_slowness (0.25: a quarter slower), data_wait, the rank of each, and
clock and temperature of that GPU if NVML meters it. `perf/bubble` is the share of the latest step's passes in which
ranks waited for other stages, averaged over ranks; the forecast stands beside it. Reading does not wait for the device:
the line's copy has.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median

import torch

from trainer.health.power import Reading
from trainer.launch.world import World
from trainer.step.stage_clock import StageClock

SIZE, TIMES = 4096, 16  # of the square matrices, 96 MiB; number of products: 4 ms on an H200


class Stragglers:
    """The comparison of a run's ranks. compares: whether it is on (`health.alerts.straggler`). bubble: the stages'
    clock and the forecast."""

    def __init__(self, world: World, compares: bool, bubble: tuple[StageClock, float] | None = None):
        self._world, self._bubble = world, bubble
        self._compares = compares and world.is_distributed
        self._waited = 0.0
        self._probe = GpuProbe(world.device) if self._compares and world.device.type == "cuda" else None

    @contextmanager
    def waits_for_data(self) -> Iterator[None]:
        """Time the reading of a step's sequences."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def launch(self) -> None:
        """Launch the probe. Call it before the line's copy to the host."""
        if self._probe is not None:
            self._probe.launch()

    def read(self, seconds: float, gpus: Sequence[Reading]) -> dict[str, float]:
        """Return the line's keys; call it after the line's copy. A collective. seconds: of training since the line
        before. gpus: readings by rank, if metered."""
        if not self._compares and self._bubble is None:
            return {}
        data, self._waited = self._waited / seconds, 0.0
        probe = math.nan if self._probe is None else self._probe.seconds
        idle = math.nan if self._bubble is None else self._bubble[0].idle_share
        probes, waits, idles = zip(*self._world.gather_numbers([probe, data, idle]), strict=True)
        found = {} if self._bubble is None else {"perf/bubble": fmean(idles), "perf/bubble_forecast": self._bubble[1]}
        return found | (compare(probes, waits, gpus) if self._compares else {})


def compare(probes: Sequence[float], waits: Sequence[float], gpus: Sequence[Reading]) -> dict[str, float]:
    """Return the ranks/ keys of at least two ranks. probes: seconds of the ranks' products (NaN: not measured). waits:
    shares of a step for which they wait for data. gpus: readings of their GPUs."""
    found: dict[str, float] = {}
    late = [wait - _others(waits, rank) for rank, wait in enumerate(waits)]
    found["ranks/data_wait"], found["ranks/data_rank"] = _largest(late)
    if not any(math.isnan(probe) for probe in probes):
        slow = [probe / _others(probes, rank) - 1 for rank, probe in enumerate(probes)]
        found["ranks/gpu_slowness"], rank = _largest(slow)
        found["ranks/gpu_rank"] = rank
        if gpus:
            known = {"gpu_clock_mhz": gpus[rank].sm_mhz, "gpu_celsius": gpus[rank].celsius}
            found |= {f"ranks/{key}": value for key, value in known.items() if not math.isnan(value)}
    return found


def _others(values: Sequence[float], rank: int) -> float:
    return median(value for other, value in enumerate(values) if other != rank)


def _largest(values: Sequence[float]) -> tuple[float, int]:
    return max((value, rank) for rank, value in enumerate(values))


class GpuProbe:
    """A product of fixed matrices, timed on the device."""

    def __init__(self, device: torch.device):
        generator = torch.Generator(device=device).manual_seed(1)
        self._a = torch.randn(SIZE, SIZE, device=device, generator=generator).half()
        self._b, self._out = self._a.t().contiguous(), torch.empty_like(self._a)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def launch(self) -> None:
        """Launch the products on the current stream."""
        self._begin.record()
        for _ in range(TIMES):
            torch.mm(self._a, self._b, out=self._out)
        self._end.record()

    @property
    def seconds(self) -> float:
        """Duration of the latest launch. The caller has waited for it."""
        return self._begin.elapsed_time(self._end) / 1e3
