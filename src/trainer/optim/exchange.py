"""Messages that carry matrices to their owners and back, two per round.

A rank sends the rows of each matrix that it holds, in the format of the iteration, to the owner (`owners`). The owner
assembles the matrix, orthogonalises it, and sends each holder the rows of the update that it needs. One replica sends
its rows; all replicas receive theirs. Rows that the owner holds itself are not sent. A message packs its rows in the
order of runs, which is the same on all ranks. A round is a bounded part of all matrices: while it is orthogonalised,
the next round's messages travel.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trainer.optim.owners import Layout, Run

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class Fragment(NamedTuple):
    """The elements of a run's matrices in one part: `rows` of each matrix, from its row `top`, and `columns` from its
    column `left`; the first of them is at row `begin` and column `column` of the part."""

    run: Run
    top: int
    rows: int
    begin: int
    period: int
    left: int
    columns: int
    column: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.run.count * self.rows * self.columns

    def of(self, part: Tensor) -> Tensor:
        """View part [rows, K], contiguous, as [matrices, rows, columns]."""
        _, width = part.shape
        start = part.storage_offset() + self.begin * width + self.column
        size, stride = (self.run.count, self.rows, self.columns), (self.period * width, width, 1)
        return part.as_strided(size, stride, start)

    def within(self, matrices: Tensor) -> Tensor:
        """Return the same elements of whole matrices [matrices, A, B]."""
        return matrices[:, self.top : self.top + self.rows, self.left : self.left + self.columns]


def fragment(run: Run, layout: Layout, number: int) -> Fragment:
    """Return the fragment of a run in part `number`, one of its parts."""
    part, box, period = layout.parts[number], run.box, layout.division.period
    top = run.begin * period + box.row
    begin, left = max(part.begin - top, 0), max(part.left - box.column, 0)
    rows = min(part.end - top, box.rows) - begin
    columns = min(part.left + part.columns - box.column, box.columns) - left
    return Fragment(run, begin, rows, top + begin - part.begin, period, left, columns, box.column + left - part.left)


@dataclass
class Round:
    """One rank's share of a round, each list in the order of its messages.

    here: the rows of the round's matrices that this rank holds. owned: the runs that it owns. sends, receives: by rank,
    rows of others' matrices, and others' rows of its own. returns: the rows of its own matrices that others need.
    """

    here: list[Fragment] = field(default_factory=list)
    owned: list[Run] = field(default_factory=list)
    sends: dict[int, list[Fragment]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[Fragment]] = field(default_factory=lambda: defaultdict(list))
    returns: dict[int, list[Fragment]] = field(default_factory=lambda: defaultdict(list))
    awaits: dict[int, list[Fragment]] = field(default_factory=lambda: defaultdict(list))

    def add(self, run: Run, layout: Layout, rank: int) -> None:
        """Add a run that several ranks hold, seen from `rank`."""
        parts = layout.parts[run.first : run.last]
        replica = next(part.ranks.index(run.owner) for part in parts if run.owner in part.ranks)
        if run.owner == rank:
            self.owned.append(run)
        for number, part in enumerate(parts, run.first):
            if run.owner != rank and rank not in part.ranks:
                continue
            rows = fragment(run, layout, number)
            source = part.ranks[replica]
            if rank in part.ranks:
                self.here.append(rows)
                if rank != run.owner:
                    self.awaits[run.owner].append(rows)
                    if rank == source:
                        self.sends[run.owner].append(rows)
            if rank == run.owner:
                if source != rank:
                    self.receives[source].append(rows)
                for holder in part.ranks:
                    if holder != rank:
                        self.returns[holder].append(rows)


def rounds(runs: Iterable[Run], layouts: Mapping[str, Layout], rank: int, most: int) -> tuple[list[Run], list[Round]]:
    """Return the runs that this rank alone holds, and the others in rounds, in which each owner has at most `most`
    elements, or one matrix. All ranks have the same number of rounds."""
    alone: list[Run] = []
    made: list[Round] = []
    at: dict[int, tuple[int, int]] = {}  # by owner: its last round, the elements in it
    for whole in runs:
        layout = layouts[whole.name]
        if sum(len(part.ranks) for part in layout.parts[whole.first : whole.last]) == 1:
            alone += whole.cut(most) if whole.owner == rank else ()
            continue
        for run in whole.cut(most):
            number, filled = at.get(run.owner, (0, 0))
            number, filled = (
                (number + 1, run.numel) if filled and filled + run.numel > most else (number, filled + run.numel)
            )
            at[run.owner] = number, filled
            if number == len(made):
                made.append(Round())
            made[number].add(run, layout, rank)
    return alone, made


class PendingExchange(NamedTuple):
    """A pending exchange with all ranks: outgoing and incoming data, their order, and the handles to wait for."""

    leaving: Tensor
    arriving: Tensor
    fragments: list[Fragment]
    work: "Work"

    def open(self) -> dict[Fragment, Tensor]:
        """Wait, on the device. Returns [matrices, rows, columns] by fragment."""
        self.work.wait()
        pieces = self.arriving.split([f.numel for f in self.fragments])
        return {f: piece.view(f.run.count, f.rows, f.columns) for f, piece in zip(self.fragments, pieces, strict=True)}


class Packing:
    """Send buffers: `slots` by (rank, fragment), to be filled before `send`."""

    def __init__(self, to: Mapping[int, Sequence[Fragment]], dtype: torch.dtype, device: torch.device):
        self._numbers = {rank: sum(f.numel for f in to[rank]) for rank in sorted(to)}
        self._buffer = torch.empty(sum(self._numbers.values()), dtype=dtype, device=device)
        order = [(rank, f) for rank in sorted(to) for f in to[rank]]
        pieces = self._buffer.split([f.numel for _, f in order])
        self.slots = {
            (rank, f): piece.view(f.run.count, f.rows, f.columns)
            for (rank, f), piece in zip(order, pieces, strict=True)
        }

    def send(self, come: Mapping[int, Sequence[Fragment]], ranks: int, group: "ProcessGroup | None") -> PendingExchange:
        """Start the exchange and return at once. come: what others send, by rank. A collective of the `group`, which
        has this number of `ranks`; None: of all."""
        import torch.distributed as dist

        order = [f for rank in sorted(come) for f in come[rank]]
        arriving = self._buffer.new_empty(sum(f.numel for f in order))
        size = self._buffer.element_size()
        into = [size * sum(f.numel for f in come.get(rank, ())) for rank in range(ranks)]
        out = [size * self._numbers.get(rank, 0) for rank in range(ranks)]
        # as bytes: gloo does not support every dtype
        work = dist.all_to_all_single(
            arriving.view(torch.uint8), self._buffer.view(torch.uint8), into, out, group=group, async_op=True
        )
        assert work is not None
        return PendingExchange(self._buffer, arriving, order, work)
