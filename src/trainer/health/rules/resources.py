"""Rules about time and memory. They compare with this process only: another machine has other normal values."""

from itertools import pairwise
from statistics import median

from trainer.health.alerts import Alert, Entry, History, Rule, number


class ThroughputDrop(Rule):
    """Below `share` of the median of this process's lines so far with this batch and sequence length, for three
    consecutive lines and at least half a minute.

    The first lines do not count: they include compilation. One slow line (a checkpoint, a neighbour) is ignored. Slow
    lines are not part of the median.
    """

    name, of_process = "throughput_drop", True
    LINES, FIRST, FEWEST, SLOW, SECONDS = 100, 2, 10, 3, 30.0

    def __init__(self, share: float):
        self._share, self._last = share, 0
        self.another_shape()

    def another_shape(self) -> None:
        """Forget all speeds: the next steps have another one."""
        self._rates, self._seen = History(self.LINES), 0
        self._slow, self._seconds = 0, 0.0

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        rate, per_step = number(metrics, "perf/tokens_per_second"), number(metrics, "perf/step_seconds")
        steps, self._last = max(step - self._last, 0), step
        if rate is None or per_step is None:
            return None
        self._seen += 1
        if self._seen <= self.FIRST:
            return None
        usual = median(self._rates.values) if len(self._rates) >= self.FEWEST else None
        if usual is None or rate >= self._share * usual:
            self._rates.add(step, rate)
            self._slow, self._seconds = 0, 0.0
            return []
        self._slow += 1
        self._seconds += steps * per_step
        if self._slow < self.SLOW or self._seconds < self.SECONDS:
            return []
        message = (
            f"{rate:,.0f} tokens per second, {100 * rate / usual:.0f} % of the usual {usual:,.0f}, for "
            f"{self._seconds:.0f} seconds: check the GPU's clocks and temperature, other processes on the machine, "
            "the network, and the disk of the data"
        )
        return [Alert(self.name, step, message, rate, self._share * usual)]


class Straggler(Rule):
    """The same rank for five consecutive lines: its GPU is slower than the others' median by more than this share, or
    it waits longer for its data than they do by more than this share of a step and 50 ms. The first line does not
    count."""

    name, of_process = "straggler", True
    LINES, SECONDS = 5, 0.05

    def __init__(self, share: float):
        self._share = share
        self._seen: dict[str, tuple[int, int]] = {}
        self._is_first = True

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        slow, wait = number(metrics, "ranks/gpu_slowness"), number(metrics, "ranks/data_wait")
        if slow is None and wait is None:
            return None
        if wait is not None and wait * (number(metrics, "perf/step_seconds") or 0.0) < self.SECONDS:
            wait = 0.0
        if self._is_first:
            self._is_first = False
            return None
        alerts = []
        if slow is not None and (rank := self._lasting("gpu", slow, metrics)) is not None:
            known = {" MHz": number(metrics, "ranks/gpu_clock_mhz"), " °C": number(metrics, "ranks/gpu_celsius")}
            at = ", ".join(f"{value:.0f}{unit}" for unit, value in known.items() if value is not None)
            message = (
                f"the GPU of rank {rank} is {100 * slow:.0f} % slower than the others'{at and f' (at {at})'}, for "
                f"{self.LINES} lines in a row; all ranks wait for it: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE` "
                "there, or exclude that node"
            )
            alerts.append(Alert(self.name, step, message, slow, self._share, rank=rank))
        if wait is not None and (rank := self._lasting("data", wait, metrics)) is not None:
            message = (
                f"rank {rank} waits {100 * wait:.0f} % of a step longer for its data than the others, for {self.LINES} "
                "lines in a row; all ranks wait for it: check the disk, the network and the load of its host"
            )
            alerts.append(Alert(self.name, step, message, wait, self._share, rank=rank))
        return sorted(alerts, key=lambda alert: -alert.value)

    def _lasting(self, what: str, value: float, metrics: Entry) -> int | None:
        """Return the rank that was behind in all of the last lines, or None."""
        rank, (before, lines) = number(metrics, f"ranks/{what}_rank"), self._seen.get(what, (-1, 0))
        if rank is None or value <= self._share:
            self._seen.pop(what, None)
            return None
        self._seen[what] = int(rank), lines + 1 if rank == before else 1
        return int(rank) if self._seen[what][1] >= self.LINES else None


