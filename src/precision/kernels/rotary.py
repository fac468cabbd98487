"""Queries and keys of MLA (arXiv 2405.04434) from the projections' results, in one pass each way.

    forward   q' = [q_nope ; turn(q_rope)]        k  = [k_nope ; k_rope], k_rope the same for all heads
    backward  dq = [dq'_nope ; turn back(dq'_rope)], dkv = [dk_nope ; dv], dk_rope = sum over heads of dk's last R

With a norm over the features of a head, N(x) = x / rms(x) (`model.qk_norm`), keys are turned here, too:

    forward   q' = turn(N(q)), k' = turn(N([k_nope ; k_rope])), in BF16, or in E4M3 under one static scale
    backward  dx = (d - n mean(d n)) / rms(x), n = N(x), d the gradient turned back, for q and k

turn: as `rotary.apply_rope`, pairs interleaved in q and as halves in q'. A program has one position and 8 or 16
heads at a time. The forward pass does not touch values: attention reads them in place, in kv.

B batch, S sequence, H heads, N nope, R rope, V value features; kv = [k_nope ; v] head by head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.formats import E4M3
from precision.kernels.common import TRITON_FP8, abs_bits, as_bf16, as_bits, power_of_2, to_fp8


@triton.jit
def _angles(table, S, p, R: tl.constexpr):
    """Load cos and sin of this program's position."""
    at = (tl.program_id(0) % S) * (R // 2) + p
    cos = tl.load(table + at, mask=p < R // 2, other=0.0)
    sin = tl.load(table + S * (R // 2) + at, mask=p < R // 2, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _normed(nope, rope, D: tl.constexpr, eps):
    """Return both parts of N(x), rounded to BF16, and 1 / rms."""
    one = tl.rsqrt((tl.sum(nope * nope, 1) + tl.sum(rope * rope, 1)) / D + eps)
    return as_bf16(nope * one[:, None]), as_bf16(rope * one[:, None]), one


@triton.jit
def _store_turned(to, nope, rope, n, p, cos, sin, inside, half, scale, F8: tl.constexpr, N: tl.constexpr,
                  R: tl.constexpr):  # fmt: skip
    """Store [nope ; turn(rope)], in FP8 if F8; return the abs of nope and of both halves of turn(rope), as bits."""
    even, odd = tl.split(tl.reshape(rope, (rope.shape[0], rope.shape[1] // 2, 2)))
    left, right = as_bf16(even * cos - odd * sin), as_bf16(odd * cos + even * sin)
    at = to + N + p
    if F8 is None:
        tl.store(to + n, nope.to(tl.bfloat16), mask=inside)
        tl.store(at, left.to(tl.bfloat16), mask=half)
        tl.store(at + R // 2, right.to(tl.bfloat16), mask=half)
    else:
        tl.store(to + n, to_fp8(nope * scale, F8, 448.0), mask=inside)
        tl.store(at, to_fp8(left * scale, F8, 448.0), mask=half)
        tl.store(at + R // 2, to_fp8(right * scale, F8, 448.0), mask=half)
    return abs_bits(nope), tl.maximum(abs_bits(left), abs_bits(right))


@triton.jit
def _record(amax, nope, rope):
    """Raise the amax to the largest of both."""
    tl.atomic_max(amax, tl.maximum(tl.max(nope), tl.max(rope)), sem="relaxed")


@triton.jit
def _forward_kernel(
    q, kv, k_rope, table, q_out, k_out, q_rstd, k_rstd, amaxes, S, H, eps, scale, NORM: tl.constexpr,
    F8: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    n, r, p = tl.arange(0, BN)[None, :], tl.arange(0, BR)[None, :], tl.arange(0, BR // 2)
    cos, sin = _angles(table, S, p, R)
    p = p[None, :]
    key = tl.load(k_rope + t * R + r, mask=r < R, other=0.0)
    q_nope_most, k_nope_most = tl.zeros((BH, BN), tl.int32), tl.zeros((BH, BN), tl.int32)
    q_rope_most, k_rope_most = tl.zeros((BH, BR // 2), tl.int32), tl.zeros((BH, BR // 2), tl.int32)
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)[:, None]
        to = (t * H + h) * (N + R)
        nope, rope, half = (h < H) & (n < N), (h < H) & (r < R), (h < H) & (p < R // 2)
        q_rope = tl.load(q + to + N + r, mask=rope, other=0.0).to(tl.float32)
        q_nope = tl.load(q + to + n, mask=nope, other=0.0).to(tl.float32)
        k_nope = tl.load(kv + (t * H + h) * (N + V) + n, mask=nope, other=0.0)
        if NORM:
            at = t * H + first + tl.arange(0, BH)
            keys = tl.where(rope, key.to(tl.float32), 0.0)
            k_nope, keys, one = _normed(k_nope.to(tl.float32), keys, N + R, eps)
            tl.store(k_rstd + at, one, mask=first + tl.arange(0, BH) < H)
            one, two = _store_turned(k_out + to, k_nope, keys, n, p, cos, sin, nope, half, scale, F8, N, R)
            k_nope_most, k_rope_most = tl.maximum(k_nope_most, one), tl.maximum(k_rope_most, two)
            q_nope, q_rope, one = _normed(q_nope, q_rope, N + R, eps)
            tl.store(q_rstd + at, one, mask=first + tl.arange(0, BH) < H)
        else:
            tl.store(k_out + to + n, k_nope, mask=nope)
            tl.store(k_out + to + N + r, tl.broadcast_to(key, (BH, BR)), mask=rope)
        one, two = _store_turned(q_out + to, q_nope, q_rope, n, p, cos, sin, nope, half, scale, F8, N, R)
        q_nope_most, q_rope_most = tl.maximum(q_nope_most, one), tl.maximum(q_rope_most, two)
    if F8 is not None:
        _record(amaxes, q_nope_most, q_rope_most)
        _record(amaxes + 1, k_nope_most, k_rope_most)


@triton.jit
def _turned_back(from_, p, cos, sin, half, R: tl.constexpr):
    """Load a gradient's last R features and turn them back."""
    left = tl.load(from_ + p, mask=half, other=0.0).to(tl.float32)
    right = tl.load(from_ + R // 2 + p, mask=half, other=0.0).to(tl.float32)
    unturned = tl.join(left * cos + right * sin, right * cos - left * sin)
    return tl.reshape(unturned, (left.shape[0], left.shape[1] * 2))


@triton.jit
def _before_norm(nope, rope, d_nope, d_rope, one, D: tl.constexpr):
    """Return the gradients of both parts of x from those of N(x)."""
    nope, rope = nope * one[:, None], rope * one[:, None]
    mean = ((tl.sum(d_nope * nope, 1) + tl.sum(d_rope * rope, 1)) / D)[:, None]
    return (d_nope - nope * mean) * one[:, None], (d_rope - rope * mean) * one[:, None]


@triton.jit
def _backward_kernel(
    dq, dk, dv, table, q, kv, k_rope, q_rstd, k_rstd, dq_out, dkv, dk_rope, S, H, q0, q1, q2, k0, k1, k2, v0, v1, v2,
    NORM: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """q0 to v2: strides of the gradients' batch, positions and heads."""
    t = tl.program_id(0).to(tl.int64)
    b, s = t // S, t % S
    n, v, r, p = tl.arange(0, BN)[None, :], tl.arange(0, BV)[None, :], tl.arange(0, BR)[None, :], tl.arange(0, BR // 2)
    cos, sin = _angles(table, S, p, R)
    p = p[None, :]
    total = tl.zeros((BR,), tl.float32)
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)[:, None]
        nope, value, rope, half = (h < H) & (n < N), (h < H) & (v < V), (h < H) & (r < R), (h < H) & (p < R // 2)
        from_q, from_k = dq + b * q0 + s * q1 + h * q2, dk + b * k0 + s * k1 + h * k2
        q_rope = _turned_back(from_q + N, p, cos, sin, half, R)
        q_nope = tl.load(from_q + n, mask=nope, other=0.0).to(tl.float32)
        k_nope = tl.load(from_k + n, mask=nope, other=0.0).to(tl.float32)
        one = tl.load(dv + b * v0 + s * v1 + h * v2 + v, mask=value, other=0.0)
        to, at = (t * H + h) * (N + R), (t * H + h) * (N + V)
        if NORM:
            k_turned = _turned_back(from_k + N, p, cos, sin, half, R)
            inside, i = first + tl.arange(0, BH) < H, t * H + first + tl.arange(0, BH)
            x = tl.load(q + to + n, mask=nope, other=0.0).to(tl.float32)
            x_rope = tl.load(q + to + N + r, mask=rope, other=0.0).to(tl.float32)
            rstd = tl.load(q_rstd + i, mask=inside, other=0.0)
            q_nope, q_rope = _before_norm(x, x_rope, q_nope, q_rope, rstd, N + R)
            x = tl.load(kv + at + n, mask=nope, other=0.0).to(tl.float32)
            x_rope = tl.load(k_rope + t * R + r, mask=r < R, other=0.0).to(tl.float32)
            rstd = tl.load(k_rstd + i, mask=inside, other=0.0)
            k_nope, k_turned = _before_norm(x, tl.broadcast_to(x_rope, (BH, BR)), k_nope, k_turned, rstd, N + R)
            total += tl.sum(k_turned, 0)
        else:
            total += tl.sum(tl.load(from_k + N + r, mask=rope, other=0.0).to(tl.float32), 0)
        tl.store(dq_out + to + N + r, as_bf16(q_rope).to(tl.bfloat16), mask=rope)
        tl.store(dq_out + to + n, as_bf16(q_nope).to(tl.bfloat16), mask=nope)
        tl.store(dkv + at + n, as_bf16(k_nope).to(tl.bfloat16), mask=nope)
        tl.store(dkv + at + N + v, one, mask=value)
    r = tl.arange(0, BR)
    tl.store(dk_rope + t * R + r, as_bf16(total).to(tl.bfloat16), mask=r < R)


def _sizes(H: int, N: int, R: int, heads: int = 16) -> dict[str, int]:
    return {"N": N, "R": R, "BH": min(heads, power_of_2(H)), "BN": power_of_2(N), "BR": power_of_2(R)}


def rotate_heads(q: Tensor, kv: Tensor, k_rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return q' and k [B, S, H, N + R].

    q [B, S, H, N + R], kv [B, S, H, N + V], k_rope [B, S, R], turned already, all BF16 and contiguous; table
    [2, S, R / 2] FP32, cos and sin.
    """
    (B, S, H, D), R = q.shape, k_rope.shape[-1]
    q_out, k_out, none = torch.empty_like(q), torch.empty_like(q), table
    _forward_kernel[(B * S,)](
        q, kv, k_rope, table, q_out, k_out, none, none, none, S, H, 0.0, 1.0, NORM=False, F8=None,
        V=kv.shape[-1] - D + R, **_sizes(H, D - R, R), num_warps=4,
    )  # fmt: skip
    return q_out, k_out


def norm_and_rotate_heads(
    q: Tensor, kv: Tensor, k_rope: Tensor, table: Tensor, eps: float, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q' and k' [B, S, H, N + R], 1 / rms of q and k [B, S, H] FP32, and the amaxes of q' and k' [2] FP32 (zeros
    in BF16); arguments as of `rotate_heads`, with k_rope before RoPE. scale: of q' and k' in E4M3; 0: they are BF16.

    The amaxes are returned, not written into the arena: see `ffn_ops.ffn_backward`.
    """
    (B, S, H, D), R = q.shape, k_rope.shape[-1]
    q_out, k_out = (torch.empty_like(q, dtype=E4M3.dtype if scale else q.dtype) for _ in range(2))
    q_rstd, k_rstd = (torch.empty(B, S, H, device=q.device, dtype=torch.float32) for _ in range(2))
    amaxes = torch.zeros(2, device=q.device)
    _forward_kernel[(B * S,)](
        q, kv, k_rope, table, q_out, k_out, q_rstd, k_rstd, as_bits(amaxes), S, H, eps, scale,
        NORM=True, F8=TRITON_FP8[E4M3.dtype] if scale else None, V=kv.shape[-1] - D + R, **_sizes(H, D - R, R, 8),
        num_warps=4,
    )  # fmt: skip
    return q_out, k_out, q_rstd, k_rstd, amaxes


def rotate_heads_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    table: Tensor,
    normed: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, kv and k_rope from those of q', k and v [B, S, H, ...], BF16, features adjacent.

    normed: q, kv, k_rope and 1 / rms of q and k, after `norm_and_rotate_heads`.
    """
    (B, S, H, D), V, R = dq.shape, dv.shape[-1], 2 * table.shape[-1]
    dq_out, dkv, dk_rope = dq.new_empty(B, S, H, D), dq.new_empty(B, S, H, D - R + V), dq.new_empty(B, S, R)
    strides = [stride for d in (dq, dk, dv) for stride in d.stride()[:3]]
    _backward_kernel[(B * S,)](
        dq, dk, dv, table, *(normed or (table,) * 5), dq_out, dkv, dk_rope, S, H, *strides, NORM=normed is not None,
        V=V, BV=power_of_2(V), **_sizes(H, D - R, R, 16 if normed is None else 8), num_warps=4,
    )  # fmt: skip
    return dq_out, dkv, dk_rope
