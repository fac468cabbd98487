"""The distance that the last step moved each parameter, computed afterwards from the current moments and weights.

AdamW adds, with t the number of steps, p the weight before and p' the current one,

    -lr (u + decay p)        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

and since p' = p - lr (u + decay p), that is -lr (u + decay p') / (1 - lr decay). So nothing has to be saved for it.

On a GPU with Triton `precision.kernels.update_norms` does the same in one pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_AT_ONCE = 1 << 25  # elements at a time; they take twice that memory in FP32


@torch.no_grad()
def update_norms(
    parameters: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> Tensor:
    """Return the norm of the last update of each parameter, [P] FP64; 0 before the first.

    states: AdamW's, with `exp_avg`, `exp_avg_sq` and `step`. lr: 0-d.
    """
    norms = [_change(p, s, betas, eps, decay) for p, s in zip(parameters, states, strict=True)]
    return torch.stack(norms) * lr / (1 - lr * decay)


def _change(p: Tensor, state: dict[str, Tensor], betas: tuple[float, float], eps: float, decay: float) -> Tensor:
    """Return ||u + decay p'||, 0-d FP64."""
    step = state["step"].double()
    first, second = 1 - betas[0] ** step, (1 - betas[1] ** step).sqrt()
    factor, small = (second / first).float(), (eps * second).float()
    square = torch.zeros_like(step)
    moments = state["exp_avg"], state["exp_avg_sq"]
    for part, m, v in zip(*(t.detach().view(-1).split(_AT_ONCE) for t in (p, *moments)), strict=True):
        change = (m.float() / v.float().sqrt().add_(small)).mul_(factor).add_(part, alpha=decay)
        square += torch.linalg.vector_norm(change).double().square()
    return torch.where(step > 0, square.sqrt(), 0.0)
