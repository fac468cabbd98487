"""Messages of a process group in compiled blocks, by the operators that torch's own parallel code traces.

Pieces [size, ...] are in the order of the group's ranks. `start_...` returns a tensor that may still be in flight, for
`wait`. group: the group's name.
"""

import torch
from torch import Tensor


def wait(x: Tensor) -> Tensor:
    """Return x after its message has arrived."""
    return torch.ops._c10d_functional.wait_tensor(x)


def start_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Send this rank's x; return the x of all ranks [size, ...]."""
    if x.device.type == "cpu":
        # Gloo's all-gather corrupts the heap when two messages of a group end at the same time. In torch 2.13 both
        # threads of a group assign the name of their operation to one string without a lock
        # (`ProcessGroupGloo::runLoop`). A name of up to 15 characters is stored in the string itself.
        # ALLGATHER_COALESCED, which this operator runs, is longer, so its memory may be freed twice.
        return _start_exchange(x.expand(size, *x.shape), size, group)
    return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous()[None], size, group)


def gather(x: Tensor, size: int, group: str) -> Tensor:
    """Return the x of all ranks [size, ...]."""
    return wait(start_gather(x, size, group))


def start_sum(pieces: Tensor, size: int, group: str) -> Tensor:
    """Start the sum of all ranks' pieces [size, B, ...]; rank j gets the sum of pieces j [B, ...], no view."""
    return torch.ops._c10d_functional.reduce_scatter_tensor(pieces.flatten(0, 1).contiguous(), "sum", size, group)


def sum_of_pieces(pieces: Tensor, size: int, group: str) -> Tensor:
    """Return the sum of all ranks' pieces [size, B, ...], piece j on rank j."""
    return wait(start_sum(pieces, size, group))


def exchange(pieces: Tensor, size: int, group: str) -> Tensor:
    """Send piece i to rank i; return the pieces received, piece i from rank i."""
    return wait(_start_exchange(pieces, size, group))


def _start_exchange(pieces: Tensor, size: int, group: str) -> Tensor:
    ones = [1] * size
    return torch.ops._c10d_functional.all_to_all_single(pieces.contiguous(), ones, ones, group)


def reduce(x: Tensor, how: str, group: str) -> Tensor:
    """Return the sum or the max of all ranks' x. how: sum or max."""
    return wait(torch.ops._c10d_functional.all_reduce(x, how, group))


def in_pieces(x_BSd: Tensor, size: int) -> Tensor:
    """View x as the ranks' positions [size, B, S/size, ...]."""
    return x_BSd.unflatten(1, (size, -1)).transpose(0, 1)


def join_pieces(pieces: Tensor) -> Tensor:
    """Join the ranks' positions [size, B, s, ...] to [B, S, ...]."""
    return pieces.transpose(0, 1).flatten(1, 2)
