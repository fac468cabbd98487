"""Permutation of tokens to their experts' rows and back: the source of each row, the gather, and the weighted sum.

A token that chose K of E experts becomes K rows. Rows are sorted by expert (a stable counting sort), and each expert's
rows start at a multiple of `align`, so that no tile of a grouped GEMM crosses a border; the padding between is zero.
The total number of rows is known on the device only: buffers have R' rows, the largest possible number, and kernels
stop at the last expert's end.

A choice may be none, written as expert E: it makes no row, and its position is -1.

T tokens, P = T K choices, E experts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels import const
from precision.kernels.cast import gathered_scales
from precision.kernels.common import Cast, as_bytes, cdiv, power_of_2

_CHOICES = 256  # choices per program


class Route(NamedTuple):
    """Sources and destinations of rows; all int32 except `weight`.

    token [R']: the token of each row, -1 for padding. weight [R'] FP32: the router's, 0 for padding. position [T, K]:
    the row of each choice, -1 for none. starts, ends [E]: each expert's rows, ends rounded up to `align`. tile_expert
    [R' / 128]: the expert of each 128 rows (only with align = 128).
    """

    token: Tensor
    weight: Tensor
    position: Tensor
    starts: Tensor
    ends: Tensor
    tile_expert: Tensor


@triton.jit
def _count_kernel(expert, counts, P, E, EP: tl.constexpr, SIZE: tl.constexpr):
    b = tl.program_id(0)
    p = b * SIZE + tl.arange(0, SIZE)
    e = tl.arange(0, EP)
    chosen = tl.load(expert + p, mask=p < P, other=EP)
    hot = (chosen[:, None] == e[None, :]).to(tl.int32)
    tl.store(counts + b * E + e, tl.sum(hot, 0), mask=e < E)


@triton.jit
def _scan_kernel(counts, before, total, B, E, BP: tl.constexpr):
    """Scan one expert per program: its choices in the blocks before each block, and in all."""
    e = tl.program_id(0)
    b = tl.arange(0, BP)
    count = tl.load(counts + b * E + e, mask=b < B, other=0)
    tl.store(before + b * E + e, tl.cumsum(count, 0) - count, mask=b < B)
    tl.store(total + e, tl.sum(count, 0))


@triton.jit
def _place_kernel(
    expert, router, before, total, token, weight, position, starts, ends, tile_expert, P, K, E, NT,
    EP: tl.constexpr, SIZE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    p = b * SIZE + tl.arange(0, SIZE)
    e = tl.arange(0, EP)
    padded = (tl.load(total + e, mask=e < E, other=0) + ALIGN - 1) // ALIGN * ALIGN
    end = tl.cumsum(padded, 0)
    chosen = tl.load(expert + p, mask=p < P, other=EP)
    hot = (chosen[:, None] == e[None, :]).to(tl.int32)
    first = tl.load(before + b * E + e, mask=e < E, other=0) + end - padded
    row = tl.sum((tl.cumsum(hot, 0) - hot + first[None, :]) * hot, 1)
    here = chosen < E
    tl.store(position + p, tl.where(here, row, -1), mask=p < P)
    tl.store(token + row, p // K, mask=here)
    tl.store(weight + row, tl.load(router + p, mask=here, other=0.0), mask=here)
    if b == 0:
        tl.store(ends + e, end, mask=e < E)
        tl.store(starts + e, end - padded, mask=e < E)
    t = b * 8 + tl.arange(0, 8)
    inside = tl.where(e < E, end, 0x7FFFFFFF)[None, :] <= (t * 128)[:, None]
    tl.store(tile_expert + t, tl.sum(inside.to(tl.int32), 1), mask=t < NT)


@triton.jit
def _gather_kernel(
    x, y, inv, inv_rows, token, ends, T, C, R, E,
    MODE: tl.constexpr, BLOCKS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) * BR < tl.load(ends + E - 1):
        r = tl.program_id(0) * BR + tl.arange(0, BR)
        t = tl.load(token + r, mask=r < R, other=-1).to(tl.int64)
        c = tl.arange(0, BC)
        v = tl.load(x + t[:, None] * C + c[None, :], mask=(t >= 0)[:, None] & (c < C)[None, :], other=0)
        tl.store(y + r[:, None].to(tl.int64) * C + c[None, :], v, mask=(r < R)[:, None] & (c < C)[None, :])
        if MODE == const.ROW:
            tl.store(inv_rows + r, tl.load(inv + t, mask=t >= 0, other=0.0), mask=r < R)
        if MODE == const.BLOCK:
            for b in tl.static_range(BLOCKS):
                one = tl.load(inv + b * T + t, mask=t >= 0, other=1.0)
                tl.store(inv_rows + b * R + r, one, mask=r < R)


@triton.jit
def _combine_kernel(
    rows, add, out, position, partial, grad_weight, R, C, parts,
    K: tl.constexpr, KP: tl.constexpr, BC: tl.constexpr, PP: tl.constexpr, ADD: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    c = tl.arange(0, BC)
    total = tl.zeros((BC,), tl.float32)
    for k in tl.static_range(K):
        r = tl.load(position + t * K + k).to(tl.int64)
        total += tl.load(rows + r * C + c, mask=(c < C) & (r >= 0), other=0).to(tl.float32)
    i = t.to(tl.int64) * C + c
    if ADD:
        total += tl.load(add + i, mask=c < C, other=0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=c < C)
    if WEIGHTS:
        k = tl.arange(0, KP)
        j = tl.arange(0, PP)
        r = tl.load(position + t * K + k, mask=k < K, other=-1).to(tl.int64)
        one = tl.load(partial + j[None, :] * R + r[:, None], mask=(r >= 0)[:, None] & (j < parts)[None, :], other=0.0)
        tl.store(grad_weight + t * K + k, tl.sum(one, 1), mask=k < K)


def route(expert: Tensor, weight: Tensor, num_experts: int, align: int, choices: int = -1) -> Route:
    """Compute the Route of expert [T, K] int and weight [T, K] FP32. choices: how many are not none; -1: all. No host
    synchronisation."""
    (T, K), E = expert.shape, num_experts
    P, device = T * K, expert.device
    R = ((P if choices < 0 else choices) + E * (align - 1) + 127) // 128 * 128
    blocks = max(cdiv(P, _CHOICES), cdiv(R // 128, 8), 1)

    def ints(*shape: int) -> Tensor:
        return torch.empty(*shape, device=device, dtype=torch.int32)

    counts, before, total = ints(blocks, E), ints(blocks, E), ints(E)
    made = Route(
        torch.full((R,), -1, device=device, dtype=torch.int32),
        torch.zeros(R, device=device),
        ints(T, K),
        ints(E),
        ints(E),
        ints(R // 128),
    )
    EP = power_of_2(E)
    _count_kernel[(blocks,)](expert, counts, P, E, EP, _CHOICES)
    _scan_kernel[(E,)](counts, before, total, blocks, E, power_of_2(blocks), num_warps=1)
    _place_kernel[(blocks,)](
        expert, weight, before, total, made.token, made.weight, made.position, made.starts, made.ends,
        made.tile_expert, P, K, E, R // 128, EP, _CHOICES, align,
    )  # fmt: skip
    return made


def gather(x: Tensor, inv: Tensor | None, to: Route, how: Cast | None) -> tuple[Tensor, Tensor | None]:
    """Gather rows of tokens x [T, C] in the experts' order, [R', C], zero in padding; FP8 with its scales (see
    `cast`)."""
    (T, C), R = x.shape, to.token.shape[0]
    y = torch.empty(R, C, device=x.device, dtype=x.dtype)
    mode = 0 if how is None or inv is None else how.mode
    inv_rows = gathered_scales(inv, R, how) if how is not None and inv is not None else None
    src, dst = (as_bytes(x), as_bytes(y)) if x.element_size() == 1 else (x, y)
    BC = power_of_2(C)
    BR = max(1, 16384 * 2 // x.element_size() // BC)
    _gather_kernel[(cdiv(R, BR),)](
        src, dst, inv if inv is not None else x, inv_rows if inv_rows is not None else x, to.token, to.ends,
        T, C, R, to.ends.shape[0], mode, inv.shape[1] if inv is not None and mode == const.BLOCK.value else 1, BR, BC,
        num_warps=8 if x.element_size() == 2 else 4,
    )  # fmt: skip
    if inv_rows is not None and mode == const.BLOCK.value:
        inv_rows = inv_rows.t()
    return y, inv_rows


def combine(
    rows: Tensor, to: Route, add: Tensor | None = None, partial: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Sum each token's rows [R', C] (and `add` [T, C]) in FP32; return [T, C] in the rows' dtype.

    partial [n, R'] FP32: shares of a number for each row; the second result [T, K] is their sum for each choice.
    """
    (R, C), (T, K) = rows.shape, to.position.shape
    out = torch.empty(T, C, device=rows.device, dtype=rows.dtype)
    weights = torch.empty(T, K, device=rows.device) if partial is not None else None
    parts = partial.shape[0] if partial is not None else 1
    BC = power_of_2(C)
    _combine_kernel[(T,)](
        rows, add if add is not None else rows, out, to.position, partial if partial is not None else rows,
        weights if weights is not None else out, R, C, parts, K, power_of_2(K), BC,
        power_of_2(parts), add is not None, partial is not None, num_warps=min(8, max(1, BC // 512)),
    )  # fmt: skip
    return out, weights
