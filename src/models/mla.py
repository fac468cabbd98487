"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437, section 2.1.1).

Keys and values of all heads are expanded from one small latent, so that inference need only cache that latent and one
rotary key:

    c_kv = RMSNorm(W_DKV h)                     kv_a, first kv_lora_rank features
    k_r  = RoPE(W_KR h)                         kv_a, the rest; one for all heads
    [k_c ; v] = W_UK c_kv, W_UV c_kv            kv_b, head by head
    c_q  = RMSNorm(W_DQ h)                      q_a
    [q_c ; q_r] = W_UQ c_q, W_QR c_q            q_b, head by head; without q_lora_rank one projection q of h
    o    = W_O softmax([q_c ; RoPE(q_r)] . [k_c ; k_r] / sqrt(d_nope + d_rope)) v

The norms on the latents use eps 1e-6 whatever the model's rms_norm_eps says, as transformers 5.17 does.

Legend: B batch, S sequence, D hidden, H heads, N nope, R rope, V value width of a head, C key-value latent.
"""

import torch
from torch import Tensor, nn

from models.layers import RMSNorm, apply_rope
from precision import Feed, Linear, Operand, Plan, attention_core

LATENT_NORM_EPS = 1e-6


class MLA(nn.Module):
    """Multi-head latent attention, causal."""

    def __init__(
        self,
        plan: Plan,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        softmax_scale: float,
    ):
        super().__init__()

        def linear(part: str, in_features: int, out_features: int) -> Linear:
            return Linear(plan.gemm(f"{name}.{part}", f"attn.{part}", in_features, out_features))

        def latent_norm(part: str, rank: int) -> RMSNorm:
            return RMSNorm(plan, f"{name}.{part}", rank, LATENT_NORM_EPS)

        q_features = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank is None:
            self.q_a = self.q_norm = None
            self.q = linear("q", hidden_size, q_features)
        else:
            self.q_a = linear("q_a", hidden_size, q_lora_rank)
            self.q_norm = latent_norm("q_norm", q_lora_rank)
            self.q_b = linear("q_b", q_lora_rank, q_features)
            self.q_feed = Feed(self.q_b)
        self.kv_a = linear("kv_a", hidden_size, kv_lora_rank + qk_rope_head_dim)
        self.kv_norm = latent_norm("kv_norm", kv_lora_rank)
        self.kv_b = linear("kv_b", kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.o = linear("o", num_heads * v_head_dim, hidden_size)
        self.core_dtype = plan.tensor(f"{name}.core", "attn.core").dtype
        self.feed = Feed(self.q if self.q_a is None else self.q_a, self.kv_a)
        self.kv_feed = Feed(self.kv_b)
        self.num_heads, self.softmax_scale = num_heads, softmax_scale
        self.q_widths, self.kv_a_widths = (qk_nope_head_dim, qk_rope_head_dim), (kv_lora_rank, qk_rope_head_dim)
        self.kv_widths = (qk_nope_head_dim, v_head_dim)

    def forward(self, x: Operand | Tensor, rope_2SP: Tensor) -> Tensor:
        """x [B, S, D], normalised and made for `self.feed`; rope as from `rope_table` -> [B, S, D]."""
        q_nope_BSHN, q_rope_BSHR = self._queries(x).unflatten(-1, (self.num_heads, -1)).split(self.q_widths, -1)
        c_kv_BSC, k_rope_BSR = self.kv_a(x).split(self.kv_a_widths, -1)
        kv_BSHx = self.kv_b(self.kv_norm(c_kv_BSC, self.kv_feed)).unflatten(-1, (self.num_heads, -1))
        k_nope_BSHN, v_BSHV = kv_BSHx.split(self.kv_widths, -1)
        k_rope_BS1R = apply_rope(k_rope_BSR[:, :, None], rope_2SP)
        q = torch.cat([q_nope_BSHN, apply_rope(q_rope_BSHR, rope_2SP)], -1)
        k = torch.cat([k_nope_BSHN, k_rope_BS1R.expand(-1, -1, self.num_heads, -1)], -1)
        q_BHSd, k_BHSd, v_BHSV = (t.to(self.core_dtype).transpose(1, 2) for t in (q, k, v_BSHV))
        out_BHSV = attention_core(q_BHSd, k_BHSd, v_BHSV, self.softmax_scale)
        return self.o(out_BHSV.transpose(1, 2).flatten(2))

    def _queries(self, x: Operand | Tensor) -> Tensor:
        """[B, S, H (N + R)]."""
        if self.q_a is None or self.q_norm is None:
            return self.q(x)
        return self.q_b(self.q_norm(self.q_a(x), self.q_feed))
