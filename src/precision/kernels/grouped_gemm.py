"""GEMMs over rows sorted by expert: persistent, loads by the tensor memory accelerator.

    nt      y[r, n]    = sum over k of a[r, k] b[e(r), n, k]            forward and input gradient
    wgrad   d[e, m, n] = sum over e's rows r of a[m, r] b[n, r]         weight gradient, of transposed operands

Both factors are contiguous along the sum, which is what Hopper's FP8 tensor cores read. Rows of an expert start at
multiples of 128, so no tile crosses a border, and offsets stay on the device. Products are summed in the tensor cores'
own precision over the whole sum (about 14 bits; the sums here are short: a hidden width, or one expert's rows), with
BLOCK scales in FP32 every 128.

Scales, by MODE: TENSOR one for a, one an expert for b; ROW one a row of a and a column of y; BLOCK 1 x 128 of a with
128 x 128 of b (nt), 128 x 1 of both (wgrad).

Tiles of 128 x 256 x 128 in three stages were the fastest found; where only the other side is a multiple of 256, the
product is transposed and written back transposed. BLOCK scales have a kernel of their own, see `block_gemm`; the ones
here serve them in the interpreter, and where there are no whole tiles.

One program a multiprocessor takes every so-maniest tile: none starts anew, and loads never pause. More and shorter ones
were no faster, beside messages to other ranks neither (docs/benchmarks.md).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from precision.kernels import block_gemm, const
from precision.kernels.common import as_bf16
from precision.kernels.route import Route

BF16_ALIGN = 64  # rows of an expert in BF16: the depth of a tile


@triton.jit
def _halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _nt_kernel(
    a, b, c, scale_a, scale_b, tile_expert, ends, R,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GRID: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    m_tiles = tl.load(ends + E - 1) // BM
    N_TILES: tl.constexpr = (N + BN - 1) // BN
    N_BLOCKS: tl.constexpr = (N + 127) // 128  # with BLOCK scales tiles are 128 wide
    K_BLOCKS: tl.constexpr = (K + 127) // 128
    for tile in tl.range(tl.program_id(0), m_tiles * N_TILES, GRID, flatten=True):
        m = tile // N_TILES
        n = tile % N_TILES
        e = tl.load(tile_expert + m * BM // 128)
        acc = tl.zeros((BM, BN), tl.float32)
        r = m * BM + tl.arange(0, BM)
        for k in range((K + BK - 1) // BK):
            x = a.load([m * BM, k * BK])
            y = b.load([e * N + n * BN, k * BK])
            if MODE == const.BLOCK:
                rows = tl.load(scale_a + k * R + r, mask=r < R, other=1.0)
                acc += tl.dot(x, y.T) * (rows * tl.load(scale_b + (e * N_BLOCKS + n) * K_BLOCKS + k))[:, None]
            else:
                acc = tl.dot(x, y.T, acc)
        if MODE == const.TENSOR:
            acc *= tl.load(scale_a) * tl.load(scale_b + e)
        if MODE == const.ROW:
            col = n * BN + tl.arange(0, BN)
            rows = tl.load(scale_a + r, mask=r < R, other=1.0)
            acc = acc * rows[:, None] * tl.load(scale_b + e * N + col, mask=col < N, other=1.0)[None, :]
        c.store([m * BM, n * BN], acc.to(tl.bfloat16))


@triton.jit
def _rounded(x, to: tl.constexpr):
    """FP32 in the type `to`, FP32 or BF16, to nearest even (also in the interpreter, which cuts by itself)."""
    if const.ON_GPU or to == tl.float32:
        return x.to(to)
    return as_bf16(x).to(to)


@triton.jit
def _put(c, d, e, m, n, acc, M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         TRANS: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Store a tile of d[e] in quarters: a small staging buffer leaves shared memory to the pipeline."""
    F: tl.constexpr = d.dtype.element_ty
    if not EVEN:
        row = m * BM + tl.arange(0, BM)
        col = n * BN + tl.arange(0, BN)
        inside = (row < M)[:, None] & (col < N)[None, :]
        if TRANS:
            at = d + (e * N + col[None, :]).to(tl.int64) * M + row[:, None]
        else:
            at = d + (e * M + row[:, None]).to(tl.int64) * N + col[None, :]
        tl.store(at, _rounded(acc, F), mask=inside)
    else:
        Q: tl.constexpr = BN // 4
        left, right = _halves(acc, BM, BN)
        q0, q1 = _halves(left, BM, BN // 2)
        q2, q3 = _halves(right, BM, BN // 2)
        if TRANS:
            at = e * N + n * BN
            c.store([at, m * BM], _rounded(q0.T, F))
            c.store([at + Q, m * BM], _rounded(q1.T, F))
            c.store([at + 2 * Q, m * BM], _rounded(q2.T, F))
            c.store([at + 3 * Q, m * BM], _rounded(q3.T, F))
        else:
            at = e * M + m * BM
            c.store([at, n * BN], _rounded(q0, F))
            c.store([at, n * BN + Q], _rounded(q1, F))
            c.store([at, n * BN + 2 * Q], _rounded(q2, F))
            c.store([at, n * BN + 3 * Q], _rounded(q3, F))


@triton.jit
def _wgrad_kernel(
    a, b, c, d, scale_a, scale_b, starts, ends,
    E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GRID: tl.constexpr, MODE: tl.constexpr, TRANS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    M_TILES: tl.constexpr = (M + BM - 1) // BM
    N_TILES: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), E * M_TILES * N_TILES, GRID):
        e = tile // (M_TILES * N_TILES)
        m = tile % (M_TILES * N_TILES) // N_TILES
        n = tile % N_TILES
        first = tl.load(starts + e)
        steps = (tl.load(ends + e) - first) // BK
        acc = tl.zeros((BM, BN), tl.float32)
        row = m * BM + tl.arange(0, BM)
        col = n * BN + tl.arange(0, BN)
        for k in range(steps):
            if MODE == const.PLAIN:
                x = a.load([first + k * BK, m * BM])
                y = b.load([first + k * BK, n * BN])
                acc = tl.dot(x.T, y, acc)
            else:
                x = a.load([m * BM, first + k * BK])
                y = b.load([n * BN, first + k * BK])
                if MODE == const.BLOCK:
                    block = (first // BK + k).to(tl.int64)
                    left = tl.load(scale_a + block * M + row, mask=row < M, other=1.0)
                    right = tl.load(scale_b + block * N + col, mask=col < N, other=1.0)
                    acc += tl.dot(x, y.T) * left[:, None] * right[None, :]
                else:
                    acc = tl.dot(x, y.T, acc)
        if MODE == const.TENSOR or MODE == const.ROW:
            acc *= tl.load(scale_a) * tl.load(scale_b)
        _put(c, d, e, m, n, acc, M, N, BM, BN, TRANS, EVEN)


def nt(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, mode: int, to: Route) -> Tensor:
    """a [R, K] FP8, b [E, N, K] FP8 contiguous -> [R, N] BF16. Scales are inverse scales: TENSOR 0-d and [E] (or 0-d);
    ROW [R, 1] and [E, N] in any shape; BLOCK [R, K / 128] (stored [K / 128, R]) and [E, N / 128, K / 128]."""
    (E, N, K), R = b.shape, a.shape[0]
    BM, BK = 128, 128
    BN = 256 if mode != const.BLOCK.value and N % 256 == 0 else 128
    y = torch.empty(R, N, device=a.device, dtype=torch.bfloat16)
    if R == 0:
        return y
    grid = _multiprocessors(a.device)
    if mode == const.BLOCK.value and not const.INTERPRETED and R % 128 == 0:
        return block_gemm.nt(a, scale_a, b, scale_b, to, grid)
    _nt_kernel[(grid,)](
        TensorDescriptor.from_tensor(a, [BM, BK]),
        TensorDescriptor.from_tensor(b.view(E * N, K), [BN, BK]),
        TensorDescriptor.from_tensor(y, [BM, BN]),
        scale_a, scale_b, to.tile_expert, to.ends, R, E, N, K, BM, BN, BK, grid, mode,
        num_stages=3 if BN == 256 else 4, num_warps=8,
    )  # fmt: skip
    return y


def wgrad(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, mode: int, to: Route, out: torch.dtype = torch.float32
) -> Tensor:
    """a [M, R'] FP8, b [N, R'] FP8 -> [E, M, N] in `out`, FP32 or BF16 (rounded once). Inverse scales: 0-d (TENSOR,
    ROW), or [R' / 128, M] and [R' / 128, N] (BLOCK)."""
    return _wgrad(a, scale_a, b, scale_b, mode, to, out)


def wgrad_bf16(a: Tensor, b: Tensor, to: Route, out: torch.dtype = torch.float32) -> Tensor:
    """a [R', M], b [R', N] BF16 in the experts' order, groups in multiples of 64 -> [E, M, N] in `out`, FP32 or BF16.
    torch's grouped GEMM returns BF16 only, and turning that into FP32 costs as much as a quarter of the product."""
    return _wgrad(a, a, b, b, const.PLAIN.value, to, out)


def _wgrad(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, mode: int, to: Route, out: torch.dtype) -> Tensor:
    plain = mode == const.PLAIN.value
    M, N, E = a.shape[plain], b.shape[plain], to.starts.shape[0]
    d = torch.empty(E, M, N, device=a.device, dtype=out)
    if mode == const.BLOCK.value and not const.INTERPRETED and block_gemm.fits(M, N):
        block_gemm.wgrad(a, scale_a, b, scale_b, to, _multiprocessors(a.device), d)
        return d
    BM, BK = 128, BF16_ALIGN if plain else 128
    wide = mode != const.BLOCK.value
    trans = wide and N % 256 != 0 and M % 256 == 0
    if trans:
        a, b, scale_a, scale_b, M, N = b, a, scale_b, scale_a, N, M
    BN = 256 if wide and N % 256 == 0 else 128
    even = M % BM == 0 and N % BN == 0
    grid = _multiprocessors(a.device)
    flat = d.view(E * N, M) if trans else d.view(E * M, N)
    box = [BN // 4, BM] if trans else [BM, BN // 4]
    _wgrad_kernel[(grid,)](
        TensorDescriptor.from_tensor(a, [BK, BM] if plain else [BM, BK]),
        TensorDescriptor.from_tensor(b, [BK, BN] if plain else [BN, BK]),
        TensorDescriptor.from_tensor(flat, box) if even else d,
        d, scale_a, scale_b, to.starts, to.ends,
        E, M, N, BM, BN, BK, grid, mode, trans, even, num_stages=3 if BN == 256 else 4, num_warps=8,
    )  # fmt: skip
    return d


@cache
def _multiprocessors(device: torch.device) -> int:
    return 1 if const.INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
