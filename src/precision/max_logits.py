"""The largest attention logit of each head in a step, at no extra pass: from the log-sum-exp that attention returns.

    lse_i = log sum_j exp(z_ij)        z_ij = scale q_i . k_j, over the positions j that i sees
    S     = max_i lse_i                max z <= S <= max z + log(positions seen)

S bounds the largest logit from above. The looser bound is met where all logits of a row are alike; where one stands
out, as those near 100 do, S is that logit to rounding. Rows that see nothing have -inf and do not count; NaN sticks.

All heads of a model share one buffer, `ScalingArena.max_logits` [cores, H] FP32, -inf where a step has seen nothing. A
`MaxLogits` holds its view of it, as slots do of the arena. Microbatches and recomputation only ever raise it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class MaxLogits(nn.Module):
    """Of one attention core. heads: those of `num_heads` that this process computes. row [heads] FP32: None until
    `bind`."""

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads, self.heads = num_heads, range(num_heads)
        self.row: Tensor | None = None


def bind_max_logits(modules: Iterable[MaxLogits], device: torch.device | str) -> Tensor:
    """Give each module its row of a new buffer [modules, H] FP32, which is returned."""
    found = list(modules)
    rows = torch.full((len(found), found[0].num_heads if found else 0), -torch.inf, device=device)
    for module, row in zip(found, rows.data, strict=True):
        module.row = row[module.heads.start : module.heads.stop]
    return rows


def raise_max_logits(row_H: Tensor, lse: Tensor, unit: float = 1.0) -> None:
    """Raise row [H] FP32 to the largest of lse [B, H, S] or [B, H, S, 1] of each head. unit: of lse, in nats."""
    top_H = lse.detach().transpose(0, 1).flatten(1).amax(1).float()
    row_H.copy_(torch.maximum(row_H, top_H * unit))
