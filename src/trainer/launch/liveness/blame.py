"""Finds the rank that made a collective operation fail or time out."""

from precision.errors import listed
from trainer.launch.liveness import heartbeat
from trainer.launch.liveness.exit_report import classify_collective_error, pending_operation, timed_out_operation
from trainer.launch.liveness.job_store import Failure, JobStore, when


class Blame:
    """Finds the rank to blame, for rank `rank` of `size`."""

    def __init__(self, store: JobStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def failure_of_peer(self, error: BaseException, step: int, place: str) -> Failure | None:
        """Return the failure of another rank that caused `error`, or None if this one did. step, place: of main."""
        by_others, timed_out = classify_collective_error(error)
        if timed_out:
            return self.collective_timeout(place, timed_out_operation(error))
        return self._store.wait_for_failure(heartbeat.PATIENCE) or self._silent(step) if by_others else None

    def collective_timeout(self, place: str, operation: str | None = None) -> Failure:
        """Return the failure for a collective operation that timed out. operation: its name; None: main's current
        one."""
        if operation is None:
            operation = f"{pending_operation() or 'an operation'}, with main at {place}"
        self._store.set("late", self._rank, operation)
        return self._store.wait_for_failure(heartbeat.PATIENCE) or self._absent()

    def _silent(self, step: int) -> Failure | None:
        """Return the failure of a rank that closed its connections unseen by its neighbours: one without a pulse
        since."""
        others = [rank for rank in range(self._size) if rank != self._rank and not self._store.has("left", rank)]
        before = {rank: self._store.pulse(rank) for rank in others}
        failure = self._store.wait_for_failure(2.5 * heartbeat.PULSE_SECONDS)
        gone = [rank for rank in others if self._store.pulse(rank) == before[rank]]
        gone = [rank for rank in gone if not self._store.get("phase", rank)] or gone
        if failure is not None or not gone:
            return failure
        step = max(step, self._store.position(gone[0])[0])
        named = listed([self._store.describe(rank) for rank in gone], 4)
        message = f"error: {named} has closed its connections and is gone, {when(step)}"
        return Failure(message, 1, gone[0], self._rank, step)

    def _absent(self) -> Failure:
        """Return the failure of the ranks missing in a collective operation: those neither waiting as this one nor
        done."""
        ranks = range(self._size)
        absent = [rank for rank in ranks if not self._store.has("late", rank) and not self._store.has("left", rank)]
        at = {rank: self._store.position(rank) for rank in ranks}
        if not absent:  # all wait, for different operations: blame those behind
            absent = [rank for rank in ranks if at[rank][0] == min(step for step, _ in at.values())]
        named = [f"{self._store.describe(rank)}, {when(at[rank][0])}, at {at[rank][1]}" for rank in absent[:4]]
        named += [f"{len(absent) - 4} more"] * (len(absent) > 4)
        waiting = next((rank for rank in ranks if self._store.has("late", rank)), None)
        operation = "" if waiting is None else self._store.get("late", waiting)
        message = f"error: the other ranks timed out waiting for {'; '.join(named)}"
        message += f"; they waited in {operation}" if operation else ""
        return Failure(message, 1, absent[0], self._rank, at[absent[0]][0])
