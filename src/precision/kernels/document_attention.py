"""Causal attention within documents: softmax(scale Q K^T) V where position i sees start(i) <= j <= i.

Documents follow one another, so a block of queries sees one range of keys, and a block of keys is seen by one range of
queries. Both ranges follow from two numbers per position, `bounds` [2, B, S] int32: the first position of its document,
and the one after its last. Neither decreases along a sequence, so the first row of a block has the least and the last
row the largest. There is no list of documents and no number of them: shapes never change, and the host knows nothing.

    keys          lo = start(first row) ........ start(last row) ........ first row .... last row
                  | some rows see them: masked   | whole blocks: no mask  | diagonal: masked |

Blocks outside are not read. For documents much shorter than the sequence that is most of them.

Forward (FlashAttention-2, arXiv 2307.08691): a program owns M queries of a head, iterates over blocks of N keys with a
running maximum and sum, and writes the log-sum-exp of each row, to base 2:

    s = scale log2(e) q k^T      top' = max(top, s)      total = total 2^(top - top') + sum 2^(s - top')
    out = sum 2^(s - top) v / total                      lse = top + log2(total)

Backward: with p = 2^(s - lse) and delta = sum(out dout),

    dv = p^T dout        ds = p (dout v^T - delta)        dq = scale ds k        dk = scale ds^T q

in two kernels: one owns keys and iterates over queries (dk, dv), one owns queries and iterates over keys (dq). p is
computed twice; no memory is summed by several programs, so results are deterministic.

Tiles of the tensor cores need powers of two, and MLA's d_qk is 192: it is computed as 128 + 64, not padded to 256.

Legend: B batch, H heads, S sequence, M rows of a block of queries, N of keys, D head size of queries and keys, V of
values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.attention_tiles import (
    by_position,
    delta_kernel,
    head_widths,
    keys_of,
    load_rows,
    store_rows,
    strides,
)
from precision.kernels.common import cdiv

_LOG2_E = 1.4426950408889634
LARGEST = 256  # head size
SHARED_MEMORY = 200 * 1024  # largest shared memory of a block of threads, in bytes


@triton.jit
def _attend(
    acc, total, top, q1, q2, m, start_m, k, v, k_row, v_row, first, end, S, scale,
    D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Forward over keys [first, end)."""
    for at in range(first, end, N):
        n = at + tl.arange(0, N)
        s = tl.dot(q1, tl.trans(load_rows(k, n, k_row, S, D, 0, D1)))
        if D2 > 0:
            s = tl.dot(q2, tl.trans(load_rows(k, n, k_row, S, D, D1, D2)), s)
        s = s * scale
        if MASKED:
            s = tl.where((n[None, :] >= start_m[:, None]) & (n[None, :] <= m[:, None]), s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        values = load_rows(v, n, v_row, S, V, 0, DV)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None])
        top = higher
    return acc, total, top


