"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437, section 2.1.1).

Keys and values of all heads are expanded from one small latent, so that inference need only cache that latent and one
rotary key:

    c_kv = RMSNorm(W_DKV h)                     kv_a, first kv_lora_rank features
    k_r  = RoPE(W_KR h)                         kv_a, the rest; one for all heads
    [k_c ; v] = W_UK c_kv, W_UV c_kv            kv_b, head by head
    c_q  = RMSNorm(W_DQ h)                      q_a
    [q_c ; q_r] = W_UQ c_q, W_QR c_q            q_b, head by head; without q_lora_rank one projection q of h
    o    = W_O softmax([q_c ; RoPE(q_r)] . [k_c ; k_r] / sqrt(d_nope + d_rope)) v

What a `LatentCache` keeps of the positions behind is that and no more: what multiplies W_UK and W_UV (in an FP8 recipe
the numbers that the FP8 stands for) and k_r. The first call with a cache, the prompt, computes as without one. Later
ones have few queries and many keys; they expand nothing (section 2.1.2 of V2), since

    q_c . (W_UK c_kv) = (W_UK^T q_c) . c_kv          and          sum_j p_j (W_UV c_kv_j) = W_UV (sum_j p_j c_kv_j)

so that attention takes place among latents: for a query and a key H (2 C + R) multiplications instead of the H C (N +
V) of the expansion.

The norms on the latents use eps 1e-6 whatever the model's rms_norm_eps says, as transformers 5.17 does.

Legend: B batch, S sequence, D hidden, H heads, N nope, R rope, V value width of a head, C key-value latent; T new
positions, L positions in a cache.
"""

import torch
from torch import Tensor, nn

from models.layers import RMSNorm, apply_rope
from precision import Feed, Kurtosis, Linear, Operand, Plan, attention_core, latent_attention

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
        self.kurtosis = Kurtosis("qkv")
        self.num_heads, self.softmax_scale = num_heads, softmax_scale
        self.q_widths, self.kv_a_widths = (qk_nope_head_dim, qk_rope_head_dim), (kv_lora_rank, qk_rope_head_dim)
        self.kv_widths = (qk_nope_head_dim, v_head_dim)

    def forward(self, x: Operand | Tensor, rope_2SP: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, S, D], normalised and made for `self.feed`; rope as from `rope_table`; mask as from `document_mask`, or
        None: every position sees all before it -> [B, S, D]."""
        q_BSx, latent, k_rope = self._queries(x), *self._latent(x, rope_2SP)
        kv_BSx = self.kv_b(latent)
        self.kurtosis(q_BSx, kv_BSx)
        return self._expanded(*self._by_head(q_BSx, rope_2SP), kv_BSx, k_rope, mask)

    def cached(self, x: Operand | Tensor, rope_2SP: Tensor, cache: "LatentCache") -> Tensor:
        """As `forward` for the T positions behind those in `cache`, which come to be in it. x [B, T, D]; rope: of these
        positions. Without gradients."""
        first = cache.length == 0
        q_nope, q_rope = self._by_head(self._queries(x), rope_2SP)
        latent, k_rope = self._latent(x, rope_2SP)
        cache.append(latent.read() if isinstance(latent, Operand) else latent, k_rope[:, :, 0])
        if first:
            return self._expanded(q_nope, q_rope, self.kv_b(latent), k_rope)
        w_k_HNC, w_v_HVC = cache.weights
        q_BTHC = torch.einsum("bthn,hnc->bthc", q_nope.to(self.core_dtype), w_k_HNC)
        q = torch.cat([q_BTHC, q_rope.to(self.core_dtype)], -1).transpose(1, 2)
        out_BHTC = latent_attention(q, cache.latent_BLx, self.kv_a_widths[0], self.softmax_scale)
        return self.o(torch.einsum("bhtc,hvc->bthv", out_BHTC, w_v_HVC).flatten(2))

    def _by_head(self, q_BSx: Tensor, rope_2SP: Tensor) -> tuple[Tensor, Tensor]:
        """q_c [B, S, H, N], RoPE(q_r) [B, S, H, R]."""
        q_nope_BSHN, q_rope_BSHR = q_BSx.unflatten(-1, (self.num_heads, -1)).split(self.q_widths, -1)
        return q_nope_BSHN, apply_rope(q_rope_BSHR, rope_2SP)

    def _latent(self, x: Operand | Tensor, rope_2SP: Tensor) -> tuple[Operand | Tensor, Tensor]:
        """c_kv [B, S, C] made for `kv_feed`, k_r [B, S, 1, R]."""
        c_kv_BSC, k_rope_BSR = self.kv_a(x).split(self.kv_a_widths, -1)
        return self.kv_norm(c_kv_BSC, self.kv_feed), apply_rope(k_rope_BSR[:, :, None], rope_2SP)

    def _expanded(
        self, q_nope: Tensor, q_rope: Tensor, kv_BSx: Tensor, k_rope: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attention among these positions, of keys and values [B, S, H (N + V)] as `kv_b` makes them; see `_by_head`,
        `_latent` -> [B, S, D]."""
        kv_BSHx = kv_BSx.unflatten(-1, (self.num_heads, -1))
        k_nope_BSHN, v_BSHV = kv_BSHx.split(self.kv_widths, -1)
        q = torch.cat([q_nope, q_rope], -1)
        k = torch.cat([k_nope_BSHN, k_rope.expand(-1, -1, self.num_heads, -1)], -1)
        q_BHSd, k_BHSd, v_BHSV = (t.to(self.core_dtype).transpose(1, 2) for t in (q, k, v_BSHV))
        out_BHSV = attention_core(q_BHSd, k_BHSd, v_BHSV, self.softmax_scale, mask)
        return self.o(out_BHSV.transpose(1, 2).flatten(2))

    def _queries(self, x: Operand | Tensor) -> Tensor:
        """[B, S, H (N + R)]."""
        if self.q_a is None or self.q_norm is None:
            return self.q(x)
        return self.q_b(self.q_norm(self.q_a(x), self.q_feed))


class LatentCache:
    """What one MLA keeps of the positions behind: `latent_BLx` [B, L, C + R], c_kv and k_r, in the core's format.

    capacity: positions there is room for. Made for the weights as they are: those of kv_b are kept beside it.
    """

    def __init__(self, attn: MLA, batch: int, capacity: int):
        shape, dtype = (batch, capacity, sum(attn.kv_a_widths)), attn.core_dtype
        self._room = torch.empty(shape, dtype=dtype, device=attn.kv_b.weight.device)
        self.length = 0
        per_head = attn.kv_b.plain_weight().to(dtype).unflatten(0, (attn.num_heads, -1))
        self.weights = per_head.split(attn.kv_widths, 1)
        """W_UK [H, N, C] and W_UV [H, V, C]."""

    @property
    def latent_BLx(self) -> Tensor:
        return self._room[:, : self.length]

    def append(self, latent_BTC: Tensor, k_rope_BTR: Tensor) -> None:
        """T more positions."""
        start, self.length = self.length, self.length + latent_BTC.shape[1]
        assert self.length <= self._room.shape[1], f"the cache has room for {self._room.shape[1]} positions"
        width = latent_BTC.shape[2]
        self._room[:, start : self.length, :width] = latent_BTC
        self._room[:, start : self.length, width:] = k_rope_BTR

    def cut(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self.length = min(self.length, length)
