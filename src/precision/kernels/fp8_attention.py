"""Causal attention with its seven products on the FP8 tensor cores; `precision.fp8_attention` defines the numbers.

Ranges of keys and documents are those of `document_attention`; without documents each sequence is one. The tensor
cores multiply FP8 only where both factors are contiguous along the sum. P and dS are made in registers, so their
products need the other factor transposed, [B, H, width, S'] with S' = S rounded up to 128:

    forward     O  = P v       v^T
    values      dV = P^T dO    dO^T          a program owns keys and iterates over queries
    keys        dK = dS^T q    q^T           likewise
    queries     dQ = dS k      k^T           a program owns queries and iterates over keys; raises dS's amax

dV and dK have a kernel each, because one that sums both in FP32 outside the tensor cores runs out of registers: S is
computed four times in all, dP twice. No memory is summed by several programs, so results are deterministic.

Sums over keys and queries are added in FP32 every block; `fast` leaves those of gradients in the tensor cores. P is
2^8 2^(s - max) in the forward pass, so the largest one of a row is exact under the running maximum; `total` has the
same factor. Where dS has no scale yet (or none but its own), a first launch of `queries` writes its amax.

MLA's usual head sizes have faster kernels in `hopper_attention`; these here serve other sizes and the interpreter.

Legend: as in `document_attention`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.formats import Format
from precision.kernels import const, hopper_attention, hopper_attention_backward
from precision.kernels.attention_tiles import by_position, delta_kernel, head_widths, load_rows, store_rows, strides
from precision.kernels.common import (
    Cast,
    abs_bits,
    as_bits,
    as_bytes,
    as_words,
    byte,
    cdiv,
    inverse,
    is_known,
    padded_rows,
    settled,
    tensor_scale,
    to_fp8,
)

_LOG2_E = math.log2(math.e)
LEAST = 32  # columns of a tile, and the shortest sum of an FP8 product
TILES = {"forward": (128, 64, 8, 3), "values": (64, 128, 8, 3), "keys": (64, 128, 8, 3), "queries": (128, 64, 8, 3)}
"""M, N, warps, stages of each kernel."""


@triton.jit
def _transpose_kernel(
    x, xt, x_batch, x_head, x_row, S, W, S4, H: tl.constexpr, BS: tl.constexpr, BW: tl.constexpr,
    PERMUTED: tl.constexpr,
):  # fmt: skip
    """Write bytes x [B, H, S, W] as x^T [B, H, W, 4 S4], viewed as words; zeros beyond S. PERMUTED: see
    `hopper_attention`."""
    x += (tl.program_id(2) // H).to(tl.int64) * x_batch + tl.program_id(2) % H * x_head
    xt += tl.program_id(2).to(tl.int64) * W * S4
    s4 = tl.program_id(1) * (BS // 4) + tl.arange(0, BS // 4)
    c = tl.program_id(0) * BW + tl.arange(0, BW)
    words = tl.zeros((BS // 4, BW), tl.int32)
    for i in tl.static_range(4):
        s = s4 * 4 + i
        if PERMUTED:
            s = s4 // 4 * 16 + s4 % 4 * 2 + (i // 2 * 8 + i % 2)
        inside = (s < S)[:, None] & (c < W)[None, :]
        words |= byte(tl.load(x + s.to(tl.int64)[:, None] * x_row + c[None, :], mask=inside, other=0), i)
    words = settled(words)
    tl.store(xt + c[:, None] * S4 + s4[None, :], tl.trans(words), mask=(c < W)[:, None] & (s4 < S4)[None, :])


@triton.jit
def _across(base, at, stride, WIDTH: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr):
    """Load rows FIRST to FIRST + COUNT of a transposed copy [WIDTH, stride], columns from `at` on; zeros outside."""
    c = FIRST + tl.arange(0, COUNT)
    n = at + tl.arange(0, N)
    place = base + c[:, None] * stride + n[None, :]
    if FIRST + COUNT > WIDTH:
        tile = tl.load(place, mask=(c < WIDTH)[:, None] & (n < stride)[None, :], other=0.0)
    else:
        tile = tl.load(place, mask=(n < stride)[None, :], other=0.0)
    return tile


@triton.jit
def _plus(acc, a, b, FAST: tl.constexpr):
    """Return acc + a b."""
    if FAST:
        acc = tl.dot(a, b, acc)
    else:
        acc += tl.dot(a, b)
    return acc


@triton.jit
def _product(a1, a2, b, n, row, S, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Return a b^T over D = D1 + D2 features, for rows n of b."""
    s = tl.dot(a1, tl.trans(load_rows(b, n, row, S, D, 0, D1)))
    if D2 > 0:
        s = tl.dot(a2, tl.trans(load_rows(b, n, row, S, D, D1, D2)), s)
    return s