@triton.jit
def _forward_kernel(
    q, k, v, bounds, out, lse, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, S, scale,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute a block of queries of a head: out, lse [B, H, S]. scale: with log2(e)."""
    at = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest ranges first
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    out += b * out_batch + h * out_head
    lse += (b * H + h) * S
    start = bounds + b * S
    m = at + tl.arange(0, M)
    start_m = tl.load(start + m, mask=m < S, other=0)
    first, whole, diagonal, end = keys_of(start, at, S, M, N)
    q1 = load_rows(q, m, q_row, S, D, 0, D1)
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q, m, q_row, S, D, D1, D2)
    acc = tl.zeros((M, DV), tl.float32)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), -1.0e38, tl.float32)  # finite, so that a block without a visible key adds nothing
    acc, total, top = _attend(
        acc, total, top, q1, q2, m, start_m, k, v, k_row, v_row, first, whole, S, scale, D, V, D1, D2, DV, N, True
    )
    acc, total, top = _attend(
        acc, total, top, q1, q2, m, start_m, k, v, k_row, v_row, whole, diagonal, S, scale, D, V, D1, D2, DV, N, False
    )
    acc, total, top = _attend(
        acc, total, top, q1, q2, m, start_m, k, v, k_row, v_row, diagonal, end, S, scale, D, V, D1, D2, DV, N, True
    )
    store_rows(out, m, out_row, S, acc / total[:, None], V, 0, DV)
    tl.store(lse + m, top + tl.log2(total), mask=m < S)


@triton.jit
def _gather_keys(
    dk1, dk2, dv, k1, k2, values, n, end_n, q, dout, lse, delta, q_row, dout_row, first, end, S, scale,
    D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, M: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate dk and dv of a block of keys over queries [first, end)."""
    for at in range(first, end, M):
        m = at + tl.arange(0, M)
        q1 = load_rows(q, m, q_row, S, D, 0, D1)
        s = tl.dot(k1, tl.trans(q1))
        q2 = q1
        if D2 > 0:
            q2 = load_rows(q, m, q_row, S, D, D1, D2)
            s = tl.dot(k2, tl.trans(q2), s)
        p = tl.exp2(s * scale - tl.load(lse + m, mask=m < S, other=float("inf"))[None, :])
        if MASKED:
            p = tl.where((m[None, :] >= n[:, None]) & (m[None, :] < end_n[:, None]), p, 0.0)
        dy = load_rows(dout, m, dout_row, S, V, 0, DV)
        dv = tl.dot(p.to(dy.dtype), dy, dv)
        dp = tl.dot(values, tl.trans(dy))
        ds = (p * (dp - tl.load(delta + m, mask=m < S, other=0.0)[None, :])).to(q1.dtype)
        dk1 = tl.dot(ds, q1, dk1)
        if D2 > 0:
            dk2 = tl.dot(ds, q2, dk2)
    return dk1, dk2, dv


@triton.jit
def _keys_kernel(
    q, k, v, bounds, dout, lse, delta, dk, dv, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, S, scale, scale_log2,
    B: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute dk, dv of a block of keys of a head."""
    at = tl.program_id(0) * N
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    dout += b * dout_batch + h * dout_head
    lse += (b * H + h) * S
    delta += (b * H + h) * S
    behind = bounds + (B + b) * S
    n = at + tl.arange(0, N)
    end_n = tl.load(behind + n, mask=n < S, other=0)
    until = tl.load(behind + tl.minimum(at + N, S) - 1)
    diagonal = (at + N + M - 1) // M * M  # queries from here on see all of these keys, if of their document
    whole = tl.maximum(tl.load(behind + at) // M * M, diagonal)
    k1 = load_rows(k, n, k_row, S, D, 0, D1)
    k2 = k1
    if D2 > 0:
        k2 = load_rows(k, n, k_row, S, D, D1, D2)
    values = load_rows(v, n, v_row, S, V, 0, DV)
    dk1 = tl.zeros((N, D1), tl.float32)
    dk2 = tl.zeros((N, D2 if D2 > 0 else 16), tl.float32)
    dvs = tl.zeros((N, DV), tl.float32)
    dk1, dk2, dvs = _gather_keys(
        dk1, dk2, dvs, k1, k2, values, n, end_n, q, dout, lse, delta, q_row, dout_row, at // M * M, diagonal, S,
        scale_log2, D, V, D1, D2, DV, M, True,
    )  # fmt: skip
    dk1, dk2, dvs = _gather_keys(
        dk1, dk2, dvs, k1, k2, values, n, end_n, q, dout, lse, delta, q_row, dout_row, diagonal, whole, S, scale_log2,
        D, V, D1, D2, DV, M, False,
    )  # fmt: skip
    dk1, dk2, dvs = _gather_keys(
        dk1, dk2, dvs, k1, k2, values, n, end_n, q, dout, lse, delta, q_row, dout_row, whole, until, S, scale_log2, D,
        V, D1, D2, DV, M, True,
    )  # fmt: skip
    dk += b * dk_batch + h * dk_head
    store_rows(dk, n, dk_row, S, dk1 * scale, D, 0, D1)
    if D2 > 0:
        store_rows(dk, n, dk_row, S, dk2 * scale, D, D1, D2)
    store_rows(dv + b * dv_batch + h * dv_head, n, dv_row, S, dvs, V, 0, DV)


@triton.jit
def _gather_queries(
    dq1, dq2, q1, q2, dy, m, start_m, lse_m, delta_m, k, v, k_row, v_row, first, end, S, scale,
    D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate dq of a block of queries over keys [first, end)."""
    for at in range(first, end, N):
        n = at + tl.arange(0, N)
        k1 = load_rows(k, n, k_row, S, D, 0, D1)
        s = tl.dot(q1, tl.trans(k1))
        k2 = k1
        if D2 > 0:
            k2 = load_rows(k, n, k_row, S, D, D1, D2)
            s = tl.dot(q2, tl.trans(k2), s)
        p = tl.exp2(s * scale - lse_m[:, None])
        if MASKED:
            p = tl.where((n[None, :] >= start_m[:, None]) & (n[None, :] <= m[:, None]), p, 0.0)
        dp = tl.dot(dy, tl.trans(load_rows(v, n, v_row, S, V, 0, DV)))
        ds = (p * (dp - delta_m[:, None])).to(k1.dtype)
        dq1 = tl.dot(ds, k1, dq1)
        if D2 > 0:
            dq2 = tl.dot(ds, k2, dq2)
    return dq1, dq2


@triton.jit
def _queries_kernel(
    q, k, v, bounds, dout, lse, delta, dq, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, dq_batch, dq_head, dq_row, S, scale, scale_log2,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries of a head."""
    at = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    start = bounds + b * S
    m = at + tl.arange(0, M)
    start_m = tl.load(start + m, mask=m < S, other=0)
    first, whole, diagonal, end = keys_of(start, at, S, M, N)
    q1 = load_rows(q, m, q_row, S, D, 0, D1)
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q, m, q_row, S, D, D1, D2)
    dy = load_rows(dout + b * dout_batch + h * dout_head, m, dout_row, S, V, 0, DV)
    lse_m = tl.load(lse + (b * H + h) * S + m, mask=m < S, other=float("inf"))
    delta_m = tl.load(delta + (b * H + h) * S + m, mask=m < S, other=0.0)
    dq1 = tl.zeros((M, D1), tl.float32)
    dq2 = tl.zeros((M, D2 if D2 > 0 else 16), tl.float32)
    dq1, dq2 = _gather_queries(
        dq1, dq2, q1, q2, dy, m, start_m, lse_m, delta_m, k, v, k_row, v_row, first, whole, S, scale_log2, D, V, D1,
        D2, DV, N, True,
    )  # fmt: skip
    dq1, dq2 = _gather_queries(
        dq1, dq2, q1, q2, dy, m, start_m, lse_m, delta_m, k, v, k_row, v_row, whole, diagonal, S, scale_log2, D, V,
        D1, D2, DV, N, False,
    )  # fmt: skip
    dq1, dq2 = _gather_queries(
        dq1, dq2, q1, q2, dy, m, start_m, lse_m, delta_m, k, v, k_row, v_row, diagonal, end, S, scale_log2, D, V, D1,
        D2, DV, N, True,
    )  # fmt: skip
    dq += b * dq_batch + h * dq_head
    store_rows(dq, m, dq_row, S, dq1 * scale, D, 0, D1)
    if D2 > 0:
        store_rows(dq, m, dq_row, S, dq2 * scale, D, D1, D2)


TILES = {"forward": (128, 64, 8, 3), "keys": (64, 64, 8, 2), "queries": (128, 64, 8, 2)}
"""M, N, warps, stages of each kernel: on Hopper no registers are spilled."""
WIDE_TILES = {"forward": (128, 64, 8, 2), "keys": (32, 64, 8, 2), "queries": (64, 64, 8, 2)}
"""The same for head sizes above 192."""


def _tiles(name: str, width: int) -> dict[str, int]:
    M, N, warps, stages = (TILES if width <= 192 else WIDE_TILES)[name]
    return {"M": M, "N": N, "num_warps": warps, "num_stages": stages}


def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute q, k [B, H, S, D], v [B, H, S, V] within bounds [2, B, S] int32, contiguous; return out [B, H, S, V] (in
    memory [B, S, H, V]) and lse [B, H, S] FP32, to base 2. Last dimensions must be contiguous."""
    (B, H, S, D), V = q.shape, v.shape[-1]
    out, lse = by_position(q, V), torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    tiles = _tiles("forward", max(D, V))
    _forward_kernel[(cdiv(S, tiles["M"]), B * H)](
        q, k, v, bounds, out, lse, *strides(q), *strides(k), *strides(v), *strides(out), S, scale * _LOG2_E,
        H=H, **head_widths(D, V), **tiles,
    )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk [B, H, S, D], dv [B, H, S, V], in memory [B, S, H, ...]."""
    (B, H, S, D), V = q.shape, v.shape[-1]
    dq, dk, dv = by_position(q, D), by_position(q, D), by_position(q, V)
    delta, widths, scales = torch.empty_like(lse), head_widths(D, V), (S, scale, scale * _LOG2_E)
    inputs = (*strides(q), *strides(k), *strides(v), *strides(dout))
    delta_kernel[(cdiv(S, 64), B * H)](
        out, dout, delta, *strides(out), *strides(dout), S, H=H, V=V, DV=widths["DV"], M=64
    )
    tiles = _tiles("keys", max(D, V))
    _keys_kernel[(cdiv(S, tiles["N"]), B * H)](
        q, k, v, bounds, dout, lse, delta, dk, dv, *inputs, *strides(dk), *strides(dv), *scales,
        B=B, H=H, **widths, **tiles,
    )  # fmt: skip
    tiles = _tiles("queries", max(D, V))
    _queries_kernel[(cdiv(S, tiles["M"]), B * H)](
        q, k, v, bounds, dout, lse, delta, dq, *inputs, *strides(dq), *scales, H=H, **widths, **tiles
    )
    return dq, dk, dv
