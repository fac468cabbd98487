"""Causal attention with its seven products on the FP8 tensor cores; `precision.fp8_attention` defines the numbers.

Ranges of keys and documents are those of `document_attention`; without documents each sequence is one. The tensor
cores multiply FP8 only where both factors are contiguous along the sum. P and dS are made in registers, so their
products need the other factor transposed, [B, H, width, S'] with S' = S rounded up to 128:

    forward     O  = P v       v^T
    _values     dV = P^T dO    dO^T          a program owns keys and iterates over queries
    _keys       dK = dS^T q    q^T           likewise
    _queries    dQ = dS k      k^T           a program owns queries and iterates over keys; raises dS's amax

dV and dK have a kernel each, because one that sums both in FP32 outside the tensor cores runs out of registers: S is
computed four times in all, dP twice. No memory is summed by several programs, so results are deterministic.

Sums over keys and queries are added in FP32 every block; `fast` leaves them in the tensor cores. P is 2^8 2^(s - max)
in the forward pass, so the largest one of a row is exact under the running maximum; `total` has the same factor.

Where dS has no scale yet (or none but its own), a first launch of `_queries` writes its amax.

Legend: as in `document_attention`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.attention import by_position
from precision.formats import Format
from precision.kernels import const
from precision.kernels.attention_tiles import (
    delta_kernel,
    head_widths,
    keys_of,
    load_rows,
    store_rows,
    strides,
)
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

_LOG2_E, _LN_2 = math.log2(math.e), math.log(2)
LARGEST = 256  # head size
LEAST = 32  # columns of a tile, and the shortest sum of an FP8 product
TILES = {"forward": (128, 64, 8, 3), "values": (64, 128, 8, 3), "keys": (64, 128, 8, 3), "queries": (128, 64, 8, 3)}
"""M, N, warps, stages of each kernel."""


@triton.jit
def _transpose_kernel(
    x, xt, x_batch, x_head, x_row, S, W, S4, H: tl.constexpr, BS: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """Write bytes x [B, H, S, W] as x^T [B, H, W, 4 S4], viewed as words; zeros beyond S."""
    x += (tl.program_id(2) // H).to(tl.int64) * x_batch + tl.program_id(2) % H * x_head
    xt += tl.program_id(2).to(tl.int64) * W * S4
    s4 = tl.program_id(1) * (BS // 4) + tl.arange(0, BS // 4)
    c = tl.program_id(0) * BW + tl.arange(0, BW)
    words = tl.zeros((BS // 4, BW), tl.int32)
    for i in tl.static_range(4):
        s = s4 * 4 + i
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
def _attend(
    acc, total, top, q1, q2, m, start_m, k, vt, k_row, S4, first, end, S, scale,
    D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Forward over keys [first, end). top: the largest product so far, before it is scaled."""
    for at in range(first, end, N):
        n = at + tl.arange(0, N)
        s = _product(q1, q2, k, n, k_row, S, D, D1, D2)
        if MASKED:
            s = tl.where((n[None, :] >= start_m[:, None]) & (n[None, :] <= m[:, None]), s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s * scale - (higher * scale - 8.0)[:, None])
        shrink = tl.exp2((top - higher) * scale)
        total = total * shrink + tl.sum(p, 1)
        values = _across(vt, at, S4 * 4, V, 0, DV, N)
        acc = _plus(acc * shrink[:, None], to_fp8(p, k.dtype.element_ty, 448.0), tl.trans(values), FAST)
        top = higher
    return acc, total, top


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
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    vt += (b * H + h) * V * S4 * 4
    start = bounds + b * S
    m = at + tl.arange(0, M)
    start_m = tl.load(start + m, mask=m < S, other=0)
    first, whole, diagonal, end = keys_of(start, at, S, M, N)
    scale *= tl.load(q_inv) * tl.load(k_inv)
    q1 = load_rows(q, m, q_row, S, D, 0, D1)
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q, m, q_row, S, D, D1, D2)
    acc = tl.zeros((M, DV), tl.float32)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), -1.0e38, tl.float32)  # finite, so that a block without a visible key adds nothing
    acc, total, top = _attend(
        acc, total, top, q1, q2, m, start_m, k, vt, k_row, S4, first, whole, S, scale, D, V, D1, D2, DV, N, True, FAST
    )
    acc, total, top = _attend(
        acc, total, top, q1, q2, m, start_m, k, vt, k_row, S4, whole, diagonal, S, scale, D, V, D1, D2, DV, N, False,
        FAST,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q1, q2, m, start_m, k, vt, k_row, S4, diagonal, end, S, scale, D, V, D1, D2, DV, N, True, FAST
    )
    out += b * out_batch + h * out_head
    store_rows(out, m, out_row, S, acc * (tl.load(v_inv) / total)[:, None], V, 0, DV)
    tl.store(lse + (b * H + h) * S + m, (top * scale + tl.log2(total) - 8.0) * 0.6931471805599453, mask=m < S)


