"""Rotary position embedding (RoPE, arXiv 2104.09864), and queries, keys and values of MLA as attention reads them.

Interleaved: features 2j and 2j + 1 at position p turn by the angle p w_j. Queries and keys meet only in dot products,
so the turned pairs may be stored as two halves (as in transformers) instead of interleaved.

B batch, S sequence, H heads, N nope, R rope, V value features, P = R / 2 pairs.
"""

import torch
from torch import Tensor

from precision.proof import ROTARY, refused


def apply_rope(x_BSHR: Tensor, rope_2SP: Tensor) -> Tensor:
    """Rotate x [B, S, H, R], pairs interleaved, by position; FP32 inside, result in x's dtype with pairs as halves."""
    cos_SHP, sin_SHP = rope_2SP[:, :, None, :].unbind()
    even, odd = x_BSHR.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([even * cos_SHP - odd * sin_SHP, odd * cos_SHP + even * sin_SHP], -1).to(x_BSHR.dtype)


def rotate_last(x_BSHd: Tensor, rope_2SP: Tensor) -> Tensor:
    """Apply `apply_rope` to the last R features."""
    R = 2 * rope_2SP.shape[-1]
    nope, rope = x_BSHd.split((x_BSHd.shape[-1] - R, R), -1)
    return torch.cat([nope, apply_rope(rope, rope_2SP)], -1)


def attention_inputs(
    q_BSHd: Tensor, kv_BSHx: Tensor, k_rope_BSGR: Tensor, rope_2SP: Tensor, kernels: str = "reference"
) -> tuple[Tensor, Tensor, Tensor]:
    """Build attention's q with its last R features turned, k = [k_nope ; k_rope] [B, S, H, N + R] and v [B, S, H, V].

    q [B, S, H, N + R], kv [B, S, H, N + V], k_rope [B, S, 1 or H, R], turned already; rope [2, S, P] FP32, cos and sin.
    kernels: `cuda` handles BF16 with one k_rope for all heads in one pass forward and one backward.
    """
    N = q_BSHd.shape[-1] - k_rope_BSGR.shape[-1]
    if kernels == "cuda" and k_rope_BSGR.shape[2] == 1 and q_BSHd.dtype == torch.bfloat16 and ROTARY not in refused:
        return _RotateHeads.apply(q_BSHd, kv_BSHx, k_rope_BSGR, rope_2SP, N)
    k_nope, v = kv_BSHx.split((N, kv_BSHx.shape[-1] - N), -1)
    k_rope = k_rope_BSGR.expand(-1, -1, q_BSHd.shape[2], -1)
    return rotate_last(q_BSHd, rope_2SP), torch.cat([k_nope, k_rope], -1), v


class _RotateHeads(torch.autograd.Function):
    """Rotary embedding that saves only the table for backward."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, k_rope: Tensor, rope: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor]:
        from precision.kernels import ops

        ctx.save_for_backward(rope)
        return *ops.rotate_heads(q, kv, k_rope[:, :, 0], rope), kv[..., N:]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        from precision.kernels import ops

        dq, dkv, dk_rope = ops.rotate_heads_backward(*grads, *ctx.saved_tensors)
        return dq, dkv, dk_rope[:, :, None], None, None
