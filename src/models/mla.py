"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437, section 2.1.1).

Keys and values of all heads are expanded from one small latent, so that inference caches only that latent and one
rotary key:

    c_kv = RMSNorm(W_DKV h)                     kv_a, first kv_lora_rank features
    k_r  = RoPE(W_KR h)                         kv_a, the rest; one for all heads
    [k_c ; v] = W_UK c_kv, W_UV c_kv            kv_b, head by head
    c_q  = RMSNorm(W_DQ h)                      q_a
    [q_c ; q_r] = W_UQ c_q, W_QR c_q            q_b, head by head; without q_lora_rank one projection q of h
    o    = W_O softmax([q_c ; RoPE(q_r)] . [k_c ; k_r] / sqrt(d_nope + d_rope)) v

A `LatentCache` stores exactly these for past positions: k_r, and c_kv as W_UK and W_UV read it (in an FP8 recipe the
values that the FP8 represents). The first call with a cache, the prompt, computes as without one. Later calls have few
queries and many keys; they expand nothing (section 2.1.2 of V2), since

    q_c . (W_UK c_kv) = (W_UK^T q_c) . c_kv          and          sum_j p_j (W_UV c_kv_j) = W_UV (sum_j p_j c_kv_j)

So attention runs among latents: H (2 C + R) multiplications per query and key instead of the H C (N + V) of the
expansion.

With `qk_norm` (FOG, arXiv 2505.20524; here over all features of a head, before RoPE, without gain, N(x) = x / rms(x)):

    q^ = RoPE(N([q_c ; q_r])), k^ = RoPE(N([k_c ; k_r]))          RoPE on the rotary features; |x_i| <= sqrt(N + R)

The latents' norms have no gain either: trained gains there and on q and k grow until FP8 breaks. N of a key is one
number per head and position, rstd = 1 / rms([k_c ; k_r]), and RoPE does not change it. So the cache also stores rstd
[L, H], which multiplies the logits among latents.

The norms on the latents use eps 1e-6 whatever the model's rms_norm_eps is, as in transformers 5.17.

Legend: B batch, S sequence, D hidden, H heads, N nope, R rope, V value width of a head, C key-value latent; T new
positions, L positions in a cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.context import ContextSplit
from models.layers import RMSNorm, normed, qk_bound, softmax_scale
from models.tensor import TensorSplit
from precision import (
    AttentionCore,
    Feed,
    Kurtosis,
    Linear,
    MaxLogits,
    Operand,
    Plan,
    apply_rope,
    attention_core,
    attention_inputs,
    latent_attention,
    quantize_for,
    returns_lse,
    rotate_last,
)

LATENT_NORM_EPS = 1e-6


