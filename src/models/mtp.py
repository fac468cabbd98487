"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Depth k = 1 ... D reads the state of depth k - 1 (depth 0 is the main model) and the embedding of the token k positions
ahead, and predicts the token after that:

    x^k_i = M_k [RMSNorm(Emb(t_{i+k})) ; RMSNorm(h^{k-1}_i)]          enorm, hnorm; order as in the published weights
    h^k   = RMSNorm(Block_k(x^k))
    p(t_{i+k+1}) = softmax(head(h^k_i))

With `norm_position=post` the embedding is scaled to the stream's size, so that both halves need no norm. The one norm
is on the projection's output, and there is no norm after the block:

    x^k_i = RMSNorm(M_k [Emb(t_{i+k}) ; h^{k-1}_i])                   gain from 1: there is no residual to scale it for

Embedding and head are the main model's. Sources differ in which state is passed on; here, as in transformers 5.17's
`MtpModel`, it is the one after the norm, for the main model and for each depth.

All depths run on S positions, so that shapes stay the same. The last k positions have no token to predict: they carry
no language-model loss, and causality keeps them from the others. (Depth 1 has a true input everywhere; deeper ones
repeat the last token there.)

Legend: B batch, S sequence, D hidden, E experts, P pairs of rotary dimensions.
"""

import torch
from torch import Tensor

from models.block import MoEBlock
from models.layers import RMSNorm, normed
from models.mla import MLA, LatentCache
from models.moe import MoE
from precision import Linear, Plan


class MTPBlock(MoEBlock):
    """One depth: a projection of two normed inputs, then a block with experts."""

    def __init__(
        self, plan: Plan, name: str, attn: MLA, moe: MoE, hidden_size: int, eps: float, post_gain: float | None = None
    ):
        super().__init__(plan, name, attn, moe, hidden_size, eps, post_gain)

        def norm(part: str, present: bool) -> RMSNorm | None:
            return RMSNorm(plan, f"{name}.{part}", hidden_size, eps) if present else None

        pre = post_gain is None
        self.enorm, self.hnorm = norm("enorm", pre), norm("hnorm", pre)
        self.proj = Linear(plan.gemm(f"{name}.proj", "mtp.proj", 2 * hidden_size, hidden_size))
        self.proj_norm, self.norm = norm("proj_norm", not pre), norm("norm", pre)

    def forward(
        self,
        h_BSD: Tensor,
        rope_2SP: Tensor,
        embedded_BSD: Tensor,
        cache: LatentCache | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one depth. h [B, S, D]: state of the previous depth. embedded [B, S, D]: tokens k positions ahead.

        Returns this depth's state [B, S, D], the weighted balance loss (0-d FP32) and the load [E] int64.
        """
        both = torch.cat([normed(embedded_BSD, self.enorm), normed(h_BSD, self.hnorm)], -1)
        x_BSD = normed(self.proj(both), self.proj_norm)
        h_BSD, balance_loss, load_E = super().forward(x_BSD, rope_2SP, cache, mask)
        return normed(h_BSD, self.norm), balance_loss, load_E


def tokens_ahead(sequence: Tensor, k: int, length: int) -> Tensor:
    """Shift sequence [B, S + 1, ...] by k: return [B, S, ...] with entry i + k at position i; past the end the last
    entry.

    The result is always contiguous: blocks would be compiled separately for different layouts.
    """
    ahead = sequence[:, k : k + length]
    missing = length - ahead.shape[1]
    repeated = sequence[:, -1:].expand(-1, missing, *sequence.shape[2:])
    return torch.cat([ahead, repeated], 1) if missing else ahead.contiguous()
