"""Grouped GEMMs with BLOCK scales for Hopper: one warp loads, two groups of four warps multiply. See `grouped_gemm`.

One H200, 98,304 rows of 64 experts, 2048 and 1408 wide: 1,000 to 1,150 TF/s (nt; 700 with `tl.dot`), 730 to 790
(wgrad).

A tile is 128 x 256; each group of warps has 64 rows of it. Every 128 of the sum:

    p     = x[64, 128] y[128 of 256, 128]^T    tensor cores, a fresh product
    acc  += p * scales                         FP32, twice: for each half of 128 columns

While one group scales, the other multiplies: nothing makes the two wait for each other but the stages in shared memory,
which the loading warp fills (scales too) as soon as both have left them, also across tiles, so that the first products
of a tile are there when the last tile is stored. `tl.dot` in a plain loop has a barrier of all warps every step, and
its tile of 128 x 128 moves twice the bytes from L2 for each product.

Registers (240 a thread, none spilled): acc 128, p 64. There is no room for a second p, so each half is scaled behind a
branch that is always taken: the assembler does not start the second product above it.

Written in Gluon, Triton's lower layer, which has no interpreter: on a CPU `grouped_gemm`'s kernels stand for it.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from precision.kernels.route import Route


@gluon.jit
def _put(c, buf, acc, row, col, W: gl.constexpr, P: gl.constexpr, TRANS: gl.constexpr):
    """acc [64, W] to c at (row, col), P columns at a time through buf; the last piece is still under way on return."""
    if W > P:
        left, right = gl.split(gl.permute(gl.reshape(acc, (64, 2, W // 2)), (0, 2, 1)))
        _put(c, buf, left, row, col, W // 2, P, TRANS)
        _put(c, buf, right, row, col + W // 2, W // 2, P, TRANS)
    else:
        tma.store_wait(0)
        if TRANS:
            buf.permute((1, 0)).store(acc.to(c.dtype))
        else:
            buf.store(acc.to(c.dtype))
        fence_async_shared()
        if TRANS:
            tma.async_copy_shared_to_global(c, [col, row], buf)
        else:
            tma.async_copy_shared_to_global(c, [row, col], buf)


@gluon.jit
def _where(tile, group, ends, E: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, WGRAD: gl.constexpr):
    """Of a tile: the expert, its first row in a and in the expert's b, where its sum starts, and steps of 128 of it."""
    NT: gl.constexpr = (N + 255) // 256
    n = tile % NT * 256
    if WGRAD:
        MT: gl.constexpr = M // 128
        e = tile // (MT * NT)
        m = tile % (MT * NT) // NT * 128
        first = gl.load(group + e)
        steps = (gl.load(ends + e) - first) // 128
    else:
        e = gl.load(group + tile // NT)
        m = tile // NT * 128
        first = 0
        steps = (K + 127) // 128
    return e, m, n, first, steps


@gluon.jit
def _tiles(ends, E: gl.constexpr, M: gl.constexpr, N: gl.constexpr, WGRAD: gl.constexpr):
    if WGRAD:
        tiles = E * (M // 128) * (N // 256)
    else:
        tiles = gl.load(ends + E - 1) // 128 * ((N + 255) // 256)
    return tiles


@gluon.jit
def _produce(
    a, b, left, right, sx, sy, sl, sr, full, empty, group, ends, R, E: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, GRID: gl.constexpr, S: gl.constexpr, WGRAD: gl.constexpr,
):  # fmt: skip
    it = 0
    for tile in range(gl.program_id(0), _tiles(ends, E, M, N, WGRAD), GRID):
        e, m, n, first, steps = _where(tile, group, ends, E, M, N, K, WGRAD)
        row = n if WGRAD else e * N + n
        for k in range(steps):
            s = it % S
            at = first + k * 128
            bar = full.index(s)
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            mbarrier.expect(bar, 49152 + 512 + (1024 if WGRAD else 0))
            tma.async_copy_global_to_shared(b, [row, at], bar, sy.index(s))
            tma.async_copy_global_to_shared(a, [m, at], bar, sx.index(s))
            tma.async_copy_global_to_shared(left, [at // 128 * (M if WGRAD else R) + m], bar, sl.index(s))
            if WGRAD:
                tma.async_copy_global_to_shared(right, [at // 128 * N + n], bar, sr.index(s))
            it += 1


@gluon.jit
def _consume(
    c, sx, sy, sl, sr, sc, full, empty, scale_b, group, ends, R, E: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, GRID: gl.constexpr, S: gl.constexpr, WGRAD: gl.constexpr, P: gl.constexpr, TRANS: gl.constexpr,
    G: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LEFT: gl.constexpr = gl.SliceLayout(1, L)
    RIGHT: gl.constexpr = gl.SliceLayout(0, L)
    none = gl.full([64, 128], 0.0, gl.float32, L)
    buf = sc.index(G)
    it = 0
    for tile in range(gl.program_id(0), _tiles(ends, E, M, N, WGRAD), GRID):
        e, m, n, first, steps = _where(tile, group, ends, E, M, N, K, WGRAD)
        if WGRAD:
            row = m + G * 64 if TRANS else e * M + m + G * 64
            col = e * N + n if TRANS else n
        else:
            row = m + G * 64
            col = n
        acc0 = gl.full([64, 128], 0.0, gl.float32, L)
        acc1 = gl.full([64, 128], 0.0, gl.float32, L)
        sb = scale_b + (e * ((N + 127) // 128) + n // 128) * ((K + 127) // 128)
        second = n + 128 < N if N % 256 else R >= 0
        next_block = gl.where(second, (K + 127) // 128, 0)
        for k in range(steps):
            s = it % S
            if not WGRAD:
                f0 = gl.load(sb + k)
                f1 = gl.load(sb + next_block + k)
            mbarrier.wait(full.index(s), it // S & 1)
            x = sx.index(s).slice(G * 64, 64)
            y = sy.index(s)
            q = warpgroup_mma(x, y.slice(0, 128).permute((1, 0)), none, use_acc=False, is_async=True)
            rows = sl.index(s).slice(G * 64, 64).load(LEFT)
            p = warpgroup_mma_wait(0, deps=(q,))
            if R >= 0:
                if WGRAD:
                    acc0 += p * gl.expand_dims(sr.index(s).slice(0, 128).load(RIGHT), 0) * gl.expand_dims(rows, 1)
                else:
                    acc0 += p * gl.expand_dims(rows * f0, 1)
            if second:
                q = warpgroup_mma(x, y.slice(128, 128).permute((1, 0)), none, use_acc=False, is_async=True)
                p = warpgroup_mma_wait(0, deps=(q,))
            if not WGRAD:
                mbarrier.arrive(empty.index(s), count=1)
            if second:
                if WGRAD:
                    acc1 += p * gl.expand_dims(sr.index(s).slice(128, 128).load(RIGHT), 0) * gl.expand_dims(rows, 1)
                else:
                    acc1 += p * gl.expand_dims(rows * f1, 1)
            if WGRAD:
                mbarrier.arrive(empty.index(s), count=1)
            it += 1
        _put(c, buf, acc0, row, col, 128, P, TRANS)
        _put(c, buf, acc1, row, col + 128, 128, P, TRANS)
    tma.store_wait(0)


@gluon.jit
def _nt_wgrad_kernel(
    a, b, c, left, right, scale_b, group, ends, R, E: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, GRID: gl.constexpr, S: gl.constexpr, WGRAD: gl.constexpr, P: gl.constexpr, TRANS: gl.constexpr,
):  # fmt: skip
    sx = gl.allocate_shared_memory(a.dtype, [S, 128, 128], a.layout)
    sy = gl.allocate_shared_memory(b.dtype, [S, 256, 128], b.layout)
    sl = gl.allocate_shared_memory(gl.float32, [S, 128], left.layout)
    sr = gl.allocate_shared_memory(gl.float32, [S if WGRAD else 1, 256], right.layout)
    if TRANS:
        sc = gl.allocate_shared_memory(c.dtype, [2, P, 64], c.layout)
    else:
        sc = gl.allocate_shared_memory(c.dtype, [2, 64, P], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (c, sx, sy, sl, sr, sc, full, empty, scale_b, group, ends, R, E, M, N, K, GRID, S,
                    WGRAD, P, TRANS, 0)),
        (_consume, (c, sx, sy, sl, sr, sc, full, empty, scale_b, group, ends, R, E, M, N, K, GRID, S,
                    WGRAD, P, TRANS, 1)),
        (_produce, (a, b, left, right, sx, sy, sl, sr, full, empty, group, ends, R, E, M, N, K, GRID, S, WGRAD)),
    ], [4, 1], [240, 24])  # fmt: skip


def nt(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, to: Route, programs: int) -> Tensor:
    """`grouped_gemm.nt` with BLOCK scales; any N and K, R a multiple of 128 (130 ended in an illegal instruction)."""
    (E, N, K), R = b.shape, a.shape[0]
    y = torch.empty(R, N, device=a.device, dtype=torch.bfloat16)
    scales = scale_a.t().reshape(-1)
    _nt_wgrad_kernel[(programs,)](  # pyright: ignore[reportIndexIssue]  (a type that `gluon.jit` hides)
        TensorDescriptor.from_tensor(a, [128, 128], _layout(8)),
        TensorDescriptor.from_tensor(b.view(E * N, K), [256, 128], _layout(8)),
        TensorDescriptor.from_tensor(y, [64, 128], _layout(16)),
        TensorDescriptor.from_tensor(scales, [128], _layout(32, 0, 1)),
        TensorDescriptor.from_tensor(scales, [256], _layout(32, 0, 1)),
        scale_b, to.tile_expert, to.ends, R, E, 0, N, K, programs, 4, False, 128, False, num_warps=4,
    )  # fmt: skip
    return y


def wgrad(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, to: Route, programs: int, d: Tensor) -> None:
    """`grouped_gemm.wgrad` with BLOCK scales into d [E, M, N]; see `fits`."""
    M, N, (E, *_), R = a.shape[0], b.shape[0], d.shape, a.shape[1]
    trans = N % 256 != 0
    flat = d.view(-1, N)
    if trans:
        a, b, scale_a, scale_b, M, N = b, a, scale_b, scale_a, N, M
    bytes_ = d.element_size()
    stages, piece = (3, 128) if bytes_ == 4 else (4, 64)
    box = [piece, 64] if trans else [64, piece]
    _nt_wgrad_kernel[(programs,)](  # pyright: ignore[reportIndexIssue]  (a type that `gluon.jit` hides)
        TensorDescriptor.from_tensor(a, [128, 128], _layout(8)),
        TensorDescriptor.from_tensor(b, [256, 128], _layout(8)),
        TensorDescriptor.from_tensor(flat, box, _layout(8 * bytes_)),
        TensorDescriptor.from_tensor(scale_a.view(-1), [128], _layout(32, 0, 1)),
        TensorDescriptor.from_tensor(scale_b.view(-1), [256], _layout(32, 0, 1)),
        scale_b, to.starts, to.ends, R, E, M, N, 0, programs, stages, True, piece, trans, num_warps=4,
    )  # fmt: skip


def fits(M: int, N: int) -> bool:
    """Whether `wgrad` serves [M, N]: whole tiles of 128 x 256, one way or the other."""
    return (M % 128 == 0 and N % 256 == 0) or (M % 256 == 0 and N % 128 == 0)


@cache
def _layout(bits: int, swizzle: int = 128, rank: int = 2) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)
