"""Tiles of attention's kernels: rows of q, k, v; ranges of keys within documents; rowsum(out dout). See
`document_attention`, which has the legend."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.common import power_of_2


@triton.jit
def load_rows(base, row, stride, S, WIDTH: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Load rows `row` of a matrix [S, WIDTH], columns from FIRST on; zeros outside."""
    column = FIRST + tl.arange(0, COUNT)
    inside = (row < S)[:, None]
    if FIRST + COUNT > WIDTH:
        inside = inside & (column < WIDTH)[None, :]
    return tl.load(base + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, row, stride, S, x, WIDTH: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Store x [rows, COUNT] there."""
    column = FIRST + tl.arange(0, COUNT)
    inside = (row < S)[:, None]
    if FIRST + COUNT > WIDTH:
        inside = inside & (column < WIDTH)[None, :]
    tl.store(base + row.to(tl.int64)[:, None] * stride + column[None, :], x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def keys_of(start, at, S, M: tl.constexpr, N: tl.constexpr):
    """Return the ranges of keys for queries [at, at + M): seen from `first` on; by all queries from `whole` on; no
    longer by all from `diagonal` on; up to `end`. Multiples of N except the last."""
    first = tl.load(start + at) // N * N
    last = tl.load(start + tl.minimum(at + M, S) - 1)
    diagonal = at // N * N
    whole = tl.maximum(tl.minimum((last + N - 1) // N * N, diagonal), first)
    return first, whole, diagonal, tl.minimum(at + M, S)


@triton.jit
def delta_kernel(
    out, dout, delta, out_batch, out_head, out_row, dout_batch, dout_head, dout_row, S,
    H: tl.constexpr, V: tl.constexpr, DV: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute sum(out dout) of a block of rows, FP32 [B, H, S]."""
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    m = tl.program_id(0) * M + tl.arange(0, M)
    x = load_rows(out + b * out_batch + h * out_head, m, out_row, S, V, 0, DV).to(tl.float32)
    y = load_rows(dout + b * dout_batch + h * dout_head, m, dout_row, S, V, 0, DV).to(tl.float32)
    tl.store(delta + (b * H + h) * S + m, tl.sum(x * y, 1), mask=m < S)


def head_widths(D: int, V: int, least: int = 16) -> dict[str, int]:
    """Split D into a power of two and the rest, and round V up to a power of two; tiles have `least` columns or
    more."""
    whole = max(least, 1 << (D.bit_length() - 1))
    rest = max(0, D - whole)
    rest = max(least, power_of_2(rest)) if rest else 0
    return {"D": D, "V": V, "D1": whole, "D2": rest, "DV": max(least, power_of_2(V))}


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, head and row."""
    assert x.stride(3) == 1
    return x.stride(0), x.stride(1), x.stride(2)


def by_position(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate [B, H, S, width], in memory [B, S, H, width]. dtype: None is that of `like`."""
    B, H, S, _ = like.shape
    return like.new_empty(B, S, H, width, dtype=dtype).transpose(1, 2)
