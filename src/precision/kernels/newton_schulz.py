"""The products of a Newton-Schulz iteration (`trainer.optim.orthogonalise`), in BF16 with sums in FP32.

For matrices X [m, n], m <= n, with factors f (1 except in the first step), one step is

    S = f^2 X X^T                symmetric: only tiles on and below the diagonal are computed, the others mirrored
    B = b S + c S S              symmetric, too, because S is
    X = f (a X + B X)

3 m^2 n + m^3 multiplications and additions instead of 4 m^2 n + 2 m^3, and no pass besides the products:
`torch.baddbmm` copies the matrix that is added. f divides by the norm; the first products apply it, so X is read
unscaled.

On Hopper, `hopper_triangle` handles matrices of whole tiles. The kernel here serves other GPUs, other shapes and
Triton's interpreter. A program visits tiles with a constant stride; `tile_table` lists them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from precision.hardware import HOPPER
from precision.kernels import const
from precision.kernels.common import multiprocessors, round_to

FEWEST_ROWS = 256
"""Minimum number of rows: smaller matrices are a tile or two high, and a triangle of these is nearly all of them."""


@dataclass(frozen=True)
class Cut:
    """How `_product_kernel` divides the work: tiles of rows x columns, and the length of the sum per step."""

    rows: int = 128
    columns: int = 128
    deep: int = 64
    stages: int = 4
    warps: int = 8


@triton.jit(do_not_specialize=["tiles", "each"])
def _product_kernel(
    a, b, added, c, mirrored, factors, alpha, beta, table, tiles, each, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SYMMETRIC: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """c = factor (alpha a b + beta added); SYMMETRIC: a b^T. mirrored: c in transposed tiles. tiles: of all matrices;
    each: of one."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        e = tile // each
        packed = tl.load(table + tile % each)
        i = packed & 0xFFFF
        j = packed >> 16
        m = i * BM
        n = j * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            x = a.load([e, m, k]).reshape(BM, BK)
            if SYMMETRIC:
                acc = tl.dot(x, b.load([e, n, k]).reshape(BN, BK).T, acc)
            else:
                acc = tl.dot(x, b.load([e, k, n]).reshape(BK, BN), acc)
        f = tl.load(factors + e)
        acc = acc * (alpha * f)
        if ADDS:
            acc += added.load([e, m, n]).reshape(BM, BN).to(tl.float32) * (beta * f)
        value = round_to(acc, tl.bfloat16)
        c.store([e, m, n], value.reshape(1, BM, BN))
        if SYMMETRIC:
            if m >= n + BN:  # a tile on the diagonal contains its own mirror image, with those beside it
                mirrored.store([e, n, m], value.T.reshape(1, BN, BM))


@cache
def tile_table(rows: int, columns: int, height: int, width: int, symmetric: bool, device: torch.device) -> Tensor:
    """Return the tiles of one matrix, int32: number among the rows + 2^16 times that among the columns; for a symmetric
    one those on or below the diagonal."""
    tall, wide = -(-rows // height), -(-columns // width)
    found = [i + (j << 16) for i in range(tall) for j in range(wide) if not symmetric or (i + 1) * height > j * width]
    return torch.tensor(found, dtype=torch.int32, device=device)


def product(
    a: Tensor, b: Tensor, out: Tensor, added: Tensor | None, factors: Tensor, alpha: float, beta: float,
    symmetric: bool, cut: Cut | None = None,
) -> None:  # fmt: skip
    """Compute out = factors (alpha a b + beta added); symmetric: a b^T instead of a b, computed for one triangle only.

    a [k, m, K], b [k, K, n] (symmetric: [k, m, K], and n = m), out and added [k, m, n]: BF16, contiguous. factors [k]
    FP32. cut: forces the kernel in this file, with this division, on any GPU and shape.
    """
    (E, M, N), K, device = out.shape, a.shape[2], out.device
    if cut is None and serves_hopper(device) and M % 128 == K % 128 == 0 and (symmetric or N % 256 == 0):
        from precision.kernels import hopper_triangle

        table = tile_table(M, N, 128, 256, symmetric, device)
        programs = min(multiprocessors(device), E * len(table))
        hopper_triangle.product(a, b, out, added, factors, alpha, beta, table, symmetric, programs)
        return
    cut = cut or Cut()
    table = tile_table(M, N, cut.rows, cut.columns, symmetric, device)
    grid = min(multiprocessors(device), E * len(table))
    right = [1, cut.columns, cut.deep] if symmetric else [1, cut.deep, cut.columns]
    whole = TensorDescriptor.from_tensor(out, [1, cut.rows, cut.columns])
    _product_kernel[(grid,)](
        TensorDescriptor.from_tensor(a, [1, cut.rows, cut.deep]), TensorDescriptor.from_tensor(b, right),
        whole if added is None else TensorDescriptor.from_tensor(added, [1, cut.rows, cut.columns]), whole,
        TensorDescriptor.from_tensor(out, [1, cut.columns, cut.rows]) if symmetric else whole,
        factors, alpha, beta, table, E * len(table), len(table), K, cut.rows, cut.columns, cut.deep, symmetric,
        added is not None, num_stages=cut.stages, num_warps=cut.warps,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip


def iterate(
    x: Tensor, factors: Tensor, triples: Sequence[tuple[float, float, float]], cut: Cut | None = None
) -> Tensor:
    """Run the iteration with these (a, b, c), from factors x; return [k, m, n] BF16.

    x [k, m, n] BF16, m <= n, contiguous; it may be overwritten. factors [k] FP32.
    """
    k, m, n = x.shape
    s, polynomial = x.new_empty(k, m, m), x.new_empty(k, m, m)
    y, one = torch.empty_like(x), torch.ones_like(factors)
    square = factors * factors
    for a, b, c in triples:
        product(x, x, s, None, square, 1.0, 0.0, True, cut)
        product(s, s, polynomial, s, one, c, b, True, cut)
        product(polynomial, x, y, x, factors, 1.0, a, False, cut)
        x, y, factors, square = y, x, one, one
    return x


def is_faster(m: int, n: int, device: torch.device) -> bool:
    """Return whether `iterate` was measured to be faster than torch.baddbmm for matrices [m, n]
    (scripts/bench/muon.py)."""
    return serves_hopper(device) and m % 128 == 0 and n % 256 == 0 and m >= FEWEST_ROWS


def serves_hopper(device: torch.device) -> bool:
    """Return whether `hopper_triangle` runs here."""
    return not const.INTERPRETED and torch.cuda.get_device_capability(device) == HOPPER
