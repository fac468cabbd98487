"""A tile of a grouped GEMM on Hopper: its position, the work of one group of four warps on its 64 rows, and the stores.
See `hopper_gemm`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from precision.kernels import const


@gluon.jit
def tiles(ends, E: gl.constexpr, M: gl.constexpr, N: gl.constexpr, WGRAD: gl.constexpr):
    """Return the number of tiles."""
    if WGRAD:
        count = E * (M // 128) * ((N + 255) // 256)
    else:
        count = gl.load(ends + E - 1) // 128 * ((N + 255) // 256)
    return count


@gluon.jit
def where(
    tile, group, ends, E: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, WGRAD: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """Return a tile's expert, its first row in a and in the expert's b, where its sum starts, and the steps of it."""
    NT: gl.constexpr = (N + 255) // 256
    n = tile % NT * 256
    if WGRAD:
        MT: gl.constexpr = M // 128
        e = tile // (MT * NT)
        m = tile % (MT * NT) // NT * 128
        first = gl.load(group + e)
        steps = (gl.load(ends + e) - first) // STEP
    else:
        e = gl.load(group + tile // NT)
        m = tile // NT * 128
        first = 0
        steps = (K + STEP - 1) // STEP
    return e, m, n, first, steps


@gluon.jit
def _put(c, buf, acc, row, col, W: gl.constexpr, P: gl.constexpr, TRANS: gl.constexpr):
    """Store acc [64, W] to c at (row, col), P columns at a time through buf; the last piece is still in flight on
    return."""
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
def _corner(
    e, m, n, M: gl.constexpr, N: gl.constexpr, WGRAD: gl.constexpr, TRANS: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """Return the position in c of a group's rows of a tile."""
    if WGRAD:
        row = m + G * 64 if TRANS else e * M + m + G * 64
        col = e * N + n if TRANS else n
    else:
        row = m + G * 64
        col = n
    return row, col


@gluon.jit
def _operands(sx, sy, s, W: gl.constexpr, G: gl.constexpr):
    """Return stage s as the tensor cores read it: a group's 64 rows of x, [64, sum], and y, [sum, W]. Transposed
    operands, which BF16 allows, are 64 deep."""
    if sx.shape[1] == 64:
        x = sx.index(s * 2 + G).permute((1, 0))
    else:
        x = sx.index(s).slice(G * 64, 64)
    if sy.shape[1] == 64:
        y = sy.index(s).slice(0, W, dim=1)
    else:
        y = sy.index(s).slice(0, W).permute((1, 0))
    return x, y