@triton.jit
def _scale_kernel(
    scale_row, own, used,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
):  # fmt: skip
    """Write the scale of dS: the arena's, or that of its own amax."""
    tl.store(used, tensor_scale(scale_row, own, LIMIT, HEADROOM, POW2, DELAYED))


@triton.jit
def _heads(base, row, stride, S, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Load rows of D = D1 + D2 features in two parts; the first one twice if D2 is 0."""
    x1 = load_rows(base, row, stride, S, D, 0, D1)
    x2 = x1
    if D2 > 0:
        x2 = load_rows(base, row, stride, S, D, D1, D2)
    return x1, x2


@triton.jit
def _store_heads(base, row, stride, S, x1, x2, factor, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Store both parts of such rows, scaled."""
    store_rows(base, row, stride, S, x1 * factor, D, 0, D1)
    if D2 > 0:
        store_rows(base, row, stride, S, x2 * factor, D, D1, D2)


@triton.jit
def _forward_kernel(
    q, k, vt, q_inv, k_inv, v_inv, bounds, out, lse, q_batch, q_head, q_row, k_batch, k_head, k_row,
    out_batch, out_head, out_row, S, S4, scale,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Compute a block of queries of a head: out, lse [B, H, S] to base e. scale: with log2(e)."""
    at = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest ranges first
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    k += b * k_batch + h * k_head
    vt += (b * H + h) * V * S4 * 4
    start = bounds + b * S
    m = at + tl.arange(0, M)
    start_m = tl.load(start + m, mask=m < S, other=0)
    scale *= tl.load(q_inv) * tl.load(k_inv)
    q1, q2 = _heads(q + b * q_batch + h * q_head, m, q_row, S, D, D1, D2)
    acc = tl.zeros((M, DV), tl.float32)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), -1.0e15, tl.float32)  # finite, also times scale, so that a block without a visible key adds 0
    for n0 in range(tl.load(start + at) // N * N, tl.minimum(at + M, S), N):
        n = n0 + tl.arange(0, N)
        s = _product(q1, q2, k, n, k_row, S, D, D1, D2)
        s = tl.where((n[None, :] >= start_m[:, None]) & (n[None, :] <= m[:, None]), s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s * scale - (higher * scale - 8.0)[:, None])
        shrink = tl.exp2((top - higher) * scale)
        total = total * shrink + tl.sum(p, 1)
        values = _across(vt, n0, S4 * 4, V, 0, DV, N)
        acc = _plus(acc * shrink[:, None], to_fp8(p, k.dtype.element_ty, 448.0), tl.trans(values), FAST)
        top = higher
    out += b * out_batch + h * out_head
    store_rows(out, m, out_row, S, acc * (tl.load(v_inv) / total)[:, None], V, 0, DV)
    tl.store(lse + (b * H + h) * S + m, (top * scale + tl.log2(total) - 8.0) * 0.6931471805599453, mask=m < S)


@triton.jit
def _keys_kernel(
    q, k, v, dout, xt, q_inv, k_inv, v_inv, dout_inv, bounds, lse, delta, used, dx,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, dout_batch, dout_head, dout_row,
    dx_batch, dx_head, dx_row, S, S4, scale,
    F8: tl.constexpr, B: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute dv (VALUES; xt is dO^T) or dk (xt is q^T) of a block of keys of a head."""
    at = tl.program_id(0) * N
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    q += b * q_batch + h * q_head
    dout += b * dout_batch + h * dout_head
    xt += (b * H + h) * (V if VALUES else D) * S4 * 4
    lse += (b * H + h) * S
    delta += (b * H + h) * S
    behind = bounds + (B + b) * S
    n = at + tl.arange(0, N)
    end_n = tl.load(behind + n, mask=n < S, other=0)
    logits = scale * 1.4426950408889634 * tl.load(q_inv) * tl.load(k_inv)
    k1, k2 = _heads(k + b * k_batch + h * k_head, n, k_row, S, D, D1, D2)
    values = load_rows(v + b * v_batch + h * v_head, n, v_row, S, V, 0, DV)
    acc1 = tl.zeros((N, DV if VALUES else D1), tl.float32)
    acc2 = tl.zeros((N, D2 if D2 > 0 else 16), tl.float32)
    ds_scale = tl.load(used)
    factor = tl.load(dout_inv) * ds_scale / 448.0  # of dO and of dS in FP8; p has 448
    dp_factor = factor * tl.load(v_inv)
    for m0 in range(at // M * M, tl.load(behind + tl.minimum(at + N, S) - 1), M):
        m = m0 + tl.arange(0, M)
        lse_m = tl.load(lse + m, mask=m < S, other=float("inf")) * 1.4426950408889634 - 8.807354922057604
        p = tl.exp2(_product(k1, k2, q, m, q_row, S, D, D1, D2) * logits - lse_m[None, :])
        p = tl.where((m[None, :] >= n[:, None]) & (m[None, :] < end_n[:, None]), p, 0.0)
        if VALUES:
            p8 = to_fp8(p, q.dtype.element_ty, 448.0)
            acc1 = _plus(acc1, p8, tl.trans(_across(xt, m0, S4 * 4, V, 0, DV, M)), FAST)
        else:
            dp = tl.dot(values, tl.trans(load_rows(dout, m, dout_row, S, V, 0, DV)))
            delta_m = tl.load(delta + m, mask=m < S, other=0.0) * factor
            ds = to_fp8(p * (dp * dp_factor - delta_m[None, :]), F8, 57344.0)
            acc1 = _plus(acc1, ds, tl.trans(_across(xt, m0, S4 * 4, D, 0, D1, M)), FAST)
            if D2 > 0:
                acc2 = _plus(acc2, ds, tl.trans(_across(xt, m0, S4 * 4, D, D1, D2, M)), FAST)
    dx += b * dx_batch + h * dx_head
    if VALUES:
        store_rows(dx, n, dx_row, S, acc1 * (tl.load(dout_inv) / 448.0), V, 0, DV)
    else:
        _store_heads(dx, n, dx_row, S, acc1, acc2, scale * tl.load(q_inv) * inverse(ds_scale), D, D1, D2)


@triton.jit
def _queries_kernel(
    q, k, v, dout, kt, q_inv, k_inv, v_inv, dout_inv, bounds, lse, delta, scale_row, used, amax, dq,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, dout_batch, dout_head, dout_row,
    dq_batch, dq_head, dq_row, S, S4, scale,
    F8: tl.constexpr, DELAYED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr, AMAX: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries of a head; raise amax. AMAX: only the latter, unless the arena has a scale."""
    busy = True
    if AMAX:
        busy = not is_known(scale_row, DELAYED)
    if busy:
        at = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
        b = (tl.program_id(1) // H).to(tl.int64)
        h = tl.program_id(1) % H
        k += b * k_batch + h * k_head
        v += b * v_batch + h * v_head
        kt += (b * H + h) * D * S4 * 4
        start = bounds + b * S
        m = at + tl.arange(0, M)
        start_m = tl.load(start + m, mask=m < S, other=0)
        q1, q2 = _heads(q + b * q_batch + h * q_head, m, q_row, S, D, D1, D2)
        dy = load_rows(dout + b * dout_batch + h * dout_head, m, dout_row, S, V, 0, DV)
        logits = scale * 1.4426950408889634 * tl.load(q_inv) * tl.load(k_inv)
        ds_scale = 1.0
        if not AMAX:
            ds_scale = tl.load(used)
        factor = tl.load(dout_inv) * ds_scale  # of dO, and of dS in FP8
        lse_m = tl.load(lse + (b * H + h) * S + m, mask=m < S, other=float("inf")) * 1.4426950408889634
        delta_m = tl.load(delta + (b * H + h) * S + m, mask=m < S, other=0.0) * factor
        dq1 = tl.zeros((M, D1), tl.float32)
        dq2 = tl.zeros((M, D2 if D2 > 0 else 16), tl.float32)
        largest = tl.zeros((M,), tl.int32)
        dp_factor = factor * tl.load(v_inv)
        for n0 in range(tl.load(start + at) // N * N, tl.minimum(at + M, S), N):
            n = n0 + tl.arange(0, N)
            p = tl.exp2(_product(q1, q2, k, n, k_row, S, D, D1, D2) * logits - lse_m[:, None])
            p = tl.where((n[None, :] >= start_m[:, None]) & (n[None, :] <= m[:, None]), p, 0.0)
            dp = tl.dot(dy, tl.trans(load_rows(v, n, v_row, S, V, 0, DV)))
            ds = p * (dp * dp_factor - delta_m[:, None])
            largest = tl.maximum(largest, tl.max(abs_bits(ds), 1))
            if not AMAX:
                ds8 = to_fp8(ds, F8, 57344.0)
                dq1 = _plus(dq1, ds8, tl.trans(_across(kt, n0, S4 * 4, D, 0, D1, N)), FAST)
                if D2 > 0:
                    dq2 = _plus(dq2, ds8, tl.trans(_across(kt, n0, S4 * 4, D, D1, D2, N)), FAST)
        most = tl.max(largest, 0)
        if AMAX:
            tl.atomic_max(amax, most, sem="relaxed")
        else:
            exact = most.to(tl.float32, bitcast=True) * inverse(ds_scale)
            tl.atomic_max(amax, abs_bits(exact), sem="relaxed")
            dq += b * dq_batch + h * dq_head
            _store_heads(dq, m, dq_row, S, dq1, dq2, scale * tl.load(k_inv) * inverse(ds_scale), D, D1, D2)


def cast_of_scores(fmt: Format, delayed: bool, margin: int, power_of_two: bool) -> Cast:
    """Return how dS is cast: under one scale."""
    return Cast(fmt, const.TENSOR.value, delayed, margin, power_of_two)


def _tiles(name: str) -> dict[str, int]:
    M, N, warps, stages = TILES[name]
    return {"M": M, "N": N, "num_warps": warps, "num_stages": stages}


def transposed(x: Tensor, permuted: bool = False) -> Tensor:
    """Return FP8 x [B, H, S, W] as [B, H, W, S'], contiguous, S' = S rounded up to 128, with zeros. permuted: in the
    order that `hopper_attention` reads."""
    B, H, S, W = x.shape
    xt = torch.empty(B, H, W, padded_rows(S), device=x.device, dtype=x.dtype)
    _transpose_kernel[(cdiv(W, 64), cdiv(S, 128), B * H)](
        as_bytes(x), as_words(xt), *strides(x), S, W, xt.shape[-1] // 4, H=H, BS=128, BW=64, PERMUTED=permuted
    )
    return xt


def forward(
    q8: Tensor, q_inv: Tensor, k8: Tensor, k_inv: Tensor, v8: Tensor, v_inv: Tensor, bounds: Tensor, scale: float,
    fast: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute q8, k8 [B, H, S, D], v8 [B, H, S, V] FP8 with their inverse scales, within bounds [2, B, S] int32; return
    out [B, H, S, V] BF16 (in memory [B, S, H, V]) and lse [B, H, S] FP32, to base e."""
    (B, H, S, D), V = q8.shape, v8.shape[-1]
    out = by_position(q8, V, torch.bfloat16)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q8.device)
    if _for_hopper(q8, k8, v8):
        vt = transposed(v8, permuted=True)
        hopper_attention.forward(q8, q_inv, k8, k_inv, vt, v_inv, bounds, out, lse, scale * _LOG2_E)
        return out, lse
    tiles, vt = _tiles("forward"), transposed(v8)
    _forward_kernel[(cdiv(S, tiles["M"]), B * H)](
        q8, k8, vt, q_inv, k_inv, v_inv, bounds, out, lse, *strides(q8), *strides(k8), *strides(out), S,
        vt.shape[-1] // 4, scale * _LOG2_E, H=H, **head_widths(D, V, LEAST), **tiles, FAST=fast,
    )  # fmt: skip
    return out, lse


def backward(
    dout8: Tensor, dout_inv: Tensor, q8: Tensor, q_inv: Tensor, k8: Tensor, k_inv: Tensor, v8: Tensor, v_inv: Tensor,
    bounds: Tensor, out: Tensor, lse: Tensor, ds_scale: Tensor, ds_amax: Tensor, how: Cast, scale: float, fast: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk [B, H, S, D], dv [B, H, S, V] BF16, in memory [B, S, H, ...], and the scale of dS []; raise the
    arena row ds_amax. how: from `cast_of_scores`."""
    (B, H, S, D), V = q8.shape, v8.shape[-1]
    dq, dk, dv = (by_position(out, width) for width in (D, D, V))
    delta, amax = torch.empty_like(lse), as_bits(ds_amax)
    own, used = torch.zeros_like(amax), torch.empty_like(ds_amax)
    widths = head_widths(D, V, LEAST)
    delta_kernel[(cdiv(S, 64), B * H)](
        out, dout8, delta, *strides(out), *strides(dout8), S, H=H, V=V, DV=widths["DV"], M=64
    )
    inputs, invs = (q8, k8, v8, dout8), (q_inv, k_inv, v_inv, dout_inv, bounds, lse, delta)
    places = tuple(stride for x in inputs for stride in strides(x))
    lengths, kinds = (S, padded_rows(S) // 4, scale), {"F8": how.constants["F8"], "H": H, **widths, "FAST": fast}

    def queries(kt: Tensor, amax: Tensor, only_amax: bool) -> None:
        tiles = _tiles("queries")
        _queries_kernel[(cdiv(S, tiles["M"]), B * H)](
            *inputs, kt, *invs, ds_scale, used, amax, dq, *places, *strides(dq), *lengths, **kinds, **tiles,
            DELAYED=how.delayed, AMAX=only_amax,
        )  # fmt: skip

    queries(k8, own, only_amax=True)
    _scale_kernel[(1,)](ds_scale, own, used, **how.constants)
    if _for_hopper(q8, k8, v8, dout8):
        hopper_attention_backward.backward(
            dout8, dout_inv, q8, q_inv, k8, k_inv, v8, v_inv, *(transposed(x, True) for x in (dout8, q8, k8)), bounds,
            lse, delta, used, amax, dq, dk, dv, scale, fast,
        )  # fmt: skip
        return dq, dk, dv, used
    for name, of, dx in (("values", dout8, dv), ("keys", q8, dk)):
        tiles = _tiles(name)
        _keys_kernel[(cdiv(S, tiles["N"]), B * H)](
            *inputs, transposed(of), *invs, used, dx, *places, *strides(dx), *lengths, **kinds, **tiles, B=B,
            VALUES=name == "values",
        )  # fmt: skip
    queries(transposed(k8), amax, only_amax=False)
    return dq, dk, dv, used


def _for_hopper(*operands: Tensor) -> bool:
    """Return whether `hopper_attention` supports these: its head sizes, and heads next to each other in memory."""
    if const.INTERPRETED:
        return False
    fits = all(x.transpose(1, 2).is_contiguous() for x in operands)
    return fits and (operands[0].shape[-1], operands[2].shape[-1]) in hopper_attention.HEADS