class MemoryGrowth(Rule):
    """Memory at the end of a step has crept to `share` above its earlier value.

    The time since the process began, its last half, quarter and eighth are tested: a leak may begin late. Memory creeps
    if it rises from each quarter of that time to the next. A buffer that is made once, for a first evaluation or a
    sampled step, is one step up, and no leak.
    """

    name, of_process = "memory_growth", True
    LINES, FIRST, FEWEST, LEAST_GIB = 256, 10, 24, 0.25

    def __init__(self, share: float, card_gib: float | None = None):
        self._share, self._card = share, card_gib
        self._past: list[tuple[int, float]] = []
        self._seen, self._every = 0, 1

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        held = number(metrics, "memory/allocated_gib")
        if held is None:
            return None
        self._seen += 1
        if self._seen <= self.FIRST:
            return None
        if self._seen % self._every:
            return None
        self._past = [(at, gib) for at, gib in self._past if at < step]
        self._past.append((step, held))
        if len(self._past) > self.LINES:  # spread evenly over the time of the process
            self._past, self._every = self._past[::2], 2 * self._every
        if len(self._past) < self.FEWEST:
            return None
        for part in (1, 2, 4, 8):
            points = self._past[-(len(self._past) // part) :]
            if len(points) < self.FEWEST:
                break
            quarter = len(points) // 4
            levels = [median(gib for _, gib in points[i * quarter : (i + 1) * quarter]) for i in range(4)]
            grew = levels[-1] - levels[0]
            creeps = all(b - a >= grew / 6 for a, b in pairwise(levels))
            if grew >= max(self._share * levels[0], self.LEAST_GIB) and creeps:
                return [self._alert(step, held, levels[0], grew, points[0][0])]
        return []

    def _alert(self, step: int, held: float, before: float, grew: float, since: int) -> Alert:
        per_step = grew / max(step - since, 1) * 4 / 3  # between the middles of the outer quarters
        left = look = ""
        if self._card is not None:
            left = f", full in about {(self._card - held) / per_step:,.0f} steps"
            look = ", and look at a memory snapshot (profile.steps)"  # of a GPU's memory
        message = (
            f"memory held between steps grew from {before:.2f} to {held:.2f} GiB in {step - since} steps"
            f"{left}: tensors are not freed; save and continue in a new process (run.resume=auto){look}"
        )
        return Alert(self.name, step, message, held, before * (1 + self._share))


class MemoryFull(Rule):
    """The peak approaches the size of the card. Allocations fail even earlier, for lack of a contiguous block."""

    name, of_process, lasting = "memory_full", True, True

    def __init__(self, share: float, card_gib: float | None = None):
        self._share, self._card = share, card_gib

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        peak = number(metrics, "memory/peak_gib")
        if peak is None or self._card is None:
            return None
        if peak <= self._share * self._card:
            return []
        message = (
            f"{peak:.1f} of the GPU's {self._card:.1f} GiB were in use at the peak: a larger allocation may fail; "
            "lower trainer.microbatch_size, or set recompute=selective"
        )
        return [Alert(self.name, step, message, peak, self._share * self._card)]


class AllocatorRetries(Rule):
    """More than `each` times a step, for three consecutive lines, the allocator found no contiguous block. It then
    frees its cache and asks the driver, which waits for the GPU."""

    name, of_process, lasting = "allocator_retries", True, True
    LINES = 3

    def __init__(self, each: float):
        self._each, self._lines = each, 0
        self._last: tuple[int, float] | None = None

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        count = number(metrics, "memory/allocator_retries")
        if count is None:
            return None
        last, self._last = self._last, (step, count)
        if last is None or step <= last[0]:
            return None
        a_step = (count - last[1]) / (step - last[0])
        self._lines = self._lines + 1 if a_step > self._each else 0
        if self._lines < self.LINES:
            return []
        message = (
            f"the GPU's memory is fragmented: {a_step:.2g} times a step no free block was large enough, and the "
            "allocator waited for the driver; lower trainer.microbatch_size, or set recompute=selective"
        )
        return [Alert(self.name, step, message, a_step, self._each)]
