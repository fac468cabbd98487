"""Pipeline parallelism: a stage is a run of consecutive blocks; a rank computes one stage or several.

    the first one    embedding, its blocks
    the last one     its blocks, final norm, head, multi-token prediction

With several stages per rank they are assigned in turn (arXiv 2104.04473, section 2.2): of p ranks, rank i has the
stages i, p + i, 2 p + i, ... Or two stages per rank form a V (arXiv 2401.10241, section 6): rank i has the stages i and
2 p - 1 - i. The first rank then has the embedding and the head.

A stage passes on its stream [B, S, D]. With MTP the embedded tokens [B, S + 1, D] are passed on beside it, unchanged,
and their gradient returns the same way: the embedding stays one tensor of the first stage. The balance loss of a block
enters the backward pass in its own stage (`attach`). Losses, loads and amaxes of other stages' blocks are zero here;
the step sums them, or takes the largest, over all ranks.

Legend: B batch, S sequence, D hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precision import Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Stage:
    """Stage `index` of `count`: the main model's blocks from `begin` up to, but not including, `end`."""

    index: int
    count: int
    begin: int
    end: int

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head and MTP."""
        return self.index == self.count - 1


@dataclass(frozen=True)
class Pipeline:
    """This process's position in a pipeline: its `stages`, in order. owners: the rank of every stage. group: the ranks
    of the pipeline. zero_bubble: gradients of weights are computed where ranks would wait; `owners` form a V."""

    stages: tuple[Stage, ...]
    owners: tuple[int, ...]
    group: "ProcessGroup"
    zero_bubble: bool = False

    @property
    def has_first(self) -> bool:
        """Whether this process computes the first stage."""
        return self.stages[0].is_first

    @property
    def has_last(self) -> bool:
        """Whether this process computes the last stage."""
        return self.stages[-1].is_last

    def receive(self, stage: Stage, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """Receive the previous stage's output from another rank, on the device of `like`."""
        x = torch.empty(shape, dtype=dtype, device=like.device)
        self._exchange(torch.distributed.irecv, x, stage.index - 1)
        return x

    def send(self, stage: Stage, x: Tensor) -> None:
        """Send a stage's output to the next stage, on another rank."""
        self._exchange(torch.distributed.isend, x.contiguous(), stage.index + 1)

    def _exchange(self, way: Callable[..., object], x: Tensor, stage: int) -> None:
        """Send or receive x. A batch of one, because NCCL warns of single messages, which wait for all others."""
        message = torch.distributed.P2POp(way, x, group=self.group, group_peer=self.owners[stage])
        for work in torch.distributed.batch_isend_irecv([message]):
            work.wait()


def block_flops(plan: Plan, sequence_length: int) -> tuple[list[float], float]:
    """Return the forward FLOPs per token of each block of the main model, and of head and MTP together. plan: the
    model's."""
    blocks, last = [0.0] * plan.num_layers, 0.0
    rows = [(name, row.flops_per_token) for name, row in plan.gemms.items()]
    rows += [(name, row.flops_per_token(sequence_length)) for name, row in plan.cores.items()]
    for name, flops in rows:
        kind, _, rest = name.partition(".")
        if kind == "layers":
            blocks[int(rest.partition(".")[0])] += flops
        else:
            last += flops
    return blocks, last


def divide(flops: Sequence[float], last: float, stages: int) -> list[int]:
    """Return the number of consecutive blocks of each stage, at least one, that minimises the slowest stage's work.
    last: FLOPs that the last stage adds."""
    before = [0.0, *accumulate(flops)]
    # best[n]: the first n blocks on the stages so far: FLOPs of the slowest one, and the numbers
    best = {n: (before[n], [n]) for n in range(1, len(flops) + 1)}
    for stage in range(1, stages):
        besides = last if stage == stages - 1 else 0.0
        best = {
            n: min(
                (max(slowest, before[n] - before[k] + besides), [*counts, n - k])
                for k, (slowest, counts) in best.items()
                if k < n
            )
            for n in range(stage + 1, len(flops) + 1)
        }
    return best[len(flops)][1]


def divide_among(owners: Sequence[int], flops: Sequence[float], last: float) -> list[int]:
    """As `divide` for several stages per rank, minimising the slowest rank's work. owners: the rank of each stage.

    The rank that has the last stage has fewer blocks in all of its stages, and none in the last one where head and MTP
    are as much work as others' stages.
    """
    stages, ranks = len(owners), max(owners) + 1
    per_rank, mean = stages // ranks, (sum(flops) + last) / ranks

    def filled(most: float) -> list[int]:
        """Fill each stage with as many blocks as a rank with this many FLOPs has room for; the last one gets the
        rest."""
        counts: list[int] = []
        for stage in range(stages - 1):
            room = most / per_rank
            if owners[stage] == owners[-1]:
                room = min(room, (most - last) / (per_rank - 1))
            left = flops[sum(counts) : len(flops) - (stages - 2 - stage)]  # later ones need a block each
            counts.append(max(1, sum(total <= room for total in accumulate(left))))
        return [*counts, len(flops) - sum(counts)]

    def slowest(counts: list[int]) -> float:
        ends = [0, *accumulate(counts)]
        sums = [0.0] * ranks
        for rank, (begin, end) in zip(owners, pairwise(ends), strict=True):
            sums[rank] += sum(flops[begin:end])
        sums[owners[-1]] += last
        return max(sums)

    return min((filled(mean * (1 + i / 50)) for i in range(100)), key=slowest)


def attach(x: Tensor, loss: Tensor) -> Tensor:
    """Return x with the backward pass of `loss` (0-d) attached."""
    return _Attach.apply(x, loss)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        dtype, device = ctx.like
        return grads[0], torch.ones((), dtype=dtype, device=device)
