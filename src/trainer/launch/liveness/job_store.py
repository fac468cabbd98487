"""The job's key-value store (torchrun's own, or rank 0's) as the liveness protocol uses it.

    who/R     host, process, its namespace               set at the start
    pulse/R   a count, its last step, its place          set every 5 seconds, by the heartbeat thread
    phase/R   a phase that may silence rank R for long   set by main, see `RankGroup.phase`
    left/R    rank R has finished its work               its end is no longer a failure
    absent    a rank that ended before it connected      all others would wait for it
    gone/R    rank R has stopped its heartbeat           rank 0 waits for it, if it serves the store itself
    late/R    the operation that rank R waited in        see `blame`
    seen/R    rank R has read the failure                all ranks exit together
    failure   why the job ends                              written once, by the rank that finds out first
    reported  a rank has reported the failure            rank 0, while it is alive

Every method raises RuntimeError if the store does not answer.
"""

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from trainer.launch.launcher import Launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore  # torch.distributed has it too, without declaring it

LOOK_SECONDS = 0.5
"""Interval of checks for a failure."""


@dataclass(frozen=True)
class Failure:
    """Why the job ends: the message, the exit code of all ranks, the rank it is about, and the rank that found out."""

    message: str
    code: int
    rank: int
    finder: int
    step: int
    traceback: str = ""


def connect(launch: Launch, listening: int | None = None, seconds: float = 60.0) -> "TCPStore":
    """Return a connection to the store. torchrun serves it; without torchrun rank 0 does, on the socket `listening`.

    A thread that waits in a connection blocks all threads that share it: main, the heartbeat and the process groups
    have one each.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        launch.address,
        launch.port,
        is_master=listening is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


class JobStore:
    """The keys above, for this attempt (torchrun's store outlives a restart of the job)."""

    def __init__(self, launch: Launch, store: "TCPStore") -> None:
        self._launch, self._store = launch, store

    def _key(self, kind: str, which: object = None) -> str:
        key = f"octet/{self._launch.attempt}/{kind}"
        return key if which is None else f"{key}/{which}"

    def set(self, kind: str, which: object, value: str) -> None:
        """Set a key. which: rank; None for keys of the job."""
        self._store.set(self._key(kind, which), value)

    def get(self, kind: str, which: object = None, default: str = "") -> str:
        """Return the value of a key; `default` if there is none."""
        return self._store.get(self._key(kind, which)).decode() if self.has(kind, which) else default

    def has(self, kind: str, which: object = None) -> bool:
        """Return whether a key exists."""
        return self._store.check([self._key(kind, which)])

    def add(self, kind: str, which: object, count: int) -> int:
        """Add to a counter and return its new value."""
        return self._store.add(self._key(kind, which), count)

    def wait_for_all(self, kind: str, ranks: Iterable[int], deadline: float, pause: float = LOOK_SECONDS / 5) -> None:
        """Return when each of the ranks has set its key, or at `deadline` (monotonic)."""
        keys = [self._key(kind, rank) for rank in ranks]
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(pause)

    def post(self, failure: Failure) -> Failure:
        """Write the failure unless there is one already. Return the one that counts."""
        return Failure(**json.loads(self._store.compare_set(self._key("failure"), "", json.dumps(asdict(failure)))))

    def failure(self) -> Failure | None:
        """Return the failure, or None."""
        posted = self.get("failure")
        return Failure(**json.loads(posted)) if posted else None

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """Return a failure that is posted within `seconds`, or None. Does not raise if the store does not answer."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline:
                if (failure := self.failure()) is not None:
                    return failure
                time.sleep(LOOK_SECONDS / 5)
        return None

    def describe(self, rank: int) -> str:
        """`rank 1 (host, process 123)`."""
        host, process = self.get("who", rank, "? ?").split()[:2]
        return f"rank {rank} ({host}, process {process})"

    def pulse(self, rank: int) -> str:
        """Return `COUNT|STEP|PLACE`, the last pulse of the rank."""
        return self.get("pulse", rank, "0|0|?")

    def position(self, rank: int) -> tuple[int, str]:
        """Return the (last step, place in the code) that a rank has sent."""
        _, step, place = self.pulse(rank).split("|", 2)
        return int(step), place


def when(step: int) -> str:
    """Return `in step N`, for messages."""
    return f"in step {step}" if step else "before its first step"
