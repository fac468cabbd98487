"""A thread of each process that reports a dead rank, so that no other waits for it. See `rank_group`."""

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from trainer.launch.launcher import Launch
from trainer.launch.liveness.exit_report import how_it_ended, this_process

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore  # torch.distributed has it too, and does not say so

LOOK_SECONDS = 0.5
"""Between two looks for news."""
PULSE_SECONDS = 5.0
SILENCES = 9
"""Pulses that may fail to come before a rank counts as lost."""
LONG_SILENCES = 120
"""The same for a rank in a phase that may keep it silent (`RankGroup.phase`)."""
PATIENCE = 5.0
"""Seconds that those who fail together wait for each other, so that the right one is named."""


@dataclass(frozen=True)
class News:
    """Why the job ends: what there is to say, the exit code of all, the rank it is about, and who found out."""

    message: str
    code: int
    rank: int
    finder: int
    step: int
    traceback: str = ""


class Watched(Protocol):
    """What the watch asks of its process: see `rank_group.RankGroup`."""

    launch: Launch
    step: int
    met: bool
    overdue: Callable[[], bool]

    def end(self, news: News) -> NoReturn: ...
    def deaf(self, number: int) -> NoReturn: ...
    def waited_in_vain(self) -> News: ...
    def lost(self) -> News: ...
    def has(self, kind: str, which: object = None) -> bool: ...
    def name(self, kind: str, which: object = None) -> str: ...
    def pulse(self) -> str: ...
    def pulse_of(self, rank: int) -> tuple[int, str]: ...
    def describe(self, rank: int) -> str: ...
    def phase_of(self, rank: int) -> str: ...
    @property
    def has_announced(self) -> bool: ...


class Watch(threading.Thread):
    """Sends the pulse, looks for news, for neighbours that die and for pulses that stop.

    waker: where Python puts the number of each signal at once (`signal.set_wakeup_fd`). Its handler waits for main, and
    main, until all have met, may wait in C++ for one that never comes.
    """

    def __init__(self, rank_group: Watched, store: "TCPStore") -> None:
        super().__init__(name="watch", daemon=True)
        self._crew, self._store, self._stopping = rank_group, store, False
        self._poll = select.poll()
        self._wake, self.waker = os.pipe()
        os.set_blocking(self.waker, False)
        self._told: tuple[int, float] | None = None  # a signal, and when main should have ended
        self._poll.register(self._wake, select.POLLIN)
        launch = rank_group.launch
        first = launch.rank - launch.local_rank
        self._strangers = {rank for rank in range(first, first + launch.local_size) if rank != launch.rank}
        self._neighbours: dict[int, tuple[int, int]] = {}  # descriptor -> rank, process
        self._watched = [rank for rank in range(launch.size) if rank != launch.rank and (launch.is_first or rank == 0)]
        self._pulses: dict[int, tuple[str, int]] = {}  # rank -> its last pulse, how often it was looked at
        self._beats = 0

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stopping = True
        os.write(self.waker, b"\0")
        self.join()

    def kill_unresponsive(self, rank: int) -> None:
        """End a neighbour that the news does not reach: a stopped process, for which the launcher would wait."""
        descriptor = next((key for key, (neighbour, _) in self._neighbours.items() if neighbour == rank), None)
        if descriptor is None:
            return
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self._crew.has("seen", rank):
                return
            time.sleep(LOOK_SECONDS / 5)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def run(self) -> None:
        """Until `stop`, or until there is news."""
        due, step = 0.0, 0
        try:
            while not self._stopping:
                pause = LOOK_SECONDS / 10 if self._strangers else LOOK_SECONDS
                for descriptor, _ in self._poll.poll(pause * 1000):
                    if descriptor in self._neighbours:
                        self._gone(*self._neighbours[descriptor], descriptor)
                    if descriptor == self._wake:
                        self._hear(os.read(self._wake, 64))
                if self._stopping:
                    return
                if self._told is not None and not self._crew.met and time.monotonic() > self._told[1]:
                    self._crew.deaf(self._told[0])
                if not self._crew.has_announced and self._store.check([self._crew.name("news")]):
                    self._crew.end(News(**json.loads(self._store.get(self._crew.name("news")))))
                if self._crew.overdue():
                    self._crew.end(self._crew.waited_in_vain())
                self._meet()
                if self._crew.step != step or time.monotonic() >= due:
                    step = self._crew.step
                    self._beats += 1
                    mine = f"{self._beats}|{self._crew.pulse()}"
                    self._store.set(self._crew.name("pulse", self._crew.launch.rank), mine)
                if time.monotonic() >= due:
                    due = time.monotonic() + PULSE_SECONDS
                    self._listen()
        except RuntimeError:
            if not self._stopping:
                self._crew.end(self._crew.lost())

    def _hear(self, numbers: bytes) -> None:
        """Signals have come."""
        for number in numbers:
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) and self._told is None:
                self._told = number, time.monotonic() + PATIENCE

    def _meet(self) -> None:
        """Take a descriptor of each neighbour that has come."""
        for rank in list(self._strangers):
            if self._store.check([self._crew.name("who", rank)]):
                self._strangers.discard(rank)
                host, process, namespace = self._store.get(self._crew.name("who", rank)).decode().split()
                here = this_process()
                if [host, namespace] != [here[0], here[2]]:  # its number is another process here: see `_listen`
                    continue
                process = int(process)
                try:
                    descriptor = os.pidfd_open(process)
                except ProcessLookupError:
                    self._gone(rank, process, None)
                except (OSError, AttributeError):  # not Linux, or not allowed: its pulse is all there is
                    continue
                else:
                    self._neighbours[descriptor] = rank, process
                    self._poll.register(descriptor, select.POLLIN)

    def _gone(self, rank: int, process: int, descriptor: int | None) -> None:
        """A neighbour's process has ended."""
        how = how_it_ended(process, descriptor)
        if descriptor is not None:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            del self._neighbours[descriptor]
        if any(self._store.check([self._crew.name(key)]) for key in (f"left/{rank}", "news")):
            return
        self._end(rank, how)

    def _listen(self) -> None:
        """Count how often the pulse of those who are watched has been the same."""
        for rank in self._watched:
            key = self._crew.name("pulse", rank)
            if not self._store.check([key]) or self._store.check([self._crew.name("left", rank)]):
                continue
            pulse = self._store.get(key).decode()
            before, times = self._pulses.get(rank, ("", 0))
            self._pulses[rank] = pulse, times + 1 if pulse == before else 0
            silences = self._pulses[rank][1]
            if silences >= SILENCES:
                phase = self._crew.phase_of(rank)
                if phase and silences < LONG_SILENCES:
                    continue
                why = f", while {phase}" if phase else " (is its node lost?)"
                self._end(rank, f"has given no sign of life for {round(silences * PULSE_SECONDS)} s{why}")

    def _end(self, rank: int, how: str) -> None:
        step = max(self._crew.step, self._crew.pulse_of(rank)[0])  # its pulse is up to half a second old
        message = f"error: {self._crew.describe(rank)} {how}, {when(step)}"
        self._crew.end(News(message, 1, rank, self._crew.launch.rank, step))


def when(step: int) -> str:
    return f"in step {step}" if step else "before its first step"
