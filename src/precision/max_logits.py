"""The largest attention logit of each head in a step, without an extra pass: from the log-sum-exp that attention
returns.

    lse_i = log sum_j exp(z_ij)        z_ij = scale q_i . k_j, over the positions j that i sees
    S     = max_i lse_i                max z <= S <= max z + log(positions seen)

S bounds the largest logit from above. The bound is loosest where all logits of a row are equal; where one dominates, as
those near 100 do, S equals that logit up to rounding. Fully masked rows have -inf and do not count; NaN sticks.

All heads of a model share one buffer, `ScalingArena.max_logits` [cores, H] FP32, which holds -inf for heads that a step
has not used. A `MaxLogits` holds its view of it, as slots do of the arena. Microbatches and recomputation only raise
it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class MaxLogits(nn.Module):
    """Largest logits of one attention core. heads: those of `num_heads` that this process computes. row [heads] FP32:
    None until `bind`."""

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads, self.heads = num_heads, range(num_heads)
        self.row: Tensor | None = None


def bind_max_logits(modules: Iterable[MaxLogits], device: torch.device | str) -> Tensor:
    """Give each module its row of a new buffer [modules, H] FP32; return the buffer."""
    found = list(modules)
    rows = torch.full((len(found), found[0].num_heads if found else 0), -torch.inf, device=device)
    for module, row in zip(found, rows.data, strict=True):
        module.row = row[module.heads.start : module.heads.stop]
    return rows


def raise_max_logits(row_H: Tensor, lse: Tensor, unit: float = 1.0) -> None:
    """Raise row [H] FP32 to each head's largest lse [B, H, S] or [B, H, S, 1]. unit: of lse, in nats."""
    top_H = lse.detach().transpose(0, 1).flatten(1).amax(1).float()
    row_H.copy_(torch.maximum(row_H, top_H * unit))
