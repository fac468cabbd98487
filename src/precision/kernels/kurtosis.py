"""Kurtosis of rows, added up in one pass and one launch. `precision.kurtosis` has the definition and the reference.

There is one program per row. Sums over features are FP32, those over rows FP64 by atomics: their order is not
deterministic, and with it the last of 53 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.common import readable

_COLUMNS = 1024


@triton.jit
def _kurtosis_kernel(x, live, sums, X, stride, LIVE: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the kurtosis of one row of x [R, X], columns adjacent; live [R]."""
    r = tl.program_id(0)
    second = tl.zeros((COLUMNS,), tl.float32)
    fourth = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, X, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        v = tl.load(x + r.to(tl.int64) * stride + c, mask=c < X, other=0).to(tl.float32)
        square = v * v
        second += square
        fourth += square * square
    two, four = tl.sum(second).to(tl.float64), tl.sum(fourth).to(tl.float64)
    counts = four != 0
    if LIVE:
        counts = counts & (tl.load(live + r) >= 0)
    tl.atomic_add(sums, tl.where(counts, four * X / (two * two), 0.0), sem="relaxed")
    tl.atomic_add(sums + 1, counts.to(tl.float64), sem="relaxed")


@torch.no_grad()
def add_kurtosis(sums: Tensor, x: Tensor, live: Tensor | None = None) -> None:
    """Add to sums [2] FP64 the kurtosis of rows x [R, X], and their number. Rows of zeros do not count, nor those with
    live [R] int32 below 0. Rows may have any stride."""
    x = readable(x)
    if len(x):
        _kurtosis_kernel[(len(x),)](
            x, x if live is None else live.contiguous(), sums, x.shape[1], x.stride(0), live is not None, _COLUMNS,
            num_warps=4,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
