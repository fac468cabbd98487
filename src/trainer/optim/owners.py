"""Owners: each matrix is orthogonalised by one rank, with FLOPs spread evenly over ranks.

Ranks hold rows of a weight (`parallel.fsdp`), replicas the same rows. Ranks of a tensor group hold rows of heads,
columns of heads (attn.o), or the same rows (`models.tensor`). Some logical matrices (`models.matrices`) lie within one
rank's rows: always experts, since a stack is cut between experts, and heads if a part's rows are a multiple of a
head's. Their holder owns them; with replicas, one of the holders. A matrix that is cut belongs to one of the ranks that
hold a part of it.

With a pipeline each stage has matrices of its own, and their owners are among its ranks. Ranks are numbered within the
stage.

Owners are assigned longest first: the costliest matrix goes to the least loaded rank. Everything follows from shapes
and degrees, so ranks agree without a message, and the forecast matches the step.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from models.matrices import Box, Division
from trainer.optim.orthogonalise import flops
from trainer.parallel.mesh import ONE_PROCESS, Degrees


class Part(NamedTuple):
    """Rows [begin:end] of a weight, `columns` of them from column `left`, and the ranks that hold this: one in each
    replica."""

    begin: int
    end: int
    ranks: tuple[int, ...]
    left: int
    columns: int


@dataclass(frozen=True)
class Layout:
    """Positions of a weight's logical matrices. columns: of the weight. parts: its rows, in order; a stack [E, N, K]
    counts as [E N, K]. beside: number of consecutive parts that share the columns of the same rows."""

    columns: int
    division: Division
    parts: tuple[Part, ...]
    beside: int = 1

    @property
    def boxes(self) -> list[Box]:
        """The matrices of a group."""
        return self.division.boxes(self.columns)


class Run(NamedTuple):
    """Matrices of one owner: number `index` of the groups [begin:end] of a weight, which lie in its parts [first:last].
    Several matrices must lie in one part."""

    name: str
    index: int
    begin: int
    end: int
    first: int
    last: int
    box: Box
    owner: int

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.end - self.begin

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.count * self.box.rows * self.box.columns

    def cut(self, most: int) -> Iterator["Run"]:
        """Yield runs of at most `most` elements, or of one matrix."""
        step = max(most * self.count // self.numel, 1)
        for begin in range(self.begin, self.end, step):
            yield self._replace(begin=begin, end=min(begin + step, self.end))


def layout(
    shape: tuple[int, ...], division: Division, degrees: Degrees = ONE_PROCESS, cut: int | None = None
) -> Layout:
    """Return the layout of a weight [R, K], cut by rows, or of a stack of experts [E, N, K], spread and cut by
    experts. cut: the dimension that a tensor group cuts first; None: its ranks hold the same."""
    d, (*outer, K) = degrees, shape

    def ranks(shard: int, *tensor: int) -> tuple[int, ...]:
        """Return the ranks with these parts, of each replica."""
        return tuple((r * d.cut + shard) * d.tensor + t for r in range(d.replicate) for t in tensor)

    parts: list[Part] = []
    if len(outer) == 2 and d.expert > 1:
        own = outer[0] // d.expert
        for e in range(d.expert):
            holders = [
                tuple((r * d.expert_shard + s) * d.expert + e for r in range(d.expert_replicate))
                for s in range(d.expert_shard)
            ]
            parts += _cut(e * own, (e + 1) * own, outer[1], K, holders)
    elif cut == 0:
        own = outer[0] // d.tensor
        for t in range(d.tensor):
            parts += _cut(t * own, (t + 1) * own, 1, K, [ranks(s, t) for s in range(d.cut)])
    elif cut == 1:
        for s, part in enumerate(_cut(0, outer[0], 1, K // d.tensor, [()] * d.cut)):
            parts += [part._replace(ranks=ranks(s, t), left=t * part.columns) for t in range(d.tensor)]
    else:
        parts += _cut(0, outer[0], math.prod(outer[1:]), K, [ranks(s, *range(d.tensor)) for s in range(d.cut)])
    return Layout(K, division, tuple(parts), d.tensor if cut == 1 else 1)


def _cut(begin: int, end: int, rows: int, columns: int, ranks: list[tuple[int, ...]]) -> Iterator[Part]:
    """Yield parts as torch.chunk cuts them: all but the last have equal length, and some ranks may have none."""
    length = -(-(end - begin) // len(ranks))
    for start, holders in zip(range(begin, end, length), ranks, strict=False):
        yield Part(start * rows, min(start + length, end) * rows, holders, 0, columns)


def assign(layouts: Mapping[str, Layout], steps: int, ranks: int) -> tuple[list[Run], np.ndarray]:
    """Return all ranks' runs, the costliest matrices first, and FLOPs by rank [ranks] for `steps` steps of the
    iteration."""
    found = [
        (flops(box.rows, box.columns, steps), Run(name, index, *where, box, -1))
        for name, each in layouts.items()
        for index, box in enumerate(each.boxes)
        for where in _places(each, box)
    ]
    found.sort(key=lambda item: -item[0])
    work = np.zeros(ranks)
    runs: list[Run] = []
    several: list[tuple[float, Run, np.ndarray]] = []
    for each, run in found:
        parts = layouts[run.name].parts
        holders = np.array([rank for part in parts[run.first : run.last] for rank in part.ranks])
        share = run.count // len(holders)
        begin = run.begin
        for rank in holders if share else ():
            runs.append(run._replace(begin=begin, end=begin + share, owner=int(rank)))
            work[rank] += share * each
            begin += share
        several += [(each, run._replace(begin=i, end=i + 1), holders) for i in range(begin, run.end)]
    for each, run, holders in several:
        rank = int(holders[work[holders].argmin()])
        work[rank] += each
        runs.append(run._replace(owner=rank))
    return sorted(runs, key=lambda run: -flops(run.box.rows, run.box.columns, steps)), work


@cache
def _places(of: Layout, box: Box) -> list[tuple[int, int, int, int]]:
    """Return groups [begin:end] whose matrix lies in the parts [first:last]."""
    period, found, n = of.division.period, [], of.beside
    rows = of.parts[::n]
    starts = [part.begin for part in rows]
    for i, part in enumerate(rows):
        begin = -(-(part.begin - box.row) // period)
        end = (part.end - box.row - box.rows) // period + 1
        if begin < end:
            found.append((begin, end, i * n, (i + 1) * n))
        group = (part.end - box.row) // period
        top = group * period + box.row
        first = bisect_right(starts, top) - 1
        if top < part.end < top + box.rows and first == i:
            found.append((group, group + 1, first * n, bisect_right(starts, top + box.rows - 1) * n))
    return found
