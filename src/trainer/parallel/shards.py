"""Parts of shared tensors: a rank's own, and back to the whole.

A shared parameter is a DTensor (torch.distributed.tensor): it has the shape of the whole, and one part of it in memory.
What works element by element, as the optimizer does, works on the parts.

With expert parallelism a stack of experts is spread first, whole experts to each rank of a group, and the DTensor is
that of a rank's own experts: such a tensor has an attribute `spread`, the group's mesh.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a shared tensor, the plain tensor that it is kept in; a tensor that is not shared: itself."""
    return getattr(tensor, "_local_tensor", tensor)  # `to_local` makes another object of a parameter


def is_shared(tensor: Tensor) -> bool:
    """Whether ranks share it."""
    return hasattr(tensor, "_local_tensor")


def copies(tensor: Tensor) -> int:
    """How many ranks hold the same part of a shared tensor."""
    if not is_shared(tensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)  # type: ignore[attr-defined]
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def shared_like(part: Tensor, like: Tensor) -> Tensor:
    """A rank's part of something that is cut as `like` is -> the shared tensor, in the same memory. `part` itself if
    `like` is not shared."""
    if not is_shared(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    shared = DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    shared.spread = getattr(like, "spread", None)  # type: ignore[attr-defined]
    return shared


def copy_part(to: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole` (a plain tensor) into `to`, in place; all of it if `to` is not shared."""
    if is_shared(to):
        if (spread := getattr(to, "spread", None)) is not None:
            whole = whole.chunk(spread.size())[spread.get_local_rank()]
        mesh, placements = to.device_mesh, to.placements  # type: ignore[attr-defined]
        for axis, placement in enumerate(placements):
            if placement.is_shard():
                size, index = mesh.size(axis), mesh.get_local_rank(axis)
                rows = -(-whole.shape[placement.dim] // size)
                start = min(index * rows, whole.shape[placement.dim])
                rows = min(rows, whole.shape[placement.dim] - start)
                whole = whole.narrow(placement.dim, start, rows)
    local(to).copy_(whole)


def gathered(tree: Mapping, keep: bool) -> dict:
    """A nested dict with its shared tensors whole and in host memory. A collective; `keep`: whether this rank wants
    them, else it gets empty ones."""

    def whole(value: object) -> object:
        if isinstance(value, Mapping):
            return gathered(value, keep)
        if isinstance(value, Tensor) and is_shared(value):
            full = _whole(value)
            return full.cpu() if keep else torch.empty(0)
        return value

    with torch.no_grad():
        return {key: whole(value) for key, value in tree.items()}


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor()  # type: ignore[attr-defined]
    if (spread := getattr(tensor, "spread", None)) is None:
        return full
    import torch.distributed as dist

    parts = [torch.empty_like(full) for _ in range(spread.size())]
    dist.all_gather(parts, full.contiguous(), group=spread.get_group())
    return torch.cat(parts)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()`, the parameters as they are shared."""
    return {**model.state_dict(), **dict(model.named_parameters())}


def whole_shape(tensor: Tensor) -> torch.Size:
    """Shape of the whole of a shared tensor; of one that is not shared: its own."""
    spread = getattr(tensor, "spread", None)
    return tensor.shape if spread is None else torch.Size([tensor.shape[0] * spread.size(), *tensor.shape[1:]])


def load_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy a whole `state_dict` of the model into it, each rank its part. ValueError if names or shapes differ."""
    ours = model_state(model)
    for name in (*ours, *state):
        if name not in ours or name not in state or whole_shape(ours[name]) != state[name].shape:
            raise ValueError(f"{name}: the checkpoint is of another model; use that run's model.*")
    with torch.no_grad():
        for name, tensor in ours.items():
            copy_part(tensor, state[name])