@triton.jit
def _gather(
    acc1, acc2, k1, k2, values, n, end_n, q, q_row, dout, dout_row, xt, S4, lse, delta, first, end, S, scale, dp_factor,
    delta_factor, F8: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Accumulate dv (VALUES; xt is dO^T), or dk in two parts (xt is q^T), of a block of keys over queries [first,
    end)."""
    for at in range(first, end, M):
        m = at + tl.arange(0, M)
        s = _product(k1, k2, q, m, q_row, S, D, D1, D2)
        # 448 p
        p = tl.exp2(
            s * scale
            - tl.load(lse + m, mask=m < S, other=float("inf"))[None, :] * 1.4426950408889634
            + 8.807354922057604
        )
        if MASKED:
            p = tl.where((m[None, :] >= n[:, None]) & (m[None, :] < end_n[:, None]), p, 0.0)
        if VALUES:
            acc1 = _plus(
                acc1, to_fp8(p, q.dtype.element_ty, 448.0), tl.trans(_across(xt, at, S4 * 4, V, 0, DV, M)), FAST
            )
        else:
            dp = tl.dot(values, tl.trans(load_rows(dout, m, dout_row, S, V, 0, DV)))
            delta_m = tl.load(delta + m, mask=m < S, other=0.0) * delta_factor
            ds = to_fp8(p * (dp * dp_factor - delta_m[None, :]), F8, 57344.0)
            acc1 = _plus(acc1, ds, tl.trans(_across(xt, at, S4 * 4, D, 0, D1, M)), FAST)
            if D2 > 0:
                acc2 = _plus(acc2, ds, tl.trans(_across(xt, at, S4 * 4, D, D1, D2, M)), FAST)
    return acc1, acc2


@triton.jit
def _keys_kernel(
    q, k, v, dout, xt, q_inv, k_inv, v_inv, dout_inv, bounds, lse, delta, scale_row, own, used, dx,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, dout_batch, dout_head, dout_row,
    dx_batch, dx_head, dx_row, S, S4, scale,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    B: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute dv (VALUES) or dk of a block of keys of a head."""
    at = tl.program_id(0) * N
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    dout += b * dout_batch + h * dout_head
    xt += (b * H + h) * (V if VALUES else D) * S4 * 4
    lse += (b * H + h) * S
    delta += (b * H + h) * S
    behind = bounds + (B + b) * S
    n = at + tl.arange(0, N)
    end_n = tl.load(behind + n, mask=n < S, other=0)
    until = tl.load(behind + tl.minimum(at + N, S) - 1)
    diagonal = (at + N + M - 1) // M * M  # queries from here on see all of these keys, if of their document
    whole = tl.maximum(tl.load(behind + at) // M * M, diagonal)
    logits = scale * 1.4426950408889634 * tl.load(q_inv) * tl.load(k_inv)
    k1 = load_rows(k, n, k_row, S, D, 0, D1)
    k2 = k1
    if D2 > 0:
        k2 = load_rows(k, n, k_row, S, D, D1, D2)
    acc1 = tl.zeros((N, DV if VALUES else D1), tl.float32)
    acc2 = tl.zeros((N, D2 if D2 > 0 else 16), tl.float32)
    values = k1
    factor = 1.0
    result = tl.load(dout_inv) / 448.0
    if not VALUES:
        values = load_rows(v, n, v_row, S, V, 0, DV)
        ds_scale = tensor_scale(scale_row, own, LIMIT, HEADROOM, POW2, DELAYED)
        factor = result * ds_scale  # of dO, and of dS in FP8 over 448
        result = scale * tl.load(q_inv) * inverse(ds_scale)
    dp_factor = factor * tl.load(v_inv)
    acc1, acc2 = _gather(
        acc1, acc2, k1, k2, values, n, end_n, q, q_row, dout, dout_row, xt, S4, lse, delta, at // M * M, diagonal, S,
        logits, dp_factor, factor, F8, D, V, D1, D2, DV, M, True, FAST, VALUES,
    )  # fmt: skip
    acc1, acc2 = _gather(
        acc1, acc2, k1, k2, values, n, end_n, q, q_row, dout, dout_row, xt, S4, lse, delta, diagonal, whole, S,
        logits, dp_factor, factor, F8, D, V, D1, D2, DV, M, False, FAST, VALUES,
    )  # fmt: skip
    acc1, acc2 = _gather(
        acc1, acc2, k1, k2, values, n, end_n, q, q_row, dout, dout_row, xt, S4, lse, delta, whole, until, S,
        logits, dp_factor, factor, F8, D, V, D1, D2, DV, M, True, FAST, VALUES,
    )  # fmt: skip
    dx += b * dx_batch + h * dx_head
    if VALUES:
        store_rows(dx, n, dx_row, S, acc1 * result, V, 0, DV)
    else:
        store_rows(dx, n, dx_row, S, acc1 * result, D, 0, D1)
        if D2 > 0:
            store_rows(dx, n, dx_row, S, acc2 * result, D, D1, D2)


@triton.jit
def _gather_queries(
    dq1, dq2, largest, q1, q2, dy, m, start_m, lse_m, delta_m, k, v, kt, k_row, v_row, S4, first, end, S, scale,
    dp_factor, F8: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr, AMAX: tl.constexpr,
):  # fmt: skip
    """Accumulate dq of a block of queries over keys [first, end), and the largest dS of each row. AMAX: only the
    latter."""
    for at in range(first, end, N):
        n = at + tl.arange(0, N)
        p = tl.exp2(_product(q1, q2, k, n, k_row, S, D, D1, D2) * scale - lse_m[:, None])
        if MASKED:
            p = tl.where((n[None, :] >= start_m[:, None]) & (n[None, :] <= m[:, None]), p, 0.0)
        dp = tl.dot(dy, tl.trans(load_rows(v, n, v_row, S, V, 0, DV)))
        ds = p * (dp * dp_factor - delta_m[:, None])
        largest = tl.maximum(largest, tl.max(abs_bits(ds), 1))
        if not AMAX:
            ds8 = to_fp8(ds, F8, 57344.0)
            dq1 = _plus(dq1, ds8, tl.trans(_across(kt, at, S4 * 4, D, 0, D1, N)), FAST)
            if D2 > 0:
                dq2 = _plus(dq2, ds8, tl.trans(_across(kt, at, S4 * 4, D, D1, D2, N)), FAST)
    return dq1, dq2, largest


@triton.jit
def _queries_kernel(
    q, k, v, dout, kt, q_inv, k_inv, v_inv, dout_inv, bounds, lse, delta, scale_row, own, used, amax, dq,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, dout_batch, dout_head, dout_row,
    dq_batch, dq_head, dq_row, S, S4, scale,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FAST: tl.constexpr, AMAX: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries of a head; raise amax. AMAX: write dS's amax into `own` instead, unless its
    scale is known."""
    busy = True
    if AMAX:
        busy = not is_known(scale_row, DELAYED)
    if busy:
        at = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
        b = (tl.program_id(1) // H).to(tl.int64)
        h = tl.program_id(1) % H
        q += b * q_batch + h * q_head
        k += b * k_batch + h * k_head
        v += b * v_batch + h * v_head
        kt += (b * H + h) * D * S4 * 4
        start = bounds + b * S
        m = at + tl.arange(0, M)
        start_m = tl.load(start + m, mask=m < S, other=0)
        first, whole, diagonal, end = keys_of(start, at, S, M, N)
        q1 = load_rows(q, m, q_row, S, D, 0, D1)
        q2 = q1
        if D2 > 0:
            q2 = load_rows(q, m, q_row, S, D, D1, D2)
        dy = load_rows(dout + b * dout_batch + h * dout_head, m, dout_row, S, V, 0, DV)
        logits = scale * 1.4426950408889634 * tl.load(q_inv) * tl.load(k_inv)
        ds_scale = 1.0
        if not AMAX:
            ds_scale = tensor_scale(scale_row, own, LIMIT, HEADROOM, POW2, DELAYED)
        factor = tl.load(dout_inv) * ds_scale  # of dO, and of dS in FP8
        lse_m = tl.load(lse + (b * H + h) * S + m, mask=m < S, other=float("inf")) * 1.4426950408889634
        delta_m = tl.load(delta + (b * H + h) * S + m, mask=m < S, other=0.0) * factor
        dp_factor = factor * tl.load(v_inv)
        dq1 = tl.zeros((M, D1), tl.float32)
        dq2 = tl.zeros((M, D2 if D2 > 0 else 16), tl.float32)
        largest = tl.zeros((M,), tl.int32)
        dq1, dq2, largest = _gather_queries(
            dq1, dq2, largest, q1, q2, dy, m, start_m, lse_m, delta_m, k, v, kt, k_row, v_row, S4, first, whole, S,
            logits, dp_factor, F8, D, V, D1, D2, DV, N, True, FAST, AMAX,
        )  # fmt: skip
        dq1, dq2, largest = _gather_queries(
            dq1, dq2, largest, q1, q2, dy, m, start_m, lse_m, delta_m, k, v, kt, k_row, v_row, S4, whole, diagonal, S,
            logits, dp_factor, F8, D, V, D1, D2, DV, N, False, FAST, AMAX,
        )  # fmt: skip
        dq1, dq2, largest = _gather_queries(
            dq1, dq2, largest, q1, q2, dy, m, start_m, lse_m, delta_m, k, v, kt, k_row, v_row, S4, diagonal, end, S,
            logits, dp_factor, F8, D, V, D1, D2, DV, N, True, FAST, AMAX,
        )  # fmt: skip
        most = tl.max(largest, 0)
        if AMAX:
            tl.atomic_max(own, most, sem="relaxed")
        else:
            if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
                tl.store(used, ds_scale)
            exact = most.to(tl.float32, bitcast=True) * inverse(ds_scale)
            tl.atomic_max(amax, abs_bits(exact), sem="relaxed")
            result = scale * tl.load(k_inv) * inverse(ds_scale)
            dq += b * dq_batch + h * dq_head
            store_rows(dq, m, dq_row, S, dq1 * result, D, 0, D1)
            if D2 > 0:
                store_rows(dq, m, dq_row, S, dq2 * result, D, D1, D2)


def cast_of_scores(fmt: Format, delayed: bool, margin: int, power_of_two: bool) -> Cast:
    """Return how dS is cast: under one scale."""
    return Cast(fmt, const.TENSOR.value, delayed, margin, power_of_two)


def _tiles(name: str) -> dict[str, int]:
    M, N, warps, stages = TILES[name]
    return {"M": M, "N": N, "num_warps": warps, "num_stages": stages}


def transposed(x: Tensor) -> Tensor:
    """Return FP8 x [B, H, S, W] as [B, H, W, S'], contiguous, S' = S rounded up to 128, with zeros."""
    B, H, S, W = x.shape
    xt = torch.empty(B, H, W, padded_rows(S), device=x.device, dtype=x.dtype)
    _transpose_kernel[(cdiv(W, 64), cdiv(S, 128), B * H)](
        as_bytes(x), as_words(xt), *strides(x), S, W, xt.shape[-1] // 4, H=H, BS=128, BW=64
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
    tiles = _tiles("forward")
    vt = transposed(v8)
    _forward_kernel[(cdiv(S, tiles["M"]), B * H)](
        q8, k8, vt, q_inv, k_inv, v_inv, bounds, out, lse, *strides(q8), *strides(k8), *strides(out), S,
        vt.shape[-1] // 4, scale * _LOG2_E, H=H, **head_widths(D, V, LEAST), **tiles, FAST=fast,
    )  # fmt: skip
    return out, lse


def backward(
    dout8: Tensor, dout_inv: Tensor, q8: Tensor, q_inv: Tensor, k8: Tensor, k_inv: Tensor, v8: Tensor, v_inv: Tensor,
    bounds: Tensor, out: Tensor, lse: Tensor, ds_scale: Tensor, ds_amax: Tensor, how: Cast, scale: float, fast: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk [B, H, S, D], dv [B, H, S, V] BF16, in memory [B, S, H, ...], and the scale of dS [1]; raise the
    arena row ds_amax. how: from `cast_of_scores`."""
    (B, H, S, D), V = q8.shape, v8.shape[-1]
    dq, dk, dv = (by_position(out, width) for width in (D, D, V))
    delta, own = torch.empty_like(lse), torch.zeros(1, device=lse.device, dtype=torch.int32)
    used = torch.empty(1, device=lse.device)
    widths = head_widths(D, V, LEAST)
    delta_kernel[(cdiv(S, 64), B * H)](
        out, dout8, delta, *strides(out), *strides(dout8), S, H=H, V=V, DV=widths["DV"], M=64
    )
    inputs, invs = (q8, k8, v8, dout8), (q_inv, k_inv, v_inv, dout_inv, bounds, lse, delta, ds_scale, own, used)
    places = tuple(stride for x in inputs for stride in strides(x))
    lengths = S, padded_rows(S) // 4, scale
    constants = {**how.constants, "H": H, **widths, "FAST": fast}
    for name, of, dx in (("values", dout8, dv), ("keys", q8, dk)):
        tiles = _tiles(name)
        if name == "keys":  # the first that reads dS's scale
            _launch_queries(True, inputs, k8, invs, ds_amax, dq, places, lengths, constants)
        _keys_kernel[(cdiv(S, tiles["N"]), B * H)](
            *inputs, transposed(of), *invs, dx, *places, *strides(dx), *lengths, **constants, **tiles, B=B,
            VALUES=name == "values",
        )  # fmt: skip
    _launch_queries(False, inputs, transposed(k8), invs, ds_amax, dq, places, lengths, constants)
    return dq, dk, dv, used


def _launch_queries(
    amax_only: bool, inputs: tuple, kt: Tensor, invs: tuple, ds_amax: Tensor, dq: Tensor, places: tuple, lengths: tuple,
    constants: dict,
) -> None:  # fmt: skip
    tiles = _tiles("queries")
    B, H, S, _ = dq.shape
    _queries_kernel[(cdiv(S, tiles["M"]), B * H)](
        *inputs, kt, *invs, as_bits(ds_amax), dq, *places, *strides(dq), *lengths, **constants, **tiles, AMAX=amax_only
    )
