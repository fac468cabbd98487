"""`grouped_gemm` on Hopper, in tiles of 128 x 256: one warp loads, two groups of four warps multiply, 64 rows each.

    fast, BF16   acc += x[64, 128] y[256, 128]^T          tensor cores, in their own precision over the whole sum
    fp32         p    = x[64, 128] y[128 of 256, 128]^T   tensor cores, a fresh product every 128 of the sum
                 acc += p                                 FP32, twice: for each half of 128 columns
    BLOCK        p    = x[64, 128] y[128 of 256, 128]^T   tensor cores, a fresh product every 128 of the sum
                 acc += p * scales                        FP32, twice: for each half of 128 columns

The two groups synchronise only through the stages in shared memory. The loading warp fills a stage (scales too) as soon
as both have released it, also across tiles. So the first products of a tile are loaded when the last tile is stored,
and one group multiplies while the other scales or stores. To this end one group starts S - 1 steps before the other and
stays ahead. `tl.dot` in a plain loop has a barrier of all warps every step, and nothing multiplies while it stores.

One H200, 98,304 rows of 64 experts, 2048 and 1408 wide, TF/s after an idle pause. FP32 sums cost 7 to 10 % of a
product: 1,210 to 1,350 in nt, 1,120 to 1,280 in wgrad. With `fast`, `tl.dot` in brackets: one scale a tensor 1,210 to
1,370 (1,150 to 1,320) in nt, 1,090 to 1,130 (930 to 960) in wgrad with FP32 results, 1,260 to 1,300 (1,110 to 1,150)
with BF16; BLOCK 1,000 to 1,150 (700), wgrad 810 to 900; BF16 600 to 730 (torch's grouped GEMM 600 to 690). The path
from L2 limits nt, with 48 KiB per step and multiprocessor: without the loads the same kernel takes 0.72 ms instead of
0.86.

Registers (240 a thread, none spilled): acc 128, BLOCK's p 64. There is no room for a second p, so each half is scaled
behind a branch that is always taken: the assembler does not move the second product above it.

The kernels are written in Gluon, Triton's lower layer, which has no interpreter: on a CPU `grouped_gemm`'s kernels
replace them.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from precision.kernels import const
from precision.kernels.hopper_tiles import block_sums, sums, tiles, where
from precision.kernels.route import Route


@gluon.jit
def _produce(
    a, b, left, right, sx, sy, sl, sr, full, empty, group, ends, R, E: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, GRID: gl.constexpr, S: gl.constexpr, MODE: gl.constexpr, WGRAD: gl.constexpr,
):  # fmt: skip
    STEP: gl.constexpr = 64 if MODE == const.PLAIN else 128
    SCALES: gl.constexpr = (1536 if WGRAD else 512) if MODE == const.BLOCK else 0
    it = 0
    for tile in range(gl.program_id(0), tiles(ends, E, M, N, WGRAD), GRID):
        e, m, n, first, steps = where(tile, group, ends, E, M, N, K, WGRAD, STEP)
        row = n if WGRAD else e * N + n
        for k in range(steps):
            s = it % S
            at = first + k * STEP
            bar = full.index(s)
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            mbarrier.expect(bar, 49152 + SCALES)
            if sy.shape[1] == 64:
                tma.async_copy_global_to_shared(b, [e * K + at, n], bar, sy.index(s))
            else:
                tma.async_copy_global_to_shared(b, [row, at], bar, sy.index(s))
            if sx.shape[1] == 64:
                tma.async_copy_global_to_shared(a, [at, m], bar, sx.index(s * 2))
                tma.async_copy_global_to_shared(a, [at, m + 64], bar, sx.index(s * 2 + 1))
            else:
                tma.async_copy_global_to_shared(a, [m, at], bar, sx.index(s))
            if MODE == const.BLOCK:
                tma.async_copy_global_to_shared(left, [at // 128 * (M if WGRAD else R) + m], bar, sl.index(s))
                if WGRAD:
                    tma.async_copy_global_to_shared(right, [at // 128 * N + n], bar, sr.index(s))
            it += 1


@gluon.jit
def _consume(
    c, sx, sy, sl, sr, sf, sc, full, empty, ahead, scale_a, scale_b, group, ends, R, E: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, GRID: gl.constexpr, S: gl.constexpr, MODE: gl.constexpr, WGRAD: gl.constexpr,
    P: gl.constexpr, TRANS: gl.constexpr, G: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    if MODE == const.BLOCK:
        block_sums(c, sx, sy, sl, sr, sc.index(G), full, empty, scale_b, group, ends, R, E, M, N, K, GRID, S, WGRAD, P,
                   TRANS, G)  # fmt: skip
    else:
        sums(c, sx, sy, sf.index(G), sc.index(G), full, empty, ahead, scale_a, scale_b, group, ends, E, M, N, K, GRID,
             S, MODE, WGRAD, P, TRANS, G, PROMOTE)  # fmt: skip


@gluon.jit
def _nt_wgrad_kernel(
    a, b, c, left, right, scale_a, scale_b, group, ends, R, E: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, GRID: gl.constexpr, S: gl.constexpr, MODE: gl.constexpr, WGRAD: gl.constexpr, P: gl.constexpr,
    TRANS: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 128 // a.block_shape[0]  # parts per stage of a
    sx = gl.allocate_shared_memory(a.dtype, [S * PARTS, a.block_shape[0], a.block_shape[1]], a.layout)
    sy = gl.allocate_shared_memory(b.dtype, [S, b.block_shape[0], b.block_shape[1]], b.layout)
    WIDTH: gl.constexpr = (256 if N > 128 else 128) if MODE == const.ROW and not WGRAD else 1
    sf = gl.allocate_shared_memory(gl.float32, [2, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sl, sr = sf, sf
    if MODE == const.BLOCK:
        sl = gl.allocate_shared_memory(gl.float32, [S, 128], left.layout)
        sr = gl.allocate_shared_memory(gl.float32, [S if WGRAD else 1, 256], left.layout)
    if TRANS:
        sc = gl.allocate_shared_memory(c.dtype, [2, P, 64], c.layout)
    else:
        sc = gl.allocate_shared_memory(c.dtype, [2, 64, P], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    ahead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(ahead, count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (c, sx, sy, sl, sr, sf, sc, full, empty, ahead, scale_a, scale_b, group, ends, R, E, M, N, K, GRID,
                    S, MODE, WGRAD, P, TRANS, 0, PROMOTE)),
        (_consume, (c, sx, sy, sl, sr, sf, sc, full, empty, ahead, scale_a, scale_b, group, ends, R, E, M, N, K, GRID,
                    S, MODE, WGRAD, P, TRANS, 1, PROMOTE)),
        (_produce, (a, b, left, right, sx, sy, sl, sr, full, empty, group, ends, R, E, M, N, K, GRID, S, MODE, WGRAD)),
    ], [4, 1], [240, 24])  # fmt: skip


def nt(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, mode: int, to: Route, programs: int, fast: bool
) -> Tensor:
    """`grouped_gemm.nt` and `nt_bf16` for any N and K (in multiples of 16 bytes), R a multiple of 128 (130 ended in an
    illegal instruction). BF16 b may be transposed; K is then a multiple of 64."""
    (E, N, K), R, bits = b.shape, a.shape[0], 8 * a.element_size()
    y = torch.empty(R, N, device=a.device, dtype=torch.bfloat16)
    left = right = None
    if mode == const.BLOCK.value:
        left = TensorDescriptor.from_tensor(scale_a.t().reshape(-1), [128], layout(32, 0, 1))
    depth = 1024 // bits
    flat, box = (b.view(E * N, K), [256, depth]) if b.is_contiguous() else (b.mT.view(E * K, N), [64, 256])
    _nt_wgrad_kernel[(programs,)](  # pyright: ignore[reportIndexIssue]  (a type that `gluon.jit` hides)
        TensorDescriptor.from_tensor(a, [128, depth], layout(bits)),
        TensorDescriptor.from_tensor(flat, box, layout(bits)),
        TensorDescriptor.from_tensor(y, [64, 128], layout(16)),
        left, right, scale_a, scale_b, to.tile_expert, to.ends, R, E, 0, N, K, programs, 4, mode, False, 128, False,
        _promotes(mode, fast), num_warps=4,
    )  # fmt: skip
    return y


def wgrad(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, mode: int, to: Route, programs: int, fast: bool, d: Tensor
) -> None:
    """`grouped_gemm.wgrad` and `wgrad_bf16` into d [E, M, N]; see `fits`."""
    E, M, N = d.shape
    trans = N % 256 != 0 and M % 256 == 0 and N % 128 == 0
    flat = d.view(-1, N)
    if trans:
        a, b, scale_a, scale_b, M, N = b, a, scale_b, scale_a, N, M
    plain, block, bytes_ = mode == const.PLAIN.value, mode == const.BLOCK.value, d.element_size()
    R = a.shape[0] if plain else a.shape[1]
    stages, piece = (3 if block else 4, 128 if block else 64) if bytes_ == 4 else (4, 64 if block else 128)
    left = right = None
    if block:
        left = TensorDescriptor.from_tensor(scale_a.view(-1), [128], layout(32, 0, 1))
        right = TensorDescriptor.from_tensor(scale_b.view(-1), [256], layout(32, 0, 1))
    bits = 8 * a.element_size()
    _nt_wgrad_kernel[(programs,)](  # pyright: ignore[reportIndexIssue]  (a type that `gluon.jit` hides)
        TensorDescriptor.from_tensor(a, [64, 64] if plain else [128, 128], layout(bits)),
        TensorDescriptor.from_tensor(b, [64, 256] if plain else [256, 128], layout(bits)),
        TensorDescriptor.from_tensor(flat, [piece, 64] if trans else [64, piece], layout(8 * bytes_)),
        left, right, scale_a, scale_b, to.starts, to.ends, R, E, M, N, 0, programs, stages, mode, True, piece, trans,
        _promotes(mode, fast), num_warps=4,
    )  # fmt: skip


def fits(M: int, N: int, mode: int) -> bool:
    """Return whether `wgrad` supports [M, N]: whole tiles high (columns beyond N are cut off), rows of whole 16
    bytes."""
    return M % 128 == 0 and N % (128 if mode == const.BLOCK.value else 8) == 0


def _promotes(mode: int, fast: bool) -> bool:
    """Return whether the kernel itself adds in FP32: BF16 needs no such adds, blocks have their own."""
    return not fast and mode in (const.TENSOR.value, const.ROW.value)


@cache
def layout(bits: int, swizzle: int = 128, rank: int = 2) -> gl.NVMMASharedLayout:
    """Return the layout in shared memory of numbers of so many bits. swizzle: bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)
