"""How far the last step moved each parameter, told afterwards: from the moments and the weights as they are now.

AdamW adds, with t the number of steps, p the weight before and p' the one now,

    -lr (u + decay p)        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

and since p' = p - lr (u + decay p), that is -lr (u + decay p') / (1 - lr decay). So nothing has to be kept for it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_AT_ONCE = 1 << 25  # numbers in flight: what this takes in memory, three times in FP32

_foreach_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
_foreach_div = torch._foreach_div  # pyright: ignore[reportPrivateImportUsage]
_foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
_foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
_foreach_sqrt = torch._foreach_sqrt  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def update_norms(
    parameters: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> Tensor:
    """[P] FP64: the norm of the last update of each parameter; 0 before the first.

    states: AdamW's, with `exp_avg`, `exp_avg_sq` and `step`, in which all have made as many steps. lr: 0-d.
    """
    step = torch.stack([state["step"] for state in states]).max().double()
    first, second = 1 - betas[0] ** step, (1 - betas[1] ** step).sqrt()
    factor, small = (second / first).float(), (eps * second).float()
    norms: list[Tensor] = []
    owners: list[int] = []
    for batch in _batches(parameters):
        owners += [i for i, _ in batch]
        below = _foreach_sqrt([_piece(states[i]["exp_avg_sq"], where) for i, where in batch])
        _foreach_add_(below, small)
        change = _foreach_div([_piece(states[i]["exp_avg"], where) for i, where in batch], below)
        _foreach_mul_(change, factor)
        _foreach_add_(change, [_piece(parameters[i], where) for i, where in batch], alpha=decay)
        norms += _foreach_norm(change)
    of_pieces = torch.where(step > 0, torch.stack(norms).double() * lr / (1 - lr * decay), 0.0)
    index = torch.tensor(owners, device=of_pieces.device)
    return of_pieces.new_zeros(len(parameters)).index_add_(0, index, of_pieces.square()).sqrt()


def _piece(tensor: Tensor, where: slice) -> Tensor:
    return tensor.detach().view(-1)[where].float()


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[tuple[int, slice]]]:
    """Pieces of tensors, (which, where in it), in lists of at most `_AT_ONCE` numbers."""
    batch: list[tuple[int, slice]] = []
    room = _AT_ONCE
    for i, tensor in enumerate(tensors):
        start, end = 0, tensor.numel()
        while start < end:
            stop = min(start + room, end)
            batch.append((i, slice(start, stop)))
            room -= stop - start
            start = stop
            if not room:
                yield batch
                batch, room = [], _AT_ONCE
    if batch:
        yield batch
