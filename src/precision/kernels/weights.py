"""Weights: FP32 master -> BF16 -> FP8, with the transposed copy that the input gradient reads; one read of the master.

A stack [G, N, K] has separate scales per group. TENSOR and BLOCK (128 x 128) copies hold the same numbers. ROW scales
rows of w for the forward product and columns for the input gradient (they sum along different axes), which needs a pass
for the amaxes first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels import const
from precision.kernels.common import (
    STRIPS,
    Cast,
    abs_bits,
    as_bf16,
    as_bits,
    as_bytes,
    as_words,
    byte,
    cdiv,
    inverse,
    is_known,
    scale_of,
    settled,
    tensor_scale,
    to_fp8,
    unbyte,
)


@triton.jit
def _load_part(w, g, n4, k, N, K, i: tl.constexpr):
    n = n4 * 4 + i
    at = w + (g * N + n[:, None]) * K + k[None, :]
    return as_bf16(tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0))


@triton.jit
def _bits(w, g, row, column, N, K):
    """Return |w| of a tile of 128 x 128, rounded to BF16, as integers; and its rows and columns."""
    n = row * 128 + tl.arange(0, 128)
    k = column * 128 + tl.arange(0, 128)
    at = w + (g * N + n[:, None]) * K + k[None, :]
    return abs_bits(as_bf16(tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0))), n, k


@triton.jit
def _amax_kernel(w, scale_row, own, N, K, DELAYED: tl.constexpr):
    """TENSOR: write the amax of each group into own[g], unless its scale is known."""
    g = tl.program_id(1).to(tl.int64)
    if not is_known(scale_row + g, DELAYED):
        largest = tl.zeros((128, 128), tl.int32)
        columns = tl.cdiv(K, 128)
        for tile in range(tl.program_id(0), tl.cdiv(N, 128) * columns, tl.num_programs(0)):
            largest = tl.maximum(largest, _bits(w, g, tile // columns, tile % columns, N, K)[0])
        tl.atomic_max(own + g, tl.max(largest), sem="relaxed")


@triton.jit
def _amaxes_kernel(w, by_row, by_column, N, K):
    """ROW: write the amaxes of rows and columns."""
    g = tl.program_id(2).to(tl.int64)
    bits, n, k = _bits(w, g, tl.program_id(0), tl.program_id(1), N, K)
    tl.atomic_max(by_row + g * N + n, tl.max(bits, 1), mask=n < N, sem="relaxed")
    tl.atomic_max(by_column + g * K + k, tl.max(bits, 0), mask=k < K, sem="relaxed")


@triton.jit
def _cast_kernel(
    w, w8, wt, scale_row, own, amax, inv, inv_t, by_row, by_column, N, K,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    MODE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Cast a tile of 128 x 128 in four parts of 32 rows each, so that words of four rows can be transposed."""
    g = tl.program_id(2).to(tl.int64)
    n4 = tl.program_id(0) * 32 + tl.arange(0, 32)
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    v0 = _load_part(w, g, n4, k, N, K, 0)
    v1 = _load_part(w, g, n4, k, N, K, 1)
    v2 = _load_part(w, g, n4, k, N, K, 2)
    v3 = _load_part(w, g, n4, k, N, K, 3)
    largest = tl.maximum(tl.maximum(abs_bits(v0), abs_bits(v1)), tl.maximum(abs_bits(v2), abs_bits(v3)))
    top = tl.max(largest)
    tl.atomic_max(amax + g, top, sem="relaxed")
    if MODE == const.TENSOR:
        scale = tensor_scale(scale_row + g, own + g, LIMIT, HEADROOM, POW2, DELAYED)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(inv + g, inverse(scale))
        s0, s1, s2, s3, st = scale, scale, scale, scale, scale
    elif MODE == const.BLOCK:
        scale = scale_of(top.to(tl.float32, bitcast=True), LIMIT, HEADROOM, POW2)
        at = (g * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
        tl.store(inv + at, inverse(scale))
        at = (g * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        tl.store(inv_t + at, inverse(scale))
        s0, s1, s2, s3, st = scale, scale, scale, scale, scale
    else:
        rows = by_row + g * N + n4 * 4
        s0 = scale_of(tl.load(rows, mask=n4 * 4 < N, other=0).to(tl.float32, bitcast=True), LIMIT, HEADROOM, POW2)
        s1 = scale_of(tl.load(rows + 1, mask=n4 * 4 < N, other=0).to(tl.float32, bitcast=True), LIMIT, HEADROOM, POW2)
        s2 = scale_of(tl.load(rows + 2, mask=n4 * 4 < N, other=0).to(tl.float32, bitcast=True), LIMIT, HEADROOM, POW2)
        s3 = scale_of(tl.load(rows + 3, mask=n4 * 4 < N, other=0).to(tl.float32, bitcast=True), LIMIT, HEADROOM, POW2)
        columns = tl.load(by_column + g * K + k, mask=k < K, other=0).to(tl.float32, bitcast=True)
        st = scale_of(columns, LIMIT, HEADROOM, POW2)
        if tl.program_id(1) == 0:
            to = inv + g * N + n4 * 4
            tl.store(to, inverse(s0), mask=n4 * 4 < N)
            tl.store(to + 1, inverse(s1), mask=n4 * 4 < N)
            tl.store(to + 2, inverse(s2), mask=n4 * 4 < N)
            tl.store(to + 3, inverse(s3), mask=n4 * 4 < N)
        if tl.program_id(0) == 0:
            tl.store(inv_t + g * K + k, inverse(st), mask=k < K)
        s0, s1, s2, s3, st = s0[:, None], s1[:, None], s2[:, None], s3[:, None], st[None, :]
    words = byte(to_fp8(v0 * s0, F8, LIMIT), 0) | byte(to_fp8(v1 * s1, F8, LIMIT), 1)
    words |= byte(to_fp8(v2 * s2, F8, LIMIT), 2) | byte(to_fp8(v3 * s3, F8, LIMIT), 3)
    if TRANSPOSED:
        words = settled(words)
    for i in tl.static_range(4):
        n = n4 * 4 + i
        at = w8 + (g * N + n[:, None]) * K + k[None, :]
        tl.store(at, unbyte(words, i), mask=(n < N)[:, None] & (k < K)[None, :])
    if MODE == const.ROW:
        words = byte(to_fp8(v0 * st, F8, LIMIT), 0) | byte(to_fp8(v1 * st, F8, LIMIT), 1)
        words |= byte(to_fp8(v2 * st, F8, LIMIT), 2) | byte(to_fp8(v3 * st, F8, LIMIT), 3)
        words = settled(words)
    if TRANSPOSED:
        at = wt + (g * K + k[:, None]) * (N // 4) + n4[None, :]
        tl.store(at, tl.trans(words), mask=(k < K)[:, None] & (n4 * 4 < N)[None, :])


@triton.jit
def _transpose_kernel(w8, wt, N, K):
    """Transpose a tile of 128 x 128 bytes, in words of four rows."""
    g = tl.program_id(2).to(tl.int64)
    n4 = tl.program_id(0) * 32 + tl.arange(0, 32)
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    words = tl.zeros((32, 128), tl.int32)
    for i in tl.static_range(4):
        n = n4 * 4 + i
        at = w8 + (g * N + n[:, None]) * K + k[None, :]
        words |= byte(tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0), i)
    at = wt + (g * K + k[:, None]) * (N // 4) + n4[None, :]
    tl.store(at, tl.trans(settled(words)), mask=(k < K)[:, None] & (n4 * 4 < N)[None, :])


def transpose_weight(data: Tensor, out: Tensor | None) -> Tensor:
    """Transpose FP8 [(G,) N, K], N and K multiples of 16, to [(G,) K, N], contiguous, in the memory of `out` if given.

    With TENSOR and BLOCK scales the result equals the transposed copy of `cast_weight`.
    """
    *stack, N, K = data.shape
    out = torch.empty((*stack, K, N), device=data.device, dtype=data.dtype) if out is None else out
    grid = (cdiv(N, 128), cdiv(K, 128), stack[0] if stack else 1)
    _transpose_kernel[grid](as_bytes(data), as_words(out), N, K, num_warps=8)
    return out


def cast_weight(
    master: Tensor,
    scale_row: Tensor,
    amax: Tensor,
    how: Cast,
    out: tuple[Tensor, ...] | None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast master [N, K] or [G, N, K] FP32 or BF16, N and K multiples of 16, in the memory of `out` if given.

    Returns data, inverse scales, the transposed copy [(G,) K, N] and its inverse scales. Not `transposed`: any N, and
    an empty copy. Inverse scales: TENSOR 0-d or [G], the same for both; ROW [(G,) N, 1] and [(G,) 1, K]; BLOCK
    [(G,) N / 128, K / 128] and its transpose.
    """
    # ROW scales of BF16 gave wrong results on an H200, and the other modes are unverified there: so kernels read FP32
    master = master.float()
    *stack, N, K = master.shape
    G, device = stack[0] if stack else 1, master.device
    blocks = cdiv(N, 128), cdiv(K, 128)
    if out is None:
        new = {"device": device, "dtype": torch.float32}
        shapes = {const.ROW.value: ((N, 1), (1, K)), const.BLOCK.value: (blocks, blocks[::-1])}
        shape, shape_t = shapes.get(how.mode, ((), None))
        inv = torch.empty((*stack, *shape), **new)
        inv_t = inv if shape_t is None else torch.empty((*stack, *shape_t), **new)
        w8 = torch.empty(master.shape, device=device, dtype=how.fmt.dtype)
        shape = (*stack, K, N) if transposed else (0,)
        out = w8, inv, torch.empty(shape, device=device, dtype=how.fmt.dtype), inv_t
    w8, inv, wt, inv_t = out
    grid = (*blocks, G)
    rows = columns = own = as_bits(amax)  # not read
    if how.mode == const.TENSOR.value:
        own = torch.zeros(G, device=device, dtype=torch.int32)
        strips = min(blocks[0] * blocks[1], cdiv(STRIPS, G))
        _amax_kernel[(strips, G)](master, scale_row, own, N, K, DELAYED=how.delayed, num_warps=8)
    if how.mode == const.ROW.value:
        amaxes = torch.zeros(G * (N + K), device=device, dtype=torch.int32)
        rows, columns = amaxes[: G * N], amaxes[G * N :]
        _amaxes_kernel[grid](master, rows, columns, N, K, num_warps=8)
    _cast_kernel[grid](
        master, as_bytes(w8), as_words(wt), scale_row, own, as_bits(amax), inv, inv_t, rows, columns, N, K,
        **how.constants, MODE=how.mode, TRANSPOSED=transposed, num_warps=8,
    )  # fmt: skip
    return out
