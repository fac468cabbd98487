"""Messages of a process group in compiled blocks: the operators that torch's own parallel code traces.

Ranks of the group have pieces [size, ...] of what they send or get, in the order of ranks. `start_...` returns what may
be on its way yet, for `wait`. `group` is a group's name.
"""

import torch
from torch import Tensor


def wait(x: Tensor) -> Tensor:
    """x, once it is there."""
    return torch.ops._c10d_functional.wait_tensor(x)


def start_gather(x: Tensor, size: int, group: str) -> Tensor:
    """x of this rank -> [size, ...] of all."""
    return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous()[None], size, group)


def gather(x: Tensor, size: int, group: str) -> Tensor:
    """`start_gather`, waited for."""
    return wait(start_gather(x, size, group))


def start_sum(pieces: Tensor, size: int, group: str) -> Tensor:
    """Piece j of all ranks' [size, ...], summed, on rank j: [1, ...]."""
    return torch.ops._c10d_functional.reduce_scatter_tensor(pieces.contiguous(), "sum", size, group)


def sum_of_pieces(pieces: Tensor, size: int, group: str) -> Tensor:
    """`start_sum`, waited for: [...]."""
    return wait(start_sum(pieces, size, group))[0]


def exchange(pieces: Tensor, size: int, group: str) -> Tensor:
    """Piece i goes to rank i; what arrives from rank i is piece i."""
    ones = [1] * size
    return wait(torch.ops._c10d_functional.all_to_all_single(pieces.contiguous(), ones, ones, group))


def reduce(x: Tensor, how: str, group: str) -> Tensor:
    """x of all ranks, its sum or max, on all."""
    return wait(torch.ops._c10d_functional.all_reduce(x, how, group))


def in_pieces(x_BSd: Tensor, size: int) -> Tensor:
    """[B, S, ...] -> the ranks' positions [size, B, S/size, ...]."""
    return x_BSd.unflatten(1, (size, -1)).transpose(0, 1)


def put_together(pieces: Tensor) -> Tensor:
    """[size, B, s, ...] -> [B, S, ...]."""
    return pieces.transpose(0, 1).flatten(1, 2)
