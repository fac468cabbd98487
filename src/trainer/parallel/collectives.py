"""Reductions over all ranks in each step: amaxes, losses, loads. With one rank the values are unchanged.

Each rank has its own tokens. Scales, the verdict on a step and the router's bias follow from the reduced numbers, and
are therefore equal on all ranks without being sent. Reductions run on the device; no host waits.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from trainer.launch.world import World

T = TypeVar("T")


def all_max(tensors: list[Tensor], world: World) -> None:
    """Replace FP32 tensors of any shape by the maximum over all ranks, in place, in one message. NaN becomes
    infinite."""
    if not world.is_distributed:
        return
    import torch.distributed as dist

    together = torch.cat([t.flatten() for t in tensors])
    # the maximum of a number and NaN may be the number
    together.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    for tensor, part in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def all_sum(tensors: list[Tensor], world: World) -> list[Tensor]:
    """Return sums over all ranks of tensors of any shape and dtype, FP64 inside, in one message."""
    if not world.is_distributed:
        return tensors
    import torch.distributed as dist

    together = torch.cat([t.detach().double().flatten() for t in tensors])
    dist.all_reduce(together)
    parts = together.split([t.numel() for t in tensors])
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]


def all_mean(tensor: Tensor, world: World, stages: int = 1) -> Tensor:
    """Return the mean over all ranks; with pipeline stages, the mean of the stages' sums."""
    return all_sum([tensor], world)[0] / (world.size // stages) if world.is_distributed else tensor


def in_groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items each; the last one may be shorter."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group
