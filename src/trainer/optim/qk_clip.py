"""QK-clip (Kimi K2, arXiv 2507.20534, section 2.1): a bound on attention logits, enforced by the weights.

After a step, with S_h the largest logit of head h in the step's forward passes (here its bound from the log-sum-exp,
`precision.max_logits`) and gamma_h = min(1, tau / S_h):

    q_nope, k_nope of the head     rows times sqrt(gamma_h)
    q_rope of the head             rows times gamma_h; k_rope is shared by all heads and stays
    v                              stays

All logits of that head become gamma_h times their value. This is exact, since the latents' norms come before these
projections and RoPE is linear. With `model.qk_norm` a norm follows the projections and undoes it.

The masters are multiplied after the optimizer's update, which does not change; moments and momentum stay as they are. A
skipped step has gamma 1, and so has a head whose S is not finite. A factor of 1 changes no bit. Each rank has the same
S and multiplies its own rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models import DeepSeek
from precision.errors import UserError
from trainer.checkpoint import ShardView
from trainer.config import Config
from trainer.parallel.shard_views import local, shard_view


class _Rows(NamedTuple):
    """This rank's rows of a projection's master, `rows` of the whole's, of attention core number `core`."""

    weight: Tensor
    core: int
    rows: slice


class QKClip:
    """Clips a model by tau. max_logits [cores, H]: the step's, over all ranks, read by `apply`."""

    def __init__(self, model: DeepSeek, tau: float, max_logits: Tensor):
        self._tau, self._max_logits = tau, max_logits
        attentions = [block.attn for _, block in model.iter_blocks()]
        self._q_widths, self._kv_widths = attentions[0].q_widths, attentions[0].kv_widths
        self._q = [_own(i, (attn.q if attn.q_a is None else attn.q_b).weight) for i, attn in enumerate(attentions)]
        self._kv = [_own(i, attn.kv_b.weight) for i, attn in enumerate(attentions)]

    @torch.no_grad()
    def apply(self, ok: Tensor) -> Tensor:
        """Clip if `ok` (0-d bool), on the device. Returns the number of clipped heads, 0-d int64."""
        top_LH = self._max_logits
        clipped_LH = ok & torch.isfinite(top_LH) & (top_LH > self._tau)
        gamma_LH = torch.where(clipped_LH, self._tau / top_LH, 1.0)
        root_LH, one_LH = gamma_LH.sqrt(), torch.ones_like(gamma_LH)
        q_LR = _by_row((root_LH, gamma_LH), self._q_widths)
        kv_LR = _by_row((root_LH, one_LH), self._kv_widths)
        for factor_LR, parts in ((q_LR, self._q), (kv_LR, self._kv)):
            for weight, core, rows in parts:
                if weight.numel():
                    weight.mul_(factor_LR[core, rows, None])
        return clipped_LH.sum()


def check_qk_clip(config: Config, model: DeepSeek, device: torch.device) -> None:
    """Raise UserError if attention on this device returns nothing that `optim.qk_clip` could use."""
    documents = config.trainer.document_masking
    if not all(block.attn.raises_logits(device, documents) for _, block in model.iter_blocks()):
        why = "attention on this GPU, in this format, returns no log-sum-exp to bound logits with (docs/optimizers.md)"
        raise UserError(f"optim.qk_clip={config.optim.qk_clip}: {why}; set optim.qk_clip=null")


def _own(core: int, weight: Tensor) -> _Rows:
    view = shard_view(weight)
    first = view.offsets[0] if isinstance(view, ShardView) else 0
    part = torch.empty(0) if weight.is_meta else local(weight)  # meta: of another pipeline stage
    return _Rows(part, core, slice(first, first + len(part)))


def _by_row(factors: tuple[Tensor, Tensor], widths: tuple[int, int]) -> Tensor:
    """Expand factors [L, H] of the two parts of each head, of these widths, to [L, H (sum of widths)]."""
    parts = [factor[..., None].expand(-1, -1, width) for factor, width in zip(factors, widths, strict=True)]
    return torch.cat(parts, -1).flatten(1)
