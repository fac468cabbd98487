"""Parts of shared tensors: a rank's own, and what it is of the whole.

A shared parameter is a DTensor (torch.distributed.tensor): it has the shape of the whole, and one part of it in memory.
What works element by element, as the optimizer does, works on the parts.

With expert parallelism a stack of experts is spread first, whole experts to each rank of a group: such a tensor has an
attribute `spread`, the group's mesh. It is a DTensor of the rank's own experts where other ranks have the same ones,
else these experts as they are. With tensor parallelism weights of heads and vocabulary are spread so, too, along the
dimension `spread_dim`; all others have an attribute `alike`, the mesh of the ranks that hold the same.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.checkpoint import ShardView

SMALL = 2**20  # numbers of a gradient: 4 MiB, whose message takes about as long to start as to send


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a shared tensor, the plain tensor that it is kept in; a tensor that is not shared: itself."""
    return getattr(tensor, "_local_tensor", tensor)  # `to_local` makes another object of a parameter


def is_shared(tensor: Tensor) -> bool:
    """Whether ranks share it, beyond being spread."""
    return hasattr(tensor, "_local_tensor")


def copies(tensor: Tensor) -> int:
    """How many ranks hold the same part of a shared tensor."""
    alike = getattr(tensor, "alike", None)
    more = 1 if alike is None else alike.size()
    if not is_shared(tensor):
        return more
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)  # type: ignore[attr-defined]
    return more * math.prod(size for placement, size in sizes if placement.is_replicate())


def shared_like(part: Tensor, like: Tensor) -> Tensor:
    """A rank's part of something that is cut as `like` is -> the shared tensor, in the same memory."""
    shared = part.detach()
    if is_shared(like):
        from torch.distributed.tensor import DTensor

        mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
        shared = DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    for name in ("spread", "spread_dim", "alike"):
        if hasattr(like, name):
            setattr(shared, name, getattr(like, name))
    return shared


def shard_views(tree: Mapping) -> dict:
    """A nested dict with its shared tensors as this rank's `ShardView`s of the whole, in the same memory, for
    checkpoints.

    Those that have copies take turns in writing: with HSDP each group of ranks writes its share.
    """
    count = iter(range(1 << 62))

    def part(value: object) -> object:
        if isinstance(value, Mapping):
            return {key: part(inner) for key, inner in value.items()}
        return shard_view(value, next(count)) if isinstance(value, Tensor) else value

    return {key: part(value) for key, value in tree.items()}


def shard_view(tensor: Tensor, turn: int = 0) -> Tensor | ShardView:
    """This rank's part of a shared or spread tensor; of another one: itself. turn: which of its copies is written,
    modulo their number."""
    spread = getattr(tensor, "spread", None)
    if tensor.is_meta:  # of another pipeline stage
        nothing = torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
        return ShardView(nothing, tensor.shape, (0,) * tensor.dim(), writes=False)
    alike = getattr(tensor, "alike", None)
    if not is_shared(tensor) and spread is None and alike is None:
        return tensor.detach()
    offsets, copy = [0] * tensor.dim(), 0
    if is_shared(tensor):
        (box,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # where the DTensor's part lies
        offsets = list(box.offsets)
        for axis, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
            if placement.is_replicate():
                mesh = tensor.device_mesh  # type: ignore[attr-defined]
                copy = copy * mesh.size(axis) + mesh.get_local_rank(axis)
    if alike is not None:
        copy = copy * alike.size() + alike.get_local_rank()
    if spread is not None:
        dim = getattr(tensor, "spread_dim", 0)
        offsets[dim] += spread.get_local_rank() * tensor.shape[dim]
    writes = copy == turn % copies(tensor)
    return ShardView(local(tensor).detach(), whole_shape(tensor), tuple(offsets), writes)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()`, the parameters as they are shared."""
    return {**model.state_dict(), **dict(model.named_parameters())}


def whole_shape(tensor: Tensor) -> torch.Size:
    """Shape of the whole of a shared or spread tensor; of another one: its own."""
    spread = getattr(tensor, "spread", None)
    shape = list(tensor.shape)
    if spread is not None:
        shape[getattr(tensor, "spread_dim", 0)] *= spread.size()
    return torch.Size(shape)


def add_up(model: nn.Module) -> None:
    """Sum the gradients of weights that ranks of a tensor group have alike: each has seen its own positions. Once they
    are reduced, in FP32: the large ones where they are, the small ones in one message. A collective."""
    alike = [p for p in model.parameters() if p.grad is not None and hasattr(p, "alike")]
    if not alike:
        return
    group = alike[0].alike.get_group()  # type: ignore[attr-defined]
    small, grads = [], [local(p.grad) for p in alike if p.grad is not None]
    works = []
    for gradient in grads:
        if gradient.numel() < SMALL:
            small.append(gradient)
        else:
            works.append(torch.distributed.all_reduce(gradient, group=group, async_op=True))
    if small:
        packed = torch.cat([gradient.flatten() for gradient in small])
        torch.distributed.all_reduce(packed, group=group)
        parts = packed.split([gradient.numel() for gradient in small])
        for gradient, part in zip(small, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
    for work in works:
        work.wait()
