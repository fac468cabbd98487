"""The transformer block, in two kinds: with a dense feed-forward layer and with experts.

    h' = h  + MLA(RMSNorm(h))
    y  = h' + FFN(RMSNorm(h'))

A block is the unit that is recomputed, compiled and sharded. All that leaves it is in its return value (stream, balance
loss, expert load), so that running it again in the backward pass counts nothing twice; and nothing in `forward` depends
on which block it is, so that all blocks of a kind share one compiled graph. With a cache (`mla.LatentCache`) a block
continues the positions in it; with a mask (`precision.document_mask`) positions see their own document.

Legend: B batch, S sequence, T = B S tokens, D hidden, E experts, P pairs of rotary dimensions.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.layers import FFN, RMSNorm
from models.mla import MLA, LatentCache
from models.moe import MoE
from precision import AmaxProbe, Kurtosis, Plan


class Block(nn.Module):
    """What both kinds share: norms, attention, and the watches that tell which sublayer went bad first."""

    def __init__(self, plan: Plan, name: str, attn: MLA, hidden_size: int, eps: float):
        super().__init__()
        self.attn_norm = RMSNorm(plan, f"{name}.attn_norm", hidden_size, eps)
        self.attn = attn
        self.attn_probe = plan.amax_probe(f"{name}.attn")
        self.ffn_norm = RMSNorm(plan, f"{name}.ffn_norm", hidden_size, eps)
        self.ffn_probe: AmaxProbe
        self.kurtosis = Kurtosis("block")
        self.around_attention: Callable[..., Tensor] | None = None  # (function, *args) -> function(*args), recomputed

    def attend(
        self, h_BSD: Tensor, rope_2SP: Tensor, cache: LatentCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The first sublayer with its residual, called through `around_attention` where that is set."""
        if cache is not None:
            return h_BSD + self.attn.cached(self.attn_norm(h_BSD, self.attn.feed), rope_2SP, cache)
        args = (h_BSD, rope_2SP) if mask is None else (h_BSD, rope_2SP, mask)
        if self.around_attention is None:
            return self._attend(*args)
        return self.around_attention(self._attend, *args)

    def _attend(self, h_BSD: Tensor, rope_2SP: Tensor, mask: Tensor | None = None) -> Tensor:
        return h_BSD + self.attn_probe(self.attn(self.attn_norm(h_BSD, self.attn.feed), rope_2SP, mask))


class DenseBlock(Block):
    """A block with a dense feed-forward layer."""

    def __init__(self, plan: Plan, name: str, attn: MLA, ffn: FFN, hidden_size: int, eps: float):
        super().__init__(plan, name, attn, hidden_size, eps)
        self.ffn = ffn
        self.ffn_probe = plan.amax_probe(f"{name}.ffn")  # last: arena rows stand in the order of the forward pass

    def forward(
        self, h_BSD: Tensor, rope_2SP: Tensor, cache: LatentCache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """h [B, S, D] -> h [B, S, D], balance loss (0-d FP32, zero here), load (int64, empty here)."""
        h_BSD = self.attend(h_BSD, rope_2SP, cache, mask)
        h_BSD = h_BSD + self.ffn_probe(self.ffn(self.ffn_norm(h_BSD, self.ffn.feed)))
        self.kurtosis(h_BSD)
        no_loss = torch.zeros((), dtype=torch.float32, device=h_BSD.device)
        return h_BSD, no_loss, torch.zeros(0, dtype=torch.int64, device=h_BSD.device)


class MoEBlock(Block):
    """A block with experts."""

    def __init__(self, plan: Plan, name: str, attn: MLA, moe: MoE, hidden_size: int, eps: float):
        super().__init__(plan, name, attn, hidden_size, eps)
        self.moe = moe
        self.ffn_probe = plan.amax_probe(f"{name}.moe")

    def forward(
        self, h_BSD: Tensor, rope_2SP: Tensor, cache: LatentCache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """h [B, S, D] -> h [B, S, D], weighted balance loss (0-d FP32), load [E] int64."""
        h_BSD = self.attend(h_BSD, rope_2SP, cache, mask)
        B, S, _ = h_BSD.shape
        y_TD, balance_loss, load_E = self.moe(self.ffn_norm(h_BSD.flatten(0, 1), self.moe.feed), B)
        h_BSD = h_BSD + self.ffn_probe(y_TD).unflatten(0, (B, S))
        self.kurtosis(h_BSD)
        return h_BSD, balance_loss, load_E  # no view: FSDP warns of one
