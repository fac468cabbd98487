"""The products of `newton_schulz` on Hopper, in tiles of 128 x 256: one warp loads, two groups of four warps multiply.

The structure is that of `hopper_gemm`: groups synchronise through stages in shared memory only, and one runs S - 1
steps behind the other, so that the tensor cores work while the other group writes. Here writes are half of a tile's
work besides products: a symmetric result is written twice, plain and mirrored, and the polynomials add the tile of
another matrix. Both go from registers through two alternating buffers, 64 x 64 at a time.

A table lists the tiles in their order (`newton_schulz.tile_table`). For a symmetric result, with i and j the numbers of
a tile in rows of 128 and columns of 256:

    i - 2 j = 0     the left half of the tile, which lies on the diagonal; the right one is mirrored by the next
    i - 2 j = 1     all of it; the left half is mirrored
    i - 2 j > 1     all of it, all mirrored
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from precision.kernels.hopper_gemm import layout
from precision.kernels.hopper_tiles import accumulate

_STAGES = 4


@gluon.jit
def _place(table, tile, each):
    """Return a tile's matrix, first row and first column."""
    packed = gl.load(table + tile % each)
    return tile // each, (packed & 0xFFFF) * 128, (packed >> 16) * 256


@gluon.jit
def _produce(a, b, sx, sy, full, empty, table, tiles, each, M, K, S: gl.constexpr):
    it = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, m, n = _place(table, tile, each)
        for k in range(K // 64):
            s = it % S
            bar = full.index(s)
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            mbarrier.expect(bar, 49152)
            tma.async_copy_global_to_shared(a, [e * M + m, k * 64], bar, sx.index(s))
            if sy.shape[1] == 64:
                tma.async_copy_global_to_shared(b, [e * K + k * 64, n], bar, sy.index(s))
            else:
                tma.async_copy_global_to_shared(b, [e * M + n, k * 64], bar, sy.index(s))
            it += 1


@gluon.jit
def _piece(c, buf, value, row, col, TRANS: gl.constexpr):
    """Store value [64, 64] to c at (row, col) through a buffer; the store through the other one may still be in
    flight."""
    tma.store_wait(1)
    if TRANS:
        buf.permute((1, 0)).store(value)
    else:
        buf.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(c, [row, col], buf)


@gluon.jit
def _write(
    c, sc, value, row, col, from_row, from_col, G: gl.constexpr, W: gl.constexpr, AT: gl.constexpr,
    MIRRORED: gl.constexpr,
):  # fmt: skip
    """Store value [64, W] to c at (row, col), its first MIRRORED columns also at (from_col, from_row), the mirrored
    place. Two of the buffers are group G's; pieces alternate between them."""
    if W > 64:
        left, right = gl.split(gl.permute(gl.reshape(value, (64, 2, W // 2)), (0, 2, 1)))
        _write(c, sc, left, row, col, from_row, from_col, G, W // 2, AT, MIRRORED)
        _write(c, sc, right, row, col + W // 2, from_row, from_col + W // 2, G, W // 2, AT + W // 2, MIRRORED)
    elif AT < MIRRORED:
        _piece(c, sc.index(2 * G), value, row, col, False)
        _piece(c, sc.index(2 * G + 1), value, from_col, from_row, True)
    else:
        _piece(c, sc.index(2 * G + AT // 64 % 2), value, row, col, False)


@gluon.jit
def _tile(
    c, added, sx, sy, sc, full, empty, ahead, factors, alpha, beta, it, e, m, n, M, N, K, S: gl.constexpr,
    ADDS: gl.constexpr, G: gl.constexpr, W: gl.constexpr, MIRRORED: gl.constexpr,
):  # fmt: skip
    """Compute one group's rows of one tile, W columns of it. The steps so far are updated and returned."""
    acc, it = accumulate(sx, sy, full, empty, ahead, it, K // 64, S, 16, G, W)
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    f = gl.load(factors + e)
    first = e * M
    value = acc * (alpha * f)
    if ADDS:
        row = m + G * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
        at = gl.expand_dims(row * N, 1) + gl.expand_dims(n + gl.arange(0, W, gl.SliceLayout(0, L)), 0)
        value += gl.load(added + first.to(gl.int64) * N + at).to(gl.float32) * (beta * f)
    _write(c, sc, value.to(c.dtype), first + m + G * 64, n, m + G * 64, first + n, G, W, 0, MIRRORED)
    return it


@gluon.jit
def _consume(
    c, added, sx, sy, sc, full, empty, ahead, factors, alpha, beta, table, tiles, each, M, N, K, S: gl.constexpr,
    SYMMETRIC: gl.constexpr, ADDS: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    it = 0
    if G == 1:
        mbarrier.wait(ahead, 0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, m, n = _place(table, tile, each)
        if SYMMETRIC:
            if m == n:
                it = _tile(c, added, sx, sy, sc, full, empty, ahead, factors, alpha, beta, it, e, m, n, M, N, K, S,
                           ADDS, G, 128, 0)  # fmt: skip
            elif m == n + 128:
                it = _tile(c, added, sx, sy, sc, full, empty, ahead, factors, alpha, beta, it, e, m, n, M, N, K, S,
                           ADDS, G, 256, 128)  # fmt: skip
            else:
                it = _tile(c, added, sx, sy, sc, full, empty, ahead, factors, alpha, beta, it, e, m, n, M, N, K, S,
                           ADDS, G, 256, 256)  # fmt: skip
        else:
            it = _tile(c, added, sx, sy, sc, full, empty, ahead, factors, alpha, beta, it, e, m, n, M, N, K, S, ADDS,
                       G, 256, 0)  # fmt: skip
    if G == 0:
        if it < S - 1:
            mbarrier.arrive(ahead, count=1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["each", "tiles"])
def _triangle_kernel(
    a, b, c, added, factors, alpha, beta, table, tiles, each, M, N, K, S: gl.constexpr, SYMMETRIC: gl.constexpr,
    ADDS: gl.constexpr,
):  # fmt: skip
    """One variant for all shapes. tiles: of all matrices; each: of one."""
    sx = gl.allocate_shared_memory(a.dtype, [S, 128, 64], a.layout)
    sy = gl.allocate_shared_memory(b.dtype, [S, b.block_shape[0], b.block_shape[1]], b.layout)
    sc = gl.allocate_shared_memory(c.dtype, [4, 64, 64], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    ahead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(ahead, count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (c, added, sx, sy, sc, full, empty, ahead, factors, alpha, beta, table, tiles, each, M, N, K, S,
                    SYMMETRIC, ADDS, 0)),
        (_consume, (c, added, sx, sy, sc, full, empty, ahead, factors, alpha, beta, table, tiles, each, M, N, K, S,
                    SYMMETRIC, ADDS, 1)),
        (_produce, (a, b, sx, sy, full, empty, table, tiles, each, M, K, S)),
    ], [4, 1], [240, 24])  # fmt: skip


def product(
    a: Tensor, b: Tensor, out: Tensor, added: Tensor | None, factors: Tensor, alpha: float, beta: float,
    table: Tensor, symmetric: bool, programs: int,
) -> None:  # fmt: skip
    """As `newton_schulz.product`, where M and K are multiples of 128, and N of 256 unless it is M. table: the tiles of
    one matrix."""
    (E, M, N), K = out.shape, a.shape[2]
    right = (b.view(-1, K), [256, 64]) if symmetric else (b.view(-1, N), [64, 256])
    _triangle_kernel[(programs,)](  # pyright: ignore[reportIndexIssue]  (a type that `gluon.jit` hides)
        TensorDescriptor.from_tensor(a.view(-1, K), [128, 64], layout(16)),
        TensorDescriptor.from_tensor(*right, layout(16)),
        TensorDescriptor.from_tensor(out.view(-1, N), [64, 64], layout(16)),
        out if added is None else added, factors, alpha, beta, table, E * len(table), len(table), M, N, K,
        _STAGES, symmetric, added is not None, num_warps=4,
    )  # fmt: skip
