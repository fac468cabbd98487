"""The transformer block, in two kinds: with a dense feed-forward layer and with experts.

    h' = h  + MLA(RMSNorm(h))          norm_position: pre
    y  = h' + FFN(RMSNorm(h'))

    h' = h  + RMSNorm(MLA(h))          post: FOG (arXiv 2505.20524, appendix B), gains from 1 / sqrt(num_layers)
    y  = h' + RMSNorm(FFN(h'))

FOG's norm bounds the output of a sublayer and acts as its layer scale. GEMMs read the stream itself, whose rms stays
between 1 and about sqrt(3). With experts there is one norm over the sum of shared and routed experts.

A block is the unit of recomputation, compilation and sharding. It returns everything it produces (stream, balance loss,
expert load), so that recomputation in the backward pass counts nothing twice. `forward` does not depend on the block's
index, so that all blocks of a kind share one compiled graph. With a cache (`mla.LatentCache`) a block continues the
positions in it; with a mask (`precision.document_mask`) positions see only their own document.

Legend: B batch, S sequence, T = B S tokens, D hidden, E experts, P pairs of rotary dimensions.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.layers import FFN, RMSNorm, normed
from models.mla import MLA, LatentCache
from models.moe import MoE
from precision import AmaxProbe, Feed, Kurtosis, Operand, Plan, quantize_for


class Block(nn.Module):
    """Common part of both kinds: norms, attention, and the probes that report which sublayer went bad first.

    post_gain: initial gain of the norms after the sublayers; None: the norms are before them.
    """

    def __init__(self, plan: Plan, name: str, attn: MLA, hidden_size: int, eps: float, post_gain: float | None = None):
        super().__init__()

        def norm(part: str) -> RMSNorm | None:
            return RMSNorm(plan, f"{name}.{part}", hidden_size, eps) if post_gain is None else None

        def post_norm(part: str) -> RMSNorm | None:
            return None if post_gain is None else RMSNorm(plan, f"{name}.{part}", hidden_size, eps, post_gain)

        self.attn_norm = norm("attn_norm")
        self.attn = attn
        self.attn_probe = AmaxProbe(f"{name}.attn")
        self.attn_post_norm = post_norm("attn_post_norm")
        self.ffn_norm = norm("ffn_norm")
        self.ffn_post_norm = post_norm("ffn_post_norm")
        self.ffn_probe: AmaxProbe
        self.kurtosis = Kurtosis("block")
        self.around_attention: Callable[..., Tensor] | None = None  # (function, *args) -> function(*args), recomputed

    def attend(
        self, h_BSD: Tensor, rope_2SP: Tensor, cache: LatentCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Apply the first sublayer with its residual, through `around_attention` where that is set."""
        if cache is not None:
            y_BSD = self.attn.cached(_read(h_BSD, self.attn_norm, self.attn.feed), rope_2SP, cache)
            return h_BSD + normed(y_BSD, self.attn_post_norm)
        args = (h_BSD, rope_2SP) if mask is None else (h_BSD, rope_2SP, mask)
        if self.around_attention is None:
            return self._attend(*args)
        return self.around_attention(self._attend, *args)

    def _attend(self, h_BSD: Tensor, rope_2SP: Tensor, mask: Tensor | None = None) -> Tensor:
        y_BSD = self.attn_probe(self.attn(_read(h_BSD, self.attn_norm, self.attn.feed), rope_2SP, mask))
        return h_BSD + normed(y_BSD, self.attn_post_norm)


class DenseBlock(Block):
    """A block with a dense feed-forward layer."""

    def __init__(
        self, plan: Plan, name: str, attn: MLA, ffn: FFN, hidden_size: int, eps: float, post_gain: float | None = None
    ):
        super().__init__(plan, name, attn, hidden_size, eps, post_gain)
        self.ffn = ffn
        self.ffn_probe = AmaxProbe(f"{name}.ffn")  # last: arena rows are in the order of the forward pass

    def forward(
        self, h_BSD: Tensor, rope_2SP: Tensor, cache: LatentCache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the block to h [B, S, D]; return h [B, S, D], balance loss (0-d FP32, zero here), load (int64, empty
        here)."""
        h_BSD = self.attend(h_BSD, rope_2SP, cache, mask)
        y_BSD = self.ffn_probe(self.ffn(_read(h_BSD, self.ffn_norm, self.ffn.feed)))
        h_BSD = h_BSD + normed(y_BSD, self.ffn_post_norm)
        self.kurtosis(h_BSD)
        no_loss = torch.zeros((), dtype=torch.float32, device=h_BSD.device)
        return h_BSD, no_loss, torch.zeros(0, dtype=torch.int64, device=h_BSD.device)


class MoEBlock(Block):
    """A block with experts."""

    def __init__(
        self, plan: Plan, name: str, attn: MLA, moe: MoE, hidden_size: int, eps: float, post_gain: float | None = None
    ):
        super().__init__(plan, name, attn, hidden_size, eps, post_gain)
        self.moe = moe
        self.ffn_probe = AmaxProbe(f"{name}.moe")

    def forward(
        self, h_BSD: Tensor, rope_2SP: Tensor, cache: LatentCache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the block to h [B, S, D]; return h [B, S, D], weighted balance loss (0-d FP32), load [E] int64."""
        h_BSD = self.attend(h_BSD, rope_2SP, cache, mask)
        B, S, _ = h_BSD.shape
        y_TD, balance_loss, load_E = self.moe(_read(h_BSD.flatten(0, 1), self.ffn_norm, self.moe.feed), B)
        h_BSD = h_BSD + normed(self.ffn_probe(y_TD), self.ffn_post_norm).unflatten(0, (B, S))
        self.kurtosis(h_BSD)
        return h_BSD, balance_loss, load_E  # no view: FSDP warns about views


def _read(h: Tensor, norm: RMSNorm | None, feed: Feed) -> Operand | Tensor:
    """Return a sublayer's input from the stream."""
    return quantize_for(h, feed) if norm is None else norm(h, feed)
