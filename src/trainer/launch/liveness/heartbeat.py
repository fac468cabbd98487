"""The heartbeat: a thread of each process that reports a dead rank, so that no other waits for it. See `rank_group`."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

from trainer.launch.launcher import Launch
from trainer.launch.liveness.exit_report import describe_exit, this_process
from trainer.launch.liveness.job_store import LOOK_SECONDS, Failure, JobStore, when

PULSE_SECONDS = 5.0
SILENCES = 9
"""Missing pulses in a row after which a rank counts as lost."""
LONG_SILENCES = 120
"""The same for a rank in a phase that may silence it (`RankGroup.phase`)."""
PATIENCE = 5.0
"""Seconds that ranks which fail together wait for each other, so that the right one is named."""


class Member(Protocol):
    """The heartbeat's view of its process: see `rank_group.RankGroup`."""

    launch: Launch
    step: int
    all_connected: bool
    overdue: Callable[[], bool]

    def end(self, failure: Failure) -> NoReturn: ...
    def unresponsive(self, number: int) -> NoReturn: ...
    def collective_timeout(self) -> Failure: ...
    def lost(self) -> Failure: ...
    def place(self) -> str: ...
    @property
    def has_announced(self) -> bool: ...


class Heartbeat(threading.Thread):
    """Sends the pulse, and watches for failures, dying neighbours and missing pulses.

    waker: where Python writes the number of each signal at once (`signal.set_wakeup_fd`). Python's handler waits for
    main, and until all ranks have connected, main may wait in C++ for a rank that never comes.
    """

    def __init__(self, member: Member, store: JobStore) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._member, self._store, self._stopping = member, store, False
        self._poll = select.poll()
        self._wake, self.waker = os.pipe()
        os.set_blocking(self.waker, False)
        self._signal: tuple[int, float] | None = None  # its number, and the deadline for main to end
        self._poll.register(self._wake, select.POLLIN)
        launch = member.launch
        first = launch.rank - launch.local_rank
        self._unmet_neighbours = {rank for rank in range(first, first + launch.local_size) if rank != launch.rank}
        self._neighbours: dict[int, tuple[int, int]] = {}  # descriptor -> rank, process
        self._watched = [rank for rank in range(launch.size) if rank != launch.rank and (launch.is_first or rank == 0)]
        self._pulses: dict[int, tuple[str, int]] = {}  # rank -> its last pulse, number of checks since
        self._beats = 0

    def stop(self, seconds: float | None = None) -> None:
        """Stop the thread and join it, for at most `seconds`."""
        self._stopping = True
        os.write(self.waker, b"\0")
        self.join(seconds)

    def kill_unresponsive(self, rank: int) -> None:
        """Kill a neighbour that does not react to the failure: a stopped process, for which the launcher would wait."""
        descriptor = next((key for key, (neighbour, _) in self._neighbours.items() if neighbour == rank), None)
        if descriptor is None:
            return
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self._store.has("seen", rank):
                return
            time.sleep(LOOK_SECONDS / 5)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def run(self) -> None:
        """Run until `stop`, or until there is a failure."""
        due, step = 0.0, 0
        try:
            while not self._stopping:
                pause = LOOK_SECONDS / 10 if self._unmet_neighbours else LOOK_SECONDS
                for descriptor, _ in self._poll.poll(pause * 1000):
                    if descriptor in self._neighbours:
                        self._gone(*self._neighbours[descriptor], descriptor)
                    if descriptor == self._wake:
                        self._receive_signals(os.read(self._wake, 64))
                if self._stopping:
                    return
                if self._signal is not None and not self._member.all_connected and time.monotonic() > self._signal[1]:
                    self._member.unresponsive(self._signal[0])
                if not self._member.has_announced and (failure := self._store.failure()) is not None:
                    self._member.end(failure)
                if self._member.overdue():
                    self._member.end(self._member.collective_timeout())
                self._meet()
                if not self._member.all_connected and (absent := self._store.get("absent")):
                    self._miss(int(absent))
                if self._member.step != step or time.monotonic() >= due:
                    step = self._member.step
                    self._beats += 1
                    self._store.set("pulse", self._member.launch.rank, f"{self._beats}|{step}|{self._member.place()}")
                if time.monotonic() >= due:
                    due = time.monotonic() + PULSE_SECONDS
                    self._check_pulses()
        except RuntimeError:
            if not self._stopping and not self._member.has_announced:  # else main ends by itself
                self._member.end(self._member.lost())

    def _receive_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) and self._signal is None:
                self._signal = number, time.monotonic() + PATIENCE

    def _meet(self) -> None:
        """Open a descriptor of each neighbour that has registered."""
        for rank in list(self._unmet_neighbours):
            if who := self._store.get("who", rank):
                self._unmet_neighbours.discard(rank)
                host, process, namespace = who.split()
                here = this_process()
                if [host, namespace] != [here[0], here[2]]:  # its number means nothing here: see `_check_pulses`
                    continue
                process = int(process)
                try:
                    descriptor = os.pidfd_open(process)
                except ProcessLookupError:
                    self._gone(rank, process, None)
                except (OSError, AttributeError):  # not Linux, or not allowed: only its pulse remains
                    continue
                else:
                    self._neighbours[descriptor] = rank, process
                    self._poll.register(descriptor, select.POLLIN)

    def _miss(self, rank: int) -> None:
        """End the job, in which all others wait for a rank that has ended its work without them."""
        message = f"error: rank {rank} ended before all ranks had connected; start all with one command"
        self._member.end(Failure(message, 1, rank, self._member.launch.rank, 0))

    def _gone(self, rank: int, process: int, descriptor: int | None) -> None:
        """Handle the end of a neighbour's process."""
        how = describe_exit(process, descriptor)
        if descriptor is not None:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            del self._neighbours[descriptor]
        if self._store.has("left", rank) or self._store.has("failure"):
            return
        self._end(rank, how)

    def _check_pulses(self) -> None:
        """Count the checks without a new pulse of each watched rank, and end the job for a silent one."""
        for rank in self._watched:
            if not self._store.has("pulse", rank) or self._store.has("left", rank):
                continue
            pulse = self._store.pulse(rank)
            before, times = self._pulses.get(rank, ("", 0))
            self._pulses[rank] = pulse, times + 1 if pulse == before else 0
            silences = self._pulses[rank][1]
            if silences >= SILENCES:
                phase = self._store.get("phase", rank)
                if phase and silences < LONG_SILENCES:
                    continue
                why = f", while {phase}" if phase else " (is its node lost?)"
                self._end(rank, f"has been unresponsive for {round(silences * PULSE_SECONDS)} s{why}")

    def _end(self, rank: int, how: str) -> None:
        step = max(self._member.step, self._store.position(rank)[0])  # its pulse is up to half a second old
        message = f"error: {self._store.describe(rank)} {how}, {when(step)}"
        self._member.end(Failure(message, 1, rank, self._member.launch.rank, step))
