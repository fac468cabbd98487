"""StepSnapshot: the numbers of a bad step, kept on the device until the host reads and evaluates them.

A good step must not wait for the host, so the host does not ask during the step whether it was bad. Each step copies
its numbers into a small buffer on the device: a good one into a slot that is never read, a bad one into the next free
slot:

    amax [M, N + 1]   this rank's amaxes after each of its M microbatches, before the reduction over ranks, and the
                      microbatch's loss beside them. Amaxes are maxima, so the first row with a number that is not
                      finite is the microbatch in which it began, and the row gives the place
    rows [2, N]       amaxes of the whole step over all ranks, and the scales that it was cast with

That costs a copy a microbatch and a few small kernels a step. The host reads at its next review, on a GPU up to one
logging interval later: the first `KEPT` - 1 bad steps since the last review, and the last one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from precision import ScalingArena

KEPT = 4


@dataclass
class StepSnapshot:
    """One bad step, on the host. N arena rows, M microbatches of this rank.

    own [M, N]: this rank's amaxes after each microbatch; loss [M]: of each; amax [N]: of the step, over all ranks;
    scale [N]: of the casts, 0 for tensors with scales of their own; committed: steps committed before it.
    """

    own: Tensor
    loss: Tensor
    amax: Tensor
    scale: Tensor
    committed: int

    @property
    def microbatch(self) -> int | None:
        """The first of this rank's microbatches with a number that is not finite, or None."""
        bad = ~(torch.isfinite(self.own).all(1) & torch.isfinite(self.loss))
        return int(bad.int().argmax()) if bad.any() else None


class SnapshotKeeper:
    """Keeps the numbers of an arena's bad steps. See the module docstring."""

    def __init__(self, arena: ScalingArena):
        self._arena = arena
        device, size = arena.amax.device, len(arena.names)
        self._now = torch.zeros(0, size + 1, device=device)
        self._kept = torch.zeros(KEPT + 1, 0, size + 1, device=device)
        self._rows = torch.zeros(KEPT + 1, 2, size, device=device)
        self._committed = torch.zeros(KEPT + 1, dtype=torch.long, device=device)
        self._count = torch.zeros((), dtype=torch.long, device=device)
        self._nowhere = torch.tensor(KEPT, device=device)

    def begin(self, microbatches: int) -> None:
        """Begin a step of this many microbatches."""
        if self._now.shape[0] != microbatches:
            size = self._now.shape[1]
            self._now = self._now.new_zeros(microbatches, size)
            self._kept = self._kept.new_zeros(KEPT + 1, microbatches, size)

    def note(self, microbatch: int, loss: Tensor) -> None:
        """Copy a microbatch's loss, 0-d, and the amaxes so far. Call it after each microbatch."""
        torch.cat([self._arena.amax, loss.detach().float()[None]], out=self._now[microbatch])

    def keep(self, ok: Tensor, committed: Tensor) -> None:
        """Keep the step unless it is ok (0-d bool). Call it after the verdict, before the arena commits. committed: 0-d
        int64, steps committed so far."""
        slot = torch.where(ok, self._nowhere, self._count.clamp(max=KEPT - 1))[None]
        self._kept.index_copy_(0, slot, self._now[None])
        self._rows.index_copy_(0, slot, torch.stack([self._arena.amax, self._arena.in_force()])[None])
        self._committed.index_copy_(0, slot, committed[None])
        self._count += ~ok

    def take(self) -> list[StepSnapshot | None]:
        """Return the bad steps since the last call, in order; None for those that were overwritten. Synchronises."""
        count = int(self._count)
        self._count.zero_()
        kept, rows, committed = self._kept.cpu(), self._rows.cpu(), self._committed.tolist()
        found: list[StepSnapshot | None] = [None] * count
        for slot in range(min(count, KEPT)):
            step = count - 1 if slot == KEPT - 1 else slot
            own, loss = kept[slot, :, :-1].clone(), kept[slot, :, -1].clone()
            amax, scale = rows[slot].clone()
            found[step] = StepSnapshot(own, loss, amax, scale, committed[slot])
        return found
