"""Queries and keys of MLA (arXiv 2405.04434) from the projections' results, in one pass each way.

    forward   q' = [q_nope ; turn(q_rope)]        k  = [k_nope ; k_rope], k_rope the same for all heads
    backward  dq = [dq'_nope ; turn back(dq'_rope)], dkv = [dk_nope ; dv], dk_rope = sum over heads of dk's last R

turn: as `rotary.apply_rope`, pairs interleaved in q and as halves in q'. A program has one position and up to 16 heads
at a time. The forward pass does not touch values: attention reads them in place, in kv.

B batch, S sequence, H heads, N nope, R rope, V value features; kv = [k_nope ; v] head by head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.common import as_bf16, power_of_2


@triton.jit
def _angles(table, S, p, R: tl.constexpr):
    """Load cos and sin of this program's position."""
    at = (tl.program_id(0) % S) * (R // 2) + p
    cos = tl.load(table + at, mask=p < R // 2, other=0.0)
    sin = tl.load(table + S * (R // 2) + at, mask=p < R // 2, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _forward_kernel(
    q, kv, k_rope, table, q_out, k_out, S, H,
    N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    n, r, p = tl.arange(0, BN)[None, :], tl.arange(0, BR)[None, :], tl.arange(0, BR // 2)
    cos, sin = _angles(table, S, p, R)
    key = tl.load(k_rope + t * R + r, mask=r < R, other=0.0)
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)[:, None]
        to = (t * H + h) * (N + R)
        nope, rope, half = (h < H) & (n < N), (h < H) & (r < R), (h < H) & (p < R // 2)[None, :]
        unturned = tl.load(q + to + N + r, mask=rope, other=0.0).to(tl.float32)
        q_nope = tl.load(q + to + n, mask=nope, other=0.0)
        k_nope = tl.load(kv + (t * H + h) * (N + V) + n, mask=nope, other=0.0)
        even, odd = tl.split(tl.reshape(unturned, (BH, BR // 2, 2)))
        at = q_out + to + N + p[None, :]
        tl.store(at, as_bf16(even * cos - odd * sin).to(tl.bfloat16), mask=half)
        tl.store(at + R // 2, as_bf16(odd * cos + even * sin).to(tl.bfloat16), mask=half)
        tl.store(q_out + to + n, q_nope, mask=nope)
        tl.store(k_out + to + n, k_nope, mask=nope)
        tl.store(k_out + to + N + r, tl.broadcast_to(key, (BH, BR)), mask=rope)


@triton.jit
def _backward_kernel(
    dq, dk, dv, table, dq_out, dkv, dk_rope, S, H, q0, q1, q2, k0, k1, k2, v0, v1, v2,
    N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """q0 to v2: strides of the gradients' batch, positions and heads."""
    t = tl.program_id(0).to(tl.int64)
    b, s = t // S, t % S
    n, v, r, p = tl.arange(0, BN)[None, :], tl.arange(0, BV)[None, :], tl.arange(0, BR)[None, :], tl.arange(0, BR // 2)
    cos, sin = _angles(table, S, p, R)
    total = tl.zeros((BR,), tl.float32)
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)[:, None]
        nope, value, rope, half = (
            (h < H) & (n < N),
            (h < H) & (v < V),
            (h < H) & (r < R),
            (h < H) & (p < R // 2)[None, :],
        )
        q, k = dq + b * q0 + s * q1 + h * q2, dk + b * k0 + s * k1 + h * k2
        turned = q + N + p[None, :]
        left = tl.load(turned, mask=half, other=0.0).to(tl.float32)
        right = tl.load(turned + R // 2, mask=half, other=0.0).to(tl.float32)
        q_nope = tl.load(q + n, mask=nope, other=0.0)
        k_nope = tl.load(k + n, mask=nope, other=0.0)
        one = tl.load(dv + b * v0 + s * v1 + h * v2 + v, mask=value, other=0.0)
        total += tl.sum(tl.load(k + N + r, mask=rope, other=0.0).to(tl.float32), 0)
        unturned = tl.join(left * cos + right * sin, right * cos - left * sin)
        to, at = dq_out + (t * H + h) * (N + R), dkv + (t * H + h) * (N + V)
        tl.store(to + N + r, as_bf16(tl.reshape(unturned, (BH, BR))).to(tl.bfloat16), mask=rope)
        tl.store(to + n, q_nope, mask=nope)
        tl.store(at + n, k_nope, mask=nope)
        tl.store(at + N + v, one, mask=value)
    r = tl.arange(0, BR)
    tl.store(dk_rope + t * R + r, as_bf16(total).to(tl.bfloat16), mask=r < R)


def _sizes(H: int, N: int, R: int) -> dict[str, int]:
    return {"N": N, "R": R, "BH": min(16, power_of_2(H)), "BN": power_of_2(N), "BR": power_of_2(R)}


def rotate_heads(q: Tensor, kv: Tensor, k_rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return q' and k [B, S, H, N + R].

    q [B, S, H, N + R], kv [B, S, H, N + V], k_rope [B, S, R], turned already, all BF16 and contiguous; table
    [2, S, R / 2] FP32, cos and sin.
    """
    (B, S, H, D), R = q.shape, k_rope.shape[-1]
    N = D - R
    q_out, k_out = torch.empty_like(q), torch.empty_like(q)
    _forward_kernel[(B * S,)](
        q, kv, k_rope, table, q_out, k_out, S, H, V=kv.shape[-1] - N, **_sizes(H, N, R), num_warps=4
    )
    return q_out, k_out


def rotate_heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, kv and k_rope from those of q', k and v [B, S, H, ...], BF16, features adjacent."""
    (B, S, H, D), V, R = dq.shape, dv.shape[-1], 2 * table.shape[-1]
    dq_out, dkv, dk_rope = dq.new_empty(B, S, H, D), dq.new_empty(B, S, H, D - R + V), dq.new_empty(B, S, R)
    strides = [stride for d in (dq, dk, dv) for stride in d.stride()[:3]]
    _backward_kernel[(B * S,)](
        dq, dk, dv, table, dq_out, dkv, dk_rope, S, H, *strides, V=V, BV=power_of_2(V), **_sizes(H, D - R, R),
        num_warps=4,
    )  # fmt: skip
    return dq_out, dkv, dk_rope
