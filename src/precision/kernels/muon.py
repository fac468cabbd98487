"""Muon's elementwise halves of a step, each in one pass over a weight's part (reference: `trainer.optim.muon`).

    advance     M <- mu M + G           U = mu M + G rounded, where the iteration reads it           14 bytes an element
    apply       W <- W - lr (times O + decay W)        and sums of the squares of what was added     10

With momentum in BF16 advance takes 10 bytes. Matrices are [k, A, B] within a weight, with the weight's row stride. U
and O have the iteration's layout, transposed where A > B: a tile is read along the rows of one and written along the
rows of the other. Where `ok` is false only U and the sums are written.
"""

import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.common import cdiv, round_to

_TILE = 64  # rows and columns of a program
_WARPS = 4


@triton.jit
def _advance_kernel(
    gradient, momentum, out, ok, divisor, mu, rows, columns, apart, width, out_apart, out_row, out_column,
    NESTEROV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Advance one tile of one matrix. apart, width: elements from a matrix, a row to the next; out_...: in out."""
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    matrix = tl.program_id(2).to(tl.int64)
    at = matrix * apart + row.to(tl.int64) * width + column
    g = tl.load(gradient + at, mask=inside, other=0.0) * (1.0 / tl.load(divisor))
    m = mu * tl.load(momentum + at, mask=inside, other=0.0).to(tl.float32) + g
    tl.store(momentum + at, round_to(m, momentum.dtype.element_ty), mask=inside & tl.load(ok))
    if NESTEROV:
        m = mu * m + g
    to = out + matrix * out_apart + row.to(tl.int64) * out_row + column.to(tl.int64) * out_column
    tl.store(to, round_to(m, out.dtype.element_ty), mask=inside)


@triton.jit
def _apply_kernel(
    weight, update, sums, ok, lr, times, decay, rows, columns, apart, width, from_apart, from_row, from_column,
    TILE: tl.constexpr,
):  # fmt: skip
    """Update one tile of one matrix, and write the sum of squares of its change, 0 where there was none."""
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    matrix = tl.program_id(2).to(tl.int64)
    at = matrix * apart + row.to(tl.int64) * width + column
    o = tl.load(
        update + matrix * from_apart + row.to(tl.int64) * from_row + column.to(tl.int64) * from_column,
        mask=inside, other=0.0,
    )  # fmt: skip
    w = tl.load(weight + at, mask=inside, other=0.0)
    change = (times * o.to(tl.float32) + decay * w) * tl.load(lr)
    go = tl.load(ok)
    tl.store(weight + at, w - change, mask=inside & go)
    program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums + program, tl.where(go, tl.sum(change * change), 0.0))


def programs(matrices: Tensor) -> int:
    """Return the number of sums that `apply` writes for matrices [k, A, B]."""
    k, rows, columns = matrices.shape
    return k * cdiv(rows, _TILE) * cdiv(columns, _TILE)


def advance(
    gradient: Tensor, momentum: Tensor, out: Tensor, ok: Tensor, divisor: Tensor, mu: float, nesterov: bool
) -> None:
    """Advance the momentum and write U to `out`; see the module docstring. Does not synchronise.

    gradient FP32 and momentum [k, A, B], of one layout, with rows of adjacent elements; out [k, A, B], any strides and
    format. ok bool, divisor of the gradient FP32: 0-d.
    """
    k, rows, columns = gradient.shape
    assert gradient.stride() == momentum.stride() and (gradient.stride(2) == 1 or columns == 1)
    _advance_kernel[(cdiv(columns, _TILE), cdiv(rows, _TILE), k)](
        gradient, momentum, out, ok, divisor, mu, rows, columns, gradient.stride(0), gradient.stride(1), *out.stride(),
        nesterov, _TILE, num_warps=_WARPS,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip


def apply(weight: Tensor, update: Tensor, sums: Tensor, ok: Tensor, lr: Tensor, times: float, decay: float) -> None:
    """Update the weight; see the module docstring. Does not synchronise.

    weight FP32 [k, A, B], rows of adjacent elements; update [k, A, B], any strides and format; sums [programs] FP32. ok
    bool, lr FP32: 0-d.
    """
    k, rows, columns = weight.shape
    assert weight.stride(2) == 1 or columns == 1
    _apply_kernel[(cdiv(columns, _TILE), cdiv(rows, _TILE), k)](
        weight, update, sums, ok, lr, times, decay, rows, columns, weight.stride(0), weight.stride(1),
        *update.stride(), _TILE, num_warps=_WARPS,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
