"""How long a rank computes in the passes of a pipelined step, and how long it waits for other stages in between.

Marks stand at both ends of each pass. On a GPU they are events of the computing stream, which waits for received data
between two passes; on a CPU they are host times. Setting marks does not synchronise.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Mark = Any  # a time in seconds, or an event


class StageClock:
    """The clock of the latest step."""

    def __init__(self, device: torch.device):
        self._device = device
        self._ends: list[Mark] = []
        self._passes: list[tuple[Mark, Mark]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time all passes of a step inside."""
        self._passes.clear()
        begin = self._mark()
        yield
        self._ends = [begin, self._mark()]

    @contextmanager
    def computes(self) -> Iterator[None]:
        """Time a pass inside."""
        begin = self._mark()
        yield
        self._passes.append((begin, self._mark()))

    @property
    def idle_share(self) -> float:
        """Share of the step in which no pass ran. The caller has waited for the device, after at least one step."""
        return 1 - sum(_seconds(*ends) for ends in self._passes) / _seconds(*self._ends)

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Mark, end: Mark) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
