"""The experts of a token: the K largest of score + bias, among the experts of the best groups.

The score of a group is the sum of its two largest; `models.router` computes the scores. On a GPU one kernel reads them
once (`precision.kernels.topk_experts`). Elsewhere plain PyTorch does; it is also the kernel's reference. Both count NaN
as the largest. Among experts with equal scores either may be chosen, each at most once.

T tokens, E experts, G groups of E / G, K chosen experts of a token.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from precision.operators import fake, operator
from precision.proof import ROUTER, refused

_HAS_TRITON = find_spec("triton") is not None  # evaluated once: traced code may not


@torch.no_grad()
def choose_experts(
    score: Tensor, bias: Tensor | None, num_chosen: int, num_groups: int = 1, num_groups_kept: int = 1
) -> Tensor:
    """Choose K experts per token: score [..., E] FP32, bias [E] FP32; returns [..., K] int64, all different.

    They come from at most `num_groups_kept` groups, in falling order of score + bias, so that sums over K have one
    order everywhere.
    """
    if has_kernel(score):
        rows = score.reshape(-1, score.shape[-1])
        return _choose(rows, bias, num_chosen, num_groups, num_groups_kept).unflatten(0, score.shape[:-1])
    return plain_choice(score, bias, num_chosen, num_groups, num_groups_kept)


def has_kernel(score: Tensor) -> bool:
    """Return whether `precision.kernels.topk_experts` supports this score."""
    return score.is_cuda and _HAS_TRITON and ROUTER not in refused


def plain_choice(
    score: Tensor, bias: Tensor | None, num_chosen: int, num_groups: int = 1, num_groups_kept: int = 1
) -> Tensor:
    """`choose_experts` in plain PyTorch."""
    biased = score if bias is None else score + bias
    if num_groups > 1:
        grouped = biased.unflatten(-1, (num_groups, -1))
        group_score = grouped.topk(2, -1).values.sum(-1)
        kept = group_score.topk(num_groups_kept, -1).indices
        dropped = torch.ones_like(group_score, dtype=torch.bool).scatter(-1, kept, False)
        biased = grouped.masked_fill(dropped[..., None], float("-inf")).flatten(-2)
    return biased.topk(num_chosen, -1).indices


@operator("choose_experts")
def _choose(score: Tensor, bias: Tensor | None, num_chosen: int, num_groups: int, num_groups_kept: int) -> Tensor:
    """Operator form of `choose_experts`, for score [T, E]."""
    from precision.kernels.topk_experts import choose

    return choose(score.contiguous(), bias, num_chosen, num_groups, num_groups_kept)


@fake(_choose)
def _(score: Tensor, bias: Tensor | None, num_chosen: int, num_groups: int, num_groups_kept: int) -> Tensor:
    return torch.empty(score.shape[0], num_chosen, device=score.device, dtype=torch.int64)
