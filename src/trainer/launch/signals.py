"""SIGINT, SIGTERM and SIGHUP: finish the step, save, leave; all ranks after the same step.

A signal reaches the ranks at different moments, in different steps. So each step ends with a small sum over all hosts,
not GPUs: has any rank received a signal? The sum travels while the next step runs, and is read at the end of that step,
so that no rank waits for it: the run stops one step later than a single process would. Since the ranks of a run are at
most one step apart, the sum also exposes a rank that hangs: the others wait for it there, or, if they read a number
from their GPU first, in the operation that the GPU waits in.
"""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import torch

from trainer.launch.interrupts import stopping
from trainer.launch.liveness.exit_report import pending_operation

if TYPE_CHECKING:
    from torch.distributed import Work

    from trainer.launch.world import World


ONE_SECONDS = 0.5  # signals closer together count as one: `timeout` signals the process and its group


class StopSignals:
    """While active, the first of these signals is recorded; a second one acts as usual.

    Processes of a job may get the first one twice, from the scheduler and from torchrun, so there only a signal of
    another kind counts as second: torchrun sends SIGTERM to those that still save after a second Ctrl-C.

    received: name of a signal recorded before the last call of `agree`, on this rank or another.
    """

    def __init__(self, world: World | None = None) -> None:
        self.received: str | None = None
        self._reported = 0
        self._world = world if world is not None and world.is_distributed else None
        self._noted = (
            world.rank_group.stop_signal if world is not None else 0
        )  # received before training, and swallowed
        self._since: float | None = None  # time of the first one
        self._before: dict[int, object] = {}
        self._question: tuple[torch.Tensor, Work] | None = None

    def agree(self) -> None:
        """Exchange signals. Call it after each step, on all ranks."""
        if self._world is None:
            self._receive(self._noted)
            return
        if self._question is not None:
            self._receive(self._answer(*self._question))
        if self.received is None:
            import torch.distributed as dist

            number = torch.tensor(self._noted)
            work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self._world.control, async_op=True)
            assert work is not None
            self._question = number, work
            timeout = self._world.timeout
            deadline = time.monotonic() + timeout
            self._world.rank_group.overdue = lambda: (
                time.monotonic() > deadline and (not work.is_completed() or pending_operation(timeout) is not None)
            )

    def new_signal(self) -> str | None:
        """Return the name of a signal recorded on this rank since the last call, to report that the process
        continues."""
        before, self._reported = self._reported, self._noted
        return signal.Signals(self._noted).name if self._noted != before else None

    def _answer(self, number: torch.Tensor, work: Work) -> int:
        self._question = None
        work.wait()
        return int(number)

    def _receive(self, number: int) -> None:
        if number and self.received is None:
            self.received = signal.Signals(number).name

    def __enter__(self) -> StopSignals:
        for number in stopping():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if error is None and self._question is not None:  # the run is over anyway
            self._answer(*self._question)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        is_closing = number == signal.SIGHUP  # a terminal that is closed after Ctrl-C says nothing about haste
        if self._world is None and now > self._since + ONE_SECONDS and not is_closing:
            signal.signal(number, self._before[number])  # type: ignore[arg-type]
            signal.raise_signal(number)
        self._noted = number
        if self._world is not None:
            for other in self._before.keys() - {number}:
                signal.signal(other, self._before[other])  # type: ignore[arg-type]
