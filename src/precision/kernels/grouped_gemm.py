"""GEMMs over rows sorted by expert: persistent, with loads by the tensor memory accelerator. On Hopper: `hopper_gemm`.

    nt      y[r, n]    = sum over k of a[r, k] b[e(r), n, k]            forward and input gradient
    wgrad   d[e, m, n] = sum over e's rows r of a[m, r] b[n, r]         weight gradient, of transposed operands

Both factors are contiguous along the sum, as Hopper's FP8 tensor cores require. Rows of an expert start at multiples of
128, so no tile crosses a border, and offsets stay on the device. The tensor cores sum FP8 products over 128 of the sum,
and these partial sums are added in FP32; with `fast` the tensor cores sum over the whole length in their own precision,
about 14 bits (`precision.accumulation`). BLOCK scales need partial sums anyway.

Scales, by MODE: TENSOR one for a, one an expert for b; ROW one a row of a and a column of y; BLOCK 1 x 128 of a with
128 x 128 of b (nt), 128 x 1 of both (wgrad); PLAIN none: BF16.

The kernels here serve Triton's interpreter, which cannot run those of `hopper_gemm`, and rows and weight gradients
whose height is not a multiple of the tile's.

One program per multiprocessor visits tiles with a constant stride: none is launched again, and loads never pause. More
and shorter programs were no faster, not even beside messages to other ranks (docs/benchmarks.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from precision.kernels import const, hopper_gemm
from precision.kernels.common import multiprocessors, round_to
from precision.kernels.route import Route

_grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


@triton.jit
def _nt_kernel(
    a, b, c, scale_a, scale_b, tile_expert, ends, R,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GRID: tl.constexpr, MODE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    m_tiles = tl.load(ends + E - 1) // 128
    N_TILES: tl.constexpr = (N + 127) // 128
    K_BLOCKS: tl.constexpr = (K + 127) // 128
    for tile in tl.range(tl.program_id(0), m_tiles * N_TILES, GRID):
        m = tile // N_TILES
        n = tile % N_TILES
        e = tl.load(tile_expert + m)
        acc = tl.zeros((128, 128), tl.float32)
        r = m * 128 + tl.arange(0, 128)
        for k in range(K_BLOCKS):
            x = a.load([m * 128, k * 128])
            y = b.load([e * N + n * 128, k * 128])
            if MODE == const.BLOCK:
                rows = tl.load(scale_a + k * R + r, mask=r < R, other=1.0)
                acc += tl.dot(x, y.T) * (rows * tl.load(scale_b + (e * N_TILES + n) * K_BLOCKS + k))[:, None]
            elif FAST:
                acc = tl.dot(x, y.T, acc)
            else:
                acc += tl.dot(x, y.T)
        if MODE == const.TENSOR:
            acc *= tl.load(scale_a) * tl.load(scale_b + e)
        if MODE == const.ROW:
            col = n * 128 + tl.arange(0, 128)
            rows = tl.load(scale_a + r, mask=r < R, other=1.0)
            acc = acc * rows[:, None] * tl.load(scale_b + e * N + col, mask=col < N, other=1.0)[None, :]
        c.store([m * 128, n * 128], acc.to(tl.bfloat16))


@triton.jit
def _wgrad_kernel(
    a, b, d, scale_a, scale_b, starts, ends,
    E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, GRID: tl.constexpr, MODE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    M_TILES: tl.constexpr = (M + 127) // 128
    N_TILES: tl.constexpr = (N + 127) // 128
    for tile in tl.range(tl.program_id(0), E * M_TILES * N_TILES, GRID):
        e = tile // (M_TILES * N_TILES)
        m = tile % (M_TILES * N_TILES) // N_TILES
        n = tile % N_TILES
        first = tl.load(starts + e)
        steps = (tl.load(ends + e) - first) // BK
        acc = tl.zeros((128, 128), tl.float32)
        row = m * 128 + tl.arange(0, 128)
        col = n * 128 + tl.arange(0, 128)
        for k in range(steps):
            if MODE == const.PLAIN:
                x = a.load([first + k * BK, m * 128])
                y = b.load([first + k * BK, n * 128])
                acc = tl.dot(x.T, y, acc)
            else:
                x = a.load([m * 128, first + k * BK])
                y = b.load([n * 128, first + k * BK])
                if MODE == const.BLOCK:
                    block = (first // BK + k).to(tl.int64)
                    left = tl.load(scale_a + block * M + row, mask=row < M, other=1.0)
                    right = tl.load(scale_b + block * N + col, mask=col < N, other=1.0)
                    acc += tl.dot(x, y.T) * left[:, None] * right[None, :]
                elif FAST:
                    acc = tl.dot(x, y.T, acc)
                else:
                    acc += tl.dot(x, y.T)
        if MODE == const.TENSOR or MODE == const.ROW:
            acc *= tl.load(scale_a) * tl.load(scale_b)
        at = d + (e * M + row[:, None]).to(tl.int64) * N + col[None, :]
        tl.store(at, round_to(acc, d.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])


def nt(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, mode: int, to: Route, fast: bool = False) -> Tensor:
    """Multiply a [R, K] FP8 by b [E, N, K] FP8, contiguous; return [R, N] BF16.

    scale_a, scale_b are inverse scales: TENSOR 0-d and [E]; ROW [R, 1] and [E, N] in any shape; BLOCK
    [R, K / 128] (stored [K / 128, R]) and [E, N / 128, K / 128].
    """
    (E, N, K), R = b.shape, a.shape[0]
    grid = multiprocessors(a.device)
    if not const.INTERPRETED and R and R % 128 == 0:
        return hopper_gemm.nt(a, scale_a, b, scale_b, mode, to, grid, fast)
    y = torch.empty(R, N, device=a.device, dtype=torch.bfloat16)
    if R == 0:
        return y
    _nt_kernel[(grid,)](
        TensorDescriptor.from_tensor(a, [128, 128]),
        TensorDescriptor.from_tensor(b.view(E * N, K), [128, 128]),
        TensorDescriptor.from_tensor(y, [128, 128]),
        scale_a, scale_b, to.tile_expert, to.ends, R, E, N, K, grid, mode, fast, num_stages=4, num_warps=8,
    )  # fmt: skip
    return y


def nt_bf16(a: Tensor, b: Tensor, to: Route) -> Tensor:
    """Multiply a [R, K] by b [E, N, K] BF16, contiguous as it is or transposed; return [R, N] BF16."""
    (_, N, K), R = b.shape, a.shape[0]
    if const.INTERPRETED or not R or R % 128 or N % 8 or K % (8 if b.is_contiguous() else 64):
        return _grouped_mm(a, b.mT, offs=to.ends)
    return hopper_gemm.nt(a, a, b, b, const.PLAIN.value, to, multiprocessors(a.device), False)


def wgrad(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, mode: int, to: Route, out: torch.dtype = torch.float32,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply a [M, R'] FP8 by b [N, R'] FP8; return [E, M, N] in `out`, FP32 or BF16 (rounded once). Inverse scales:
    0-d (TENSOR, ROW), or [R' / 128, M] and [R' / 128, N] (BLOCK). PLAIN: see `wgrad_bf16`."""
    plain = mode == const.PLAIN.value
    M, N, E = a.shape[plain], b.shape[plain], to.starts.shape[0]
    d, grid = torch.empty(E, M, N, device=a.device, dtype=out), multiprocessors(a.device)
    if not const.INTERPRETED and hopper_gemm.fits(M, N, mode):
        hopper_gemm.wgrad(a, scale_a, b, scale_b, mode, to, grid, fast, d)
        return d
    deep = 64 if plain else 128
    box = [deep, 128] if plain else [128, deep]
    _wgrad_kernel[(grid,)](
        TensorDescriptor.from_tensor(a, box), TensorDescriptor.from_tensor(b, box), d, scale_a, scale_b, to.starts,
        to.ends, E, M, N, deep, grid, mode, fast, num_stages=4, num_warps=8,
    )  # fmt: skip
    return d


def wgrad_bf16(a: Tensor, b: Tensor, to: Route, out: torch.dtype = torch.float32) -> Tensor:
    """Multiply a [R', M], b [R', N] BF16 in the experts' order; return [E, M, N] in `out`, FP32 or BF16.

    torch's grouped GEMM returns only BF16, and converting that to FP32 costs a quarter of the product.
    """
    return wgrad(a, a, b, b, const.PLAIN.value, to, out)