@gluon.jit
def accumulate(
    sx, sy, full, empty, ahead, it, steps, S: gl.constexpr, K16: gl.constexpr, G: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Sum one tile in the tensor cores, a group's 64 rows and W columns of it, FP32. `it`, the steps so far, is updated
    and returned."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, K16])
    acc = gl.full([64, W], 0.0, gl.float32, L)
    for k in range(steps):
        s = it % S
        mbarrier.wait(full.index(s), it // S & 1)
        x, y = _operands(sx, sy, s, W, G)
        q = warpgroup_mma(x, y, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(q,))
        if k > 0:
            mbarrier.arrive(empty.index((it - 1) % S), count=1)
        it += 1
        if G == 0:
            if it == S - 1:
                mbarrier.arrive(ahead, count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if steps > 0:
        mbarrier.arrive(empty.index((it - 1) % S), count=1)
    return acc, it


@gluon.jit
def _sum(
    c, sx, sy, sf, buf, full, empty, ahead, scale_a, scale_b, it, e, m, n, steps, M: gl.constexpr, N: gl.constexpr,
    S: gl.constexpr, MODE: gl.constexpr, WGRAD: gl.constexpr, P: gl.constexpr, TRANS: gl.constexpr, G: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """Compute W columns of one tile: the sum in the tensor cores, then its scales. The steps so far are updated and
    returned."""
    K16: gl.constexpr = 16 if MODE == const.PLAIN else 32
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, K16])
    ROWS: gl.constexpr = MODE == const.ROW and not WGRAD
    if ROWS:
        f = gl.load(scale_a + m + G * 64 + gl.arange(0, 64, gl.SliceLayout(1, L)))
        at = n + gl.arange(0, sf.shape[0], gl.BlockedLayout([sf.shape[0] // 128], [32], [4], [0]))
        sf.store(gl.load(scale_b + e * N + at, mask=at < N, other=1.0))
    elif MODE != const.PLAIN:
        f = gl.load(scale_a) * gl.load(scale_b + (0 if WGRAD else e))
    acc, it = accumulate(sx, sy, full, empty, ahead, it, steps, S, K16, G, W)
    if ROWS:
        acc = acc * gl.expand_dims(f, 1) * gl.expand_dims(sf.slice(0, W).load(gl.SliceLayout(0, L)), 0)
    elif MODE != const.PLAIN:
        acc = acc * f
    row, col = _corner(e, m, n, M, N, WGRAD, TRANS, G)
    _put(c, buf, acc, row, col, W, P, TRANS)
    return it


@gluon.jit
def _product(x, sy, s, none, AT: gl.constexpr):
    """Start a fresh product of one step with 128 columns of y from AT on."""
    return warpgroup_mma(x, sy.index(s).slice(AT, 128).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _finish(
    c, buf, acc, sf, f, row, col, MODE: gl.constexpr, WGRAD: gl.constexpr, AT: gl.constexpr, P: gl.constexpr,
    TRANS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Scale columns from AT on and store them to c."""
    W: gl.constexpr = acc.shape[1]
    if MODE == const.ROW and not WGRAD:
        acc = acc * gl.expand_dims(f, 1) * gl.expand_dims(sf.slice(AT, W).load(gl.SliceLayout(0, L)), 0)
    else:
        acc = acc * f
    _put(c, buf, acc, row, col + AT, W, P, TRANS)


@gluon.jit
def _promoted(
    c, sx, sy, sf, buf, full, empty, ahead, scale_a, scale_b, it, e, m, n, steps, M: gl.constexpr, N: gl.constexpr,
    S: gl.constexpr, MODE: gl.constexpr, WGRAD: gl.constexpr, P: gl.constexpr, TRANS: gl.constexpr, G: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """As `_sum`, with a fresh product per step, in halves of 128 columns, added up in FP32."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    if MODE == const.ROW and not WGRAD:
        f = gl.load(scale_a + m + G * 64 + gl.arange(0, 64, gl.SliceLayout(1, L)))
        at = n + gl.arange(0, sf.shape[0], gl.BlockedLayout([sf.shape[0] // 128], [32], [4], [0]))
        sf.store(gl.load(scale_b + e * N + at, mask=at < N, other=1.0))
    else:
        f = gl.load(scale_a) * gl.load(scale_b + (0 if WGRAD else e))
    none = gl.full([64, 128], 0.0, gl.float32, L)
    acc0 = none
    acc1 = none
    for _ in range(steps):
        s = it % S
        mbarrier.wait(full.index(s), it // S & 1)
        x = sx.index(s).slice(G * 64, 64)
        q0 = _product(x, sy, s, none, 0)
        p0 = warpgroup_mma_wait(0, deps=(q0,))
        if it >= 0:  # always true: see `hopper_gemm` on registers
            acc0 += p0
        if W == 256:
            q1 = _product(x, sy, s, none, 128)
            p1 = warpgroup_mma_wait(0, deps=(q1,))
            mbarrier.arrive(empty.index(s), count=1)
            if it >= 0:
                acc1 += p1
        else:
            mbarrier.arrive(empty.index(s), count=1)
        it += 1
        if G == 0:
            if it == S - 1:
                mbarrier.arrive(ahead, count=1)
    row, col = _corner(e, m, n, M, N, WGRAD, TRANS, G)
    _finish(c, buf, acc0, sf, f, row, col, MODE, WGRAD, 0, P, TRANS, L)
    if W == 256:
        _finish(c, buf, acc1, sf, f, row, col, MODE, WGRAD, 128, P, TRANS, L)
    return it


@gluon.jit
def _tile(
    c, sx, sy, sf, buf, full, empty, ahead, scale_a, scale_b, it, e, m, n, steps, M: gl.constexpr, N: gl.constexpr,
    S: gl.constexpr, MODE: gl.constexpr, WGRAD: gl.constexpr, P: gl.constexpr, TRANS: gl.constexpr, G: gl.constexpr,
    W: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    if not PROMOTE:
        it = _sum(c, sx, sy, sf, buf, full, empty, ahead, scale_a, scale_b, it, e, m, n, steps, M, N, S, MODE,
                  WGRAD, P, TRANS, G, W)  # fmt: skip
    else:
        it = _promoted(c, sx, sy, sf, buf, full, empty, ahead, scale_a, scale_b, it, e, m, n, steps, M, N, S,
                       MODE, WGRAD, P, TRANS, G, W)  # fmt: skip
    return it


@gluon.jit
def sums(
    c, sx, sy, sf, buf, full, empty, ahead, scale_a, scale_b, group, ends, E: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, GRID: gl.constexpr, S: gl.constexpr, MODE: gl.constexpr, WGRAD: gl.constexpr,
    P: gl.constexpr, TRANS: gl.constexpr, G: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    """Compute group G's part of every tile of a program, without BLOCK scales. The other group starts S - 1 steps
    later."""
    STEP: gl.constexpr = 64 if MODE == const.PLAIN else 128
    it = 0
    if G == 1:
        mbarrier.wait(ahead, 0)
    for tile in range(gl.program_id(0), tiles(ends, E, M, N, WGRAD), GRID):
        e, m, n, first, steps = where(tile, group, ends, E, M, N, K, WGRAD, STEP)
        if N % 256 == 0 or N % 256 > 128:
            it = _tile(c, sx, sy, sf, buf, full, empty, ahead, scale_a, scale_b, it, e, m, n, steps, M, N, S, MODE,
                      WGRAD, P, TRANS, G, 256, PROMOTE)  # fmt: skip
        elif N <= 128:
            it = _tile(c, sx, sy, sf, buf, full, empty, ahead, scale_a, scale_b, it, e, m, n, steps, M, N, S, MODE,
                      WGRAD, P, TRANS, G, 128, PROMOTE)  # fmt: skip
        else:
            if n + 128 < N:
                it = _tile(c, sx, sy, sf, buf, full, empty, ahead, scale_a, scale_b, it, e, m, n, steps, M, N, S, MODE,
                          WGRAD, P, TRANS, G, 256, PROMOTE)  # fmt: skip
            else:
                it = _tile(c, sx, sy, sf, buf, full, empty, ahead, scale_a, scale_b, it, e, m, n, steps, M, N, S, MODE,
                          WGRAD, P, TRANS, G, 128, PROMOTE)  # fmt: skip
    if G == 0:
        if it < S - 1:
            mbarrier.arrive(ahead, count=1)
    tma.store_wait(0)


@gluon.jit
def block_sums(
    c, sx, sy, sl, sr, buf, full, empty, scale_b, group, ends, R, E: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, GRID: gl.constexpr, S: gl.constexpr, WGRAD: gl.constexpr, P: gl.constexpr, TRANS: gl.constexpr,
    G: gl.constexpr,
):  # fmt: skip
    """Compute group G's part of every tile of a program, with BLOCK scales: each step's product is fresh, and
    scaled."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LEFT: gl.constexpr = gl.SliceLayout(1, L)
    RIGHT: gl.constexpr = gl.SliceLayout(0, L)
    none = gl.full([64, 128], 0.0, gl.float32, L)
    it = 0
    for tile in range(gl.program_id(0), tiles(ends, E, M, N, WGRAD), GRID):
        e, m, n, first, steps = where(tile, group, ends, E, M, N, K, WGRAD, 128)
        row, col = _corner(e, m, n, M, N, WGRAD, TRANS, G)
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
            if WGRAD:
                cols = sr.index(s).slice(0, 128).load(RIGHT)
            p = warpgroup_mma_wait(0, deps=(q,))
            if R >= 0:
                if WGRAD:
                    acc0 += p * gl.expand_dims(cols, 0) * gl.expand_dims(rows, 1)
                else:
                    acc0 += p * gl.expand_dims(rows * f0, 1)
            if second:
                q = warpgroup_mma(x, y.slice(128, 128).permute((1, 0)), none, use_acc=False, is_async=True)
                if WGRAD:
                    cols = sr.index(s).slice(128, 128).load(RIGHT)
                p = warpgroup_mma_wait(0, deps=(q,))
            if not WGRAD:
                mbarrier.arrive(empty.index(s), count=1)
            if second:
                if WGRAD:
                    acc1 += p * gl.expand_dims(cols, 0) * gl.expand_dims(rows, 1)
                else:
                    acc1 += p * gl.expand_dims(rows * f1, 1)
            if WGRAD:
                mbarrier.arrive(empty.index(s), count=1)
            it += 1
        _put(c, buf, acc0, row, col, 128, P, TRANS)
        _put(c, buf, acc1, row, col + 128, 128, P, TRANS)
    tma.store_wait(0)
