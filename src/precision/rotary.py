"""Rotary position embedding (RoPE, arXiv 2104.09864), and queries, keys and values of MLA as attention reads them.

Interleaved: features 2j and 2j + 1 at position p turn by the angle p w_j. Queries and keys meet only in dot products,
so the turned pairs may be stored as two halves (as in transformers) instead of interleaved.

B batch, S sequence, H heads, N nope, R rope, V value features, P = R / 2 pairs.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from precision.operand import Operand, placeholder
from precision.proof import ROTARY, refused
from precision.scaling import record_amax


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


class HeadNorm(Protocol):
    """The norm of a head's features without gain, as `models.layers.RMSNorm` is."""

    eps: float

    def __call__(self, x: Tensor) -> Tensor: ...


class StaticCast(NamedTuple):
    """How attention reads normed queries and keys in FP8: E4M3 of x * scale; q_amax and k_amax are arena rows."""

    scale: float
    q_amax: Tensor
    k_amax: Tensor


def attention_inputs(
    q_BSHd: Tensor,
    kv_BSHx: Tensor,
    k_rope_BSGR: Tensor,
    rope_2SP: Tensor,
    kernels: str = "reference",
    norms: tuple[HeadNorm, HeadNorm] | None = None,
    cast: StaticCast | None = None,
) -> tuple[Tensor | Operand, Tensor | Operand, Tensor]:
    """Build attention's q with its last R features turned, k = [k_nope ; k_rope] [B, S, H, N + R] and v [B, S, H, V].

    q [B, S, H, N + R], kv [B, S, H, N + V], k_rope [B, S, 1 or H, R], turned already; rope [2, S, P] FP32, cos and sin.
    norms: of q and k before RoPE; k_rope is then not turned. kernels: `cuda` handles BF16 with one k_rope for all heads
    in one pass forward and one backward, which with `cast` returns q and k in FP8.
    """
    N = q_BSHd.shape[-1] - k_rope_BSGR.shape[-1]
    if kernels == "cuda" and k_rope_BSGR.shape[2] == 1 and q_BSHd.dtype == torch.bfloat16 and ROTARY not in refused:
        if norms is None:
            return _RotateHeads.apply(q_BSHd, kv_BSHx, k_rope_BSGR, rope_2SP, N)
        return _norm_and_rotate(q_BSHd, kv_BSHx, k_rope_BSGR, rope_2SP, norms[0].eps, cast)
    k_nope, v = kv_BSHx.split((N, kv_BSHx.shape[-1] - N), -1)
    k = torch.cat([k_nope, k_rope_BSGR.expand(-1, -1, q_BSHd.shape[2], -1)], -1)
    if norms is None:
        return rotate_last(q_BSHd, rope_2SP), k, v
    of_q, of_k = norms
    return rotate_last(of_q(q_BSHd), rope_2SP), rotate_last(of_k(k), rope_2SP), v


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


def _norm_and_rotate(
    q: Tensor, kv: Tensor, k_rope: Tensor, rope: Tensor, eps: float, cast: StaticCast | None
) -> tuple[Tensor | Operand, Tensor | Operand, Tensor]:
    if cast is None:
        q, k, v, _, _ = _NormAndRotate.apply(q, kv, k_rope, rope, eps, 0.0, None, None)
        return q, k, v
    q, k, v, q8, k8 = _NormAndRotate.apply(q, kv, k_rope, rope, eps, *cast)
    inv = torch.full((), 1 / cast.scale, device=q.device)
    return Operand(q, q8.detach(), inv, kept=False), Operand(k, k8.detach(), inv, kept=False), v


class _NormAndRotate(torch.autograd.Function):
    """Head norms without gain, then RoPE. Saves its inputs and 1 / rms. scale: of results in FP8, beside which q and k
    are placeholders; 0: they are BF16, and the FP8 results empty."""

    @staticmethod
    def forward(
        ctx, q: Tensor, kv: Tensor, k_rope: Tensor, rope: Tensor, eps: float, scale: float, q_amax: Tensor | None,
        k_amax: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        from precision.kernels import ops

        key = k_rope[:, :, 0]
        q_out, k_out, *rstd, amaxes = ops.norm_and_rotate_heads(q, kv, key, rope, eps, scale)
        ctx.save_for_backward(rope, q, kv, key, *rstd)
        v = kv[..., q.shape[-1] - key.shape[-1] :]
        if not scale:
            none = q.new_empty(0), q.new_empty(0)
            ctx.mark_non_differentiable(*none)
            return q_out, k_out, v, *none
        for row, amax in zip((q_amax, k_amax), amaxes, strict=True):
            assert row is not None
            record_amax(row, amax)
        ctx.mark_non_differentiable(q_out, k_out)
        return placeholder(q), placeholder(q), v, q_out, k_out

    @staticmethod
    def backward(ctx, *grads: Tensor):
        from precision.kernels import ops

        dq, dkv, dk_rope = ops.norm_and_rotate_heads_backward(*grads[:3], *ctx.saved_tensors)
        return dq, dkv, dk_rope[:, :, None], *(None,) * 5