class MLA(nn.Module):
    """Multi-head latent attention, causal."""

    def __init__(self, config: ModelConfig, plan: Plan, name: str):
        super().__init__()
        D, H, C = config.hidden_size, config.num_heads, config.kv_lora_rank
        N, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        yarn, gain = config.rope_scaling, None if config.qk_norm else 1.0

        def linear(part: str, in_features: int, out_features: int) -> Linear:
            return Linear(plan.gemm(f"{name}.{part}", f"attn.{part}", in_features, out_features))

        def latent_norm(part: str, rank: int) -> RMSNorm:
            return RMSNorm(plan, f"{name}.{part}", rank, LATENT_NORM_EPS, gain)

        def head_norm(part: str) -> RMSNorm | None:
            return RMSNorm(plan, f"{name}.{part}", N + R, config.rms_norm_eps, None) if config.qk_norm else None

        if config.q_lora_rank is None:
            self.q_a = self.q_norm = None
            self.q = linear("q", D, H * (N + R))
        else:
            self.q_a = linear("q_a", D, config.q_lora_rank)
            self.q_norm = latent_norm("q_norm", config.q_lora_rank)
            self.q_b = linear("q_b", config.q_lora_rank, H * (N + R))
            self.q_feed = Feed(self.q_b)
        self.kv_a = linear("kv_a", D, C + R)
        self.kv_norm = latent_norm("kv_norm", C)
        self.kv_b = linear("kv_b", C, H * (N + V))
        self.o = linear("o", H * V, D)
        self.q_head_norm, self.k_head_norm = head_norm("q_head_norm"), head_norm("k_head_norm")
        row = plan.core(f"{name}.core", H, N + R, V, qk_bound(N + R, yarn) if config.qk_norm else None)
        self.core_dtype = row.recipe.output.dtype
        self.core: AttentionCore | Callable[..., Tensor] = AttentionCore(row) if row.recipe.is_fp8 else attention_core
        self.feed = Feed(self.q if self.q_a is None else self.q_a, self.kv_a)
        self.kv_feed = Feed(self.kv_b)
        self.kurtosis = Kurtosis("qkv")
        self.max_logits = MaxLogits(H)
        self.context: ContextSplit | None = None  # the ranks that share sequences
        self.tensor: TensorSplit | None = None  # the ranks that share the heads' weights
        self.num_heads, self.kernels = H, plan.kernels
        self.softmax_scale = config.qk_scale * softmax_scale(N + R, yarn)
        self.q_widths, self.kv_a_widths, self.kv_widths = (N, R), (C, R), (N, V)

    def split(self, tensor: TensorSplit) -> None:
        """Keep the weights of this process's own heads (tensor parallelism). Call it after they are drawn."""
        first = tensor.own_heads(self.num_heads).start
        self.tensor, self.num_heads = tensor, self.num_heads // tensor.size
        own = range(self.num_heads) if self.context is None else self.context.own_heads(self.num_heads)
        self.max_logits.heads = range(first + own.start, first + own.stop)
        self.kurtosis.token_group = tensor.name
        q = self.q if self.q_a is None else self.q_b
        for layer, dim in ((q, 0), (self.kv_b, 0), (self.o, 1)):
            tensor.keep(layer, dim)
        self.q_feed = Feed(q)
        if self.q_a is None:  # the queries read x of all the group's positions
            self.feed = Feed(self.kv_a, tensor=True)

    def forward(self, x: Operand | Tensor, rope_2SP: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply attention to x [B, S, D], normed and made for `self.feed`; return [B, S, D].

        rope: from `rope_table`. mask: from `document_mask`; None: plain causal. With `context` or `tensor`, x and the
        result cover this rank's positions; rope and mask cover whole sequences.
        """
        group_2SP = rope_2SP if self.context is None else self.context.own(rope_2SP)
        own_2SP = group_2SP if self.tensor is None else self.tensor.own(group_2SP)
        if self.tensor is None:
            q_BSx, latent, k_rope = self._queries(x), *self._latent(x, own_2SP)
            kv_BSx = self.kv_b(latent)
        else:
            q_BSx, kv_BSx, k_rope = self._gathered(x, own_2SP, self.tensor)
        self.kurtosis(q_BSx, kv_BSx)
        return self._expanded(q_BSx, kv_BSx, k_rope, rope_2SP, mask)

    def raises_logits(self, device: torch.device, documents: bool) -> bool:
        """Return whether `max_logits` is raised on this device. documents: whether attention stays within documents."""
        if isinstance(self.core, AttentionCore):
            return True
        return returns_lse(device, self.core_dtype, sum(self.q_widths), self.kv_widths[1], documents)

    def cached(self, x: Operand | Tensor, rope_2SP: Tensor, cache: "LatentCache") -> Tensor:
        """Apply attention to the T positions after those in `cache`, and append them to it. x [B, T, D]; rope: of these
        positions. Without gradients."""
        first = cache.length == 0
        q_BTx = self._queries(x)
        latent, k_rope = self._latent(x, rope_2SP)
        turned = k_rope if self.k_head_norm is None else apply_rope(k_rope, rope_2SP)
        cache.append(latent.read() if isinstance(latent, Operand) else latent, turned[:, :, 0], k_rope[:, :, 0])
        if first:
            return self._expanded(q_BTx, self.kv_b(latent), k_rope, rope_2SP)
        w_k_HNC, w_v_HVC = cache.weights
        q_BTHd = rotate_last(normed(self._by_head(q_BTx), self.q_head_norm), rope_2SP)
        q_nope, q_rope = q_BTHd.to(self.core_dtype).split(self.q_widths, -1)
        q_BTHC = torch.einsum("bthn,hnc->bthc", q_nope, w_k_HNC)
        q = torch.cat([q_BTHC, q_rope], -1).transpose(1, 2)
        out_BHTC = latent_attention(q, cache.latent_BLx, self.kv_a_widths[0], self.softmax_scale, cache.rstd_BHL)
        return self.o(torch.einsum("bhtc,hvc->bthv", out_BHTC, w_v_HVC).flatten(2))

    def _by_head(self, x_BSx: Tensor) -> Tensor:
        """View x as [B, S, H, ...]."""
        return x_BSx.unflatten(-1, (self.num_heads, -1))

    def _latent(self, x: Operand | Tensor, rope_2SP: Tensor) -> tuple[Operand | Tensor, Tensor]:
        """Return c_kv [B, S, C] made for `kv_feed`, and k_r [B, S, 1, R], rotated unless the norm of keys comes
        first."""
        c_kv_BSC, k_rope = self._unexpanded(x, rope_2SP)
        return self.kv_norm(c_kv_BSC, self.kv_feed), k_rope

    def _unexpanded(self, x: Operand | Tensor, rope_2SP: Tensor) -> tuple[Tensor, Tensor]:
        """Return c_kv before its norm, and k_r as in `_latent`."""
        c_kv_BSC, k_rope_BSR = self.kv_a(x).split(self.kv_a_widths, -1)
        k_rope = k_rope_BSR[:, :, None]
        return c_kv_BSC, k_rope if self.k_head_norm is not None else apply_rope(k_rope, rope_2SP)

    def _gathered(self, x: Operand | Tensor, rope_2SP: Tensor, tensor: TensorSplit) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of own heads as `q` (`q_b`) and `kv_b` make them, and k_r, at all positions
        of the tensor group. `models.tensor` explains the order."""
        c_kv_BsC, k_rope = self._unexpanded(x, rope_2SP)
        kv_pending = tensor.begin(torch.cat([normed(c_kv_BsC, self.kv_norm), k_rope[:, :, 0]], -1))
        if self.q_a is None:
            q, q_pending = self.q, tensor.begin(x.tensor if isinstance(x, Operand) else x)
        else:
            q, q_pending = self.q_b, tensor.begin(normed(self.q_a(x), self.q_norm))
        c_kv_BSC, k_rope_BSR = tensor.finish(kv_pending).split(self.kv_a_widths, -1)
        kv_BSx = self.kv_b(quantize_for(c_kv_BSC.contiguous(), self.kv_feed))
        return q(quantize_for(tensor.finish(q_pending), self.q_feed)), kv_BSx, k_rope_BSR[:, :, None]

    def _expanded(
        self, q_BSx: Tensor, kv_BSx: Tensor, k_rope: Tensor, rope_2SP: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attend among these positions; return [B, S, D].

        Queries [B, S, H (N + R)], keys and values [B, S, H (N + V)] as the projections make them; k_r from `_latent`;
        rope of whole sequences.
        """
        q_BSHd, kv_BSHx = self._by_head(q_BSx), self._by_head(kv_BSx)
        if self.context is not None:  # from here to the result: all positions, own heads
            k_rope = self.context.for_heads(k_rope[:, :, 0], self.num_heads // self.context.size)
            q_BSHd, kv_BSHx = self.context.to_heads(q_BSHd), self.context.to_heads(kv_BSHx)
        norms = None if self.q_head_norm is None or self.k_head_norm is None else (self.q_head_norm, self.k_head_norm)
        cast = self.core.static_cast if isinstance(self.core, AttentionCore) else None
        made = attention_inputs(q_BSHd, kv_BSHx, k_rope, rope_2SP, self.kernels, norms, cast)
        q_BHSd, k_BHSd, v_BHSV = (_heads_first(x, self.core_dtype) for x in made)
        out_BHSV = self.core(q_BHSd, k_BHSd, v_BHSV, self.softmax_scale, mask, self.max_logits.row)
        out_BSHV = out_BHSV.transpose(1, 2)
        if self.context is not None:
            out_BSHV = self.context.to_positions(out_BSHV)
        y_BSD = self.o(out_BSHV.flatten(2))
        return y_BSD if self.tensor is None else self.tensor.scatter(y_BSD)

    def _queries(self, x: Operand | Tensor) -> Tensor:
        """Return the queries [B, S, H (N + R)]."""
        if self.q_a is None or self.q_norm is None:
            return self.q(x)
        return self.q_b(self.q_norm(self.q_a(x), self.q_feed))


def _heads_first(x: Tensor | Operand, dtype: torch.dtype) -> Tensor | Operand:
    """Return x [B, S, H, ...] as [B, H, S, ...]; a tensor in `dtype`."""
    if isinstance(x, Operand):
        return Operand(x.carrier.transpose(1, 2), x.data.transpose(1, 2), x.scale_inv, x.kept)
    return x.to(dtype).transpose(1, 2)


class LatentCache:
    """Past positions of one MLA layer: `latent_BLx` [B, L, C + R], c_kv and k_r, in the core's format; with QK norm
    `rstd_BHL` [B, H, L] FP32 of the keys, else None.

    capacity: maximum number of positions. A cache is valid for the current weights: it holds those of kv_b.
    """

    def __init__(self, attn: MLA, batch: int, capacity: int):
        shape, dtype = (batch, capacity, sum(attn.kv_a_widths)), attn.core_dtype
        self._room = torch.empty(shape, dtype=dtype, device=attn.kv_b.weight.device)
        self.length = 0
        per_head = attn.kv_b.plain_weight().to(dtype).unflatten(0, (attn.num_heads, -1))
        self.weights = per_head.split(attn.kv_widths, 1)
        """W_UK [H, N, C] and W_UV [H, V, C]."""
        self._eps = None if attn.k_head_norm is None else attn.k_head_norm.eps
        heads = batch, attn.num_heads, capacity
        self._rstd = None if self._eps is None else torch.empty(heads, device=self._room.device)

    @property
    def latent_BLx(self) -> Tensor:
        return self._room[:, : self.length]

    @property
    def rstd_BHL(self) -> Tensor | None:
        return None if self._rstd is None else self._rstd[:, :, : self.length]

    def append(self, latent_BTC: Tensor, k_rope_BTR: Tensor, unturned_BTR: Tensor) -> None:
        """Append T positions. unturned: k_r before RoPE, which the norm of keys includes."""
        start, self.length = self.length, self.length + latent_BTC.shape[1]
        assert self.length <= self._room.shape[1], f"the cache has room for {self._room.shape[1]} positions"
        width = latent_BTC.shape[2]
        self._room[:, start : self.length, :width] = latent_BTC
        self._room[:, start : self.length, width:] = k_rope_BTR
        if self._rstd is not None and self._eps is not None:
            w_k_HNC = self.weights[0]
            k_BHTN = torch.einsum("btc,hnc->bhtn", latent_BTC.to(w_k_HNC.dtype), w_k_HNC).float()
            squares_BHT = k_BHTN.square().sum(-1) + unturned_BTR.float().square().sum(-1)[:, None]
            mean_BHT = squares_BHT / (w_k_HNC.shape[1] + unturned_BTR.shape[-1])
            self._rstd[:, :, start : self.length] = (mean_BHT + self._eps).rsqrt()

    def cut(self, length: int) -> None:
        """Discard the positions from `length` on."""
        self.length = min(self.length, length)
