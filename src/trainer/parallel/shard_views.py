"""Parts of shared tensors: a rank's own part, and its position in the whole.

A shared parameter is a DTensor (torch.distributed.tensor): it has the shape of the whole, and one part of it in memory.
Elementwise code, such as the optimizer, works on the parts.

With expert parallelism a stack of experts is spread first, whole experts to each rank of a group. Such a tensor has an
attribute `spread`, the group's mesh. It is a DTensor of the rank's own experts if other ranks have the same ones, else
a plain tensor. With tensor parallelism weights of heads and vocabulary are also spread, along the dimension
`spread_dim`; all others have an attribute `alike`, the mesh of the ranks that hold the same.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.checkpoint import ShardView

SMALL = 2**20  # elements of a gradient: 4 MiB, whose message takes about as long to start as to send


def local(tensor: Tensor) -> Tensor:
    """Return the plain tensor of this rank's part of a shared tensor; another tensor is returned as it is."""
    return getattr(tensor, "_local_tensor", tensor)  # `to_local` makes another object of a parameter


def is_shared(tensor: Tensor) -> bool:
    """Return whether ranks share the tensor, beyond being spread."""
    return hasattr(tensor, "_local_tensor")


def copies(tensor: Tensor) -> int:
    """Return how many ranks hold the same part of a shared tensor."""
    alike = getattr(tensor, "alike", None)
    more = 1 if alike is None else alike.size()
    if not is_shared(tensor):
        return more
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)  # type: ignore[attr-defined]
    return more * math.prod(size for placement, size in sizes if placement.is_replicate())


def shared_like(part: Tensor, like: Tensor) -> Tensor:
    """Wrap a rank's part as a shared tensor that is cut as `like` is, in the same memory."""
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
    """Return a nested dict with shared tensors replaced by this rank's `ShardView`s, in the same memory, for
    checkpoints.

    Ranks with the same part take turns in writing: with HSDP each group of ranks writes its share.
    """
    count = iter(range(1 << 62))

    def part(value: object) -> object:
        if isinstance(value, Mapping):
            return {key: part(inner) for key, inner in value.items()}
        return shard_view(value, next(count)) if isinstance(value, Tensor) else value

    return {key: part(value) for key, value in tree.items()}


def shard_view(tensor: Tensor, turn: int = 0) -> Tensor | ShardView:
    """Return this rank's part of a shared or spread tensor; another tensor is returned as it is. turn: the copy that
    writes, modulo their number."""
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
    """Return `model.state_dict()` with the parameters as they are shared."""
    return {**model.state_dict(), **dict(model.named_parameters())}


def whole_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the whole of a shared or spread tensor, or the tensor's own."""
    spread = getattr(tensor, "spread", None)
    shape = list(tensor.shape)
    if spread is not None:
        shape[getattr(tensor, "spread_dim", 0)] *= spread.size()
    return torch.Size(shape)


def add_up(model: nn.Module) -> None:
    """Sum the gradients of weights that a tensor group replicates: each rank has seen its own positions. Call it after
    the reduction, in FP32: large ones are summed in place, small ones in one message. A collective."""
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
