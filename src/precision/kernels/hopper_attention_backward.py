"""Gradients of `fp8_attention` on Hopper: two kernels, built as `hopper_attention`.

    _values    dv: own keys, over queries     x = k q^T      p = 448 2^(scale x - lse)       acc += p dO
    _scores    dq: own queries, over keys     x = q k^T      dp = dO v^T                     acc += dS k
               dk: own keys, over queries     x = k q^T      dp = v dO^T                     acc += dS q
                                              dS = 2^(scale x - lse) (dp - delta)

A stage has 128 positions. `_scores` makes dS of 64 of them at a time, because x, dp and acc [64, 192] fill the
registers. Both halves are then multiplied in one sum; it is added in FP32, or with `fast` stays in the tensor cores.
"""

import math

import torch
import torch.nn.functional as F
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

from precision.kernels.hopper_attention import (
    STAGES,
    across,
    along,
    as_operand,
    block_ids,
    by_rows,
    fetch,
    product,
    store,
    visible_keys,
)

_LOG2_E = math.log2(math.e)


@gluon.jit
def _seen_range(bounds, at, b, B, S, KEYS: gl.constexpr):
    """Return the ranges of positions that rows [at, at + 128) see, or as keys are seen by: from `first` on, by all from
    `whole` to `masked`, up to `end`."""
    if KEYS:
        behind = bounds + (B + b) * S
        first = at
        whole = at + 128
        masked = gl.maximum(gl.load(behind + at) // 128 * 128, whole)
        end = gl.load(behind + gl.minimum(at + 128, S) - 1)
    else:
        first, whole, masked, end = visible_keys(bounds + b * S, at, S, 128, 128)
    return first, whole, masked, end


@gluon.jit
def _own_limits(bounds, r, b, B, S, KEYS: gl.constexpr):
    """Return the first and the last position that each row sees, or as a key is seen by."""
    if KEYS:
        low = r
        high = gl.load(bounds + (B + b) * S + r, mask=r < S, other=0) - 1
    else:
        low = gl.load(bounds + b * S + r, mask=r < S, other=0)
        high = r
    return low, high


@gluon.jit
def _masked(p, low, high, at, L: gl.constexpr):
    """Return p [64, W] with zeros where a row does not see the columns from `at` on."""
    c = gl.expand_dims(at + gl.arange(0, p.shape[1], gl.SliceLayout(0, L)), 0)
    return gl.where((c >= gl.expand_dims(low, 1)) & (c <= gl.expand_dims(high, 1)), p, 0.0)


@gluon.jit
def _barriers(ST: gl.constexpr):
    """Return the barriers of a program's own operands, of filled stages and of stages that both groups have left."""
    full_own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_own, count=1)
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return full_own, full, empty


@gluon.jit
def _values_load(k1, k2, q1, q2, dt, lse, sk1, sk2, sq1, sq2, sd, sl, full_own, full, empty, bounds, B, S, SP,
                 H: gl.constexpr, D: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    at, b, h = block_ids(S, H, True)
    first, whole, masked, end = _seen_range(bounds, at, b, B, S, True)
    mbarrier.expect(full_own, 128 * D)
    fetch(k1, k2, b * S + at, h, full_own, sk1, sk2, D)
    it = 0
    for m in range(first, end, 128):
        s = it % ST
        bar = full.index(s)
        mbarrier.wait(empty.index(s), (it // ST & 1) ^ 1)
        mbarrier.expect(bar, 128 * D + 128 * 128 + 512)
        fetch(q1, q2, b * S + m, h, bar, sq1.index(s), sq2.index(s), D)
        tma.async_copy_global_to_shared(dt, [(b * H + h) * 128, m], bar, sd.index(s))
        tma.async_copy_global_to_shared(lse, [(b * H + h) * SP + m], bar, sl.index(s))
        it += 1


@gluon.jit
def _values_rows(dv, sk1, sk2, sq1, sq2, sd, sl, full_own, full, empty, q_inv, k_inv, dout_inv, bounds, B, S, scale,
                 H: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, G: gl.constexpr, FAST: gl.constexpr):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    at, b, h = block_ids(S, H, True)
    first, whole, masked, end = _seen_range(bounds, at, b, B, S, True)
    r = at + G * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
    low, high = _own_limits(bounds, r, b, B, S, True)
    scale *= gl.load(q_inv) * gl.load(k_inv)
    none = gl.full([64, 128], 0.0, gl.float32, L)
    acc = none
    a1 = sk1.slice(G * 64, 64)
    a2 = sk2.slice(G * 64, 64) if D > 128 else a1
    mbarrier.wait(full_own, 0)
    it = 0
    for m in range(first, end, 128):
        s = it % ST
        mbarrier.wait(full.index(s), it // ST & 1)
        x = product(a1, a2, sq1, sq2, s, none, D)
        lse_m = sl.index(s).load(gl.SliceLayout(0, L))
        x = warpgroup_mma_wait(0, deps=(x,))
        p = gl.exp2(x * scale - gl.expand_dims(lse_m - 8.807354922057604, 0))  # 448 p
        if (m < whole) | (m >= masked):
            p = _masked(p, low, high, m, L)
        a = as_operand(p.to(gl.float8e4nv), L)
        y = sd.index(s).permute((1, 0))
        if FAST:
            z = warpgroup_mma(a, y, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(z,))
        else:
            z = warpgroup_mma(a, y, none, use_acc=False, is_async=True)
            z = warpgroup_mma_wait(0, deps=(z,))
            acc = acc + z
        mbarrier.arrive(empty.index(s), count=1)
        it += 1
    store(dv, acc * (gl.load(dout_inv) / 448.0), r, b, h, S, H, 128, 0, L)


@gluon.jit
def _values_kernel(
    k1, k2, q1, q2, dt, lse, q_inv, k_inv, dout_inv, bounds, dv, B, S, SP, scale, H: gl.constexpr, D: gl.constexpr,
    ST: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    """Compute dv of a block of keys of a head. scale: with log2(e)."""
    sk1 = gl.allocate_shared_memory(k1.dtype, k1.block_shape, k1.layout)
    sq1 = gl.allocate_shared_memory(q1.dtype, [ST, q1.block_shape[0], q1.block_shape[1]], q1.layout)
    sd = gl.allocate_shared_memory(dt.dtype, [ST, dt.block_shape[0], dt.block_shape[1]], dt.layout)
    sl = gl.allocate_shared_memory(gl.float32, [ST, 128], lse.layout)
    sk2 = sk1
    sq2 = sq1
    if D > 128:
        sk2 = gl.allocate_shared_memory(k2.dtype, k2.block_shape, k2.layout)
        sq2 = gl.allocate_shared_memory(q2.dtype, [ST, q2.block_shape[0], q2.block_shape[1]], q2.layout)
    full_own, full, empty = _barriers(ST)
    gl.warp_specialize([
        (_values_rows, (dv, sk1, sk2, sq1, sq2, sd, sl, full_own, full, empty, q_inv, k_inv, dout_inv, bounds, B, S,
                        scale, H, D, ST, 0, FAST)),
        (_values_rows, (dv, sk1, sk2, sq1, sq2, sd, sl, full_own, full, empty, q_inv, k_inv, dout_inv, bounds, B, S,
                        scale, H, D, ST, 1, FAST)),
        (_values_load, (k1, k2, q1, q2, dt, lse, sk1, sk2, sq1, sq2, sd, sl, full_own, full, empty, bounds, B, S, SP, H,
                        D, ST)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _scores_load(o1, o2, ov, x1, x2, xv, t1, t2, lse, delta, so1, so2, sov, sx1, sx2, sxv, st1, st2, sl, full_own, full,
                 empty, bounds, B, S, SP, H: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
                 KEYS: gl.constexpr):  # fmt: skip
    at, b, h = block_ids(S, H, KEYS)
    first, whole, masked, end = _seen_range(bounds, at, b, B, S, KEYS)
    mbarrier.expect(full_own, 128 * D + 128 * 128)
    fetch(o1, o2, b * S + at, h, full_own, so1, so2, D)
    tma.async_copy_global_to_shared(ov, [b * S + at, h * 128], full_own, sov)
    it = 0
    for n in range(first, end, 128):
        s = it % ST
        bar = full.index(s)
        mbarrier.wait(empty.index(s), (it // ST & 1) ^ 1)
        mbarrier.expect(bar, 2 * 128 * D + 128 * 128 + (1024 if KEYS else 0))
        fetch(x1, x2, b * S + n, h, bar, sx1.index(s), sx2.index(s), D)
        tma.async_copy_global_to_shared(xv, [b * S + n, h * 128], bar, sxv.index(s))
        if KEYS:
            tma.async_copy_global_to_shared(lse, [(b * H + h) * SP + n], bar, sl.index(s * 2))
            tma.async_copy_global_to_shared(delta, [(b * H + h) * SP + n], bar, sl.index(s * 2 + 1))
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(t1, [(b * H + h) * D, n + i * 64], bar, st1.index(s * 2 + i))
            if D > 128:
                tma.async_copy_global_to_shared(t2, [(b * H + h) * D + 128, n + i * 64], bar, st2.index(s * 2 + i))
        it += 1


@gluon.jit
def _half(a1, a2, av, sx1, sx2, sxv, sl, s, none, low, high, lse_r, delta_r, largest, n, whole, masked, scale,
          dp_factor, delta_factor, L: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
          PART: gl.constexpr):  # fmt: skip
    """Return dS of 64 of a stage's columns in FP8, and the largest of each row."""
    x = warpgroup_mma(a1, sx1.index(s).slice(PART * 64, 64).permute((1, 0)), none, use_acc=False, is_async=True)
    if D > 128:
        x = warpgroup_mma(a2, sx2.index(s).slice(PART * 64, 64).permute((1, 0)), x, is_async=True)
    dp = warpgroup_mma(av, sxv.index(s).slice(PART * 64, 64).permute((1, 0)), none, use_acc=False, is_async=True)
    if KEYS:
        lse = gl.expand_dims(sl.index(s * 2).slice(PART * 64, 64).load(gl.SliceLayout(0, L)), 0)
        delta = gl.expand_dims(sl.index(s * 2 + 1).slice(PART * 64, 64).load(gl.SliceLayout(0, L)) * delta_factor, 0)
    else:
        lse = gl.expand_dims(lse_r, 1)
        delta = gl.expand_dims(delta_r, 1)
    x, dp = warpgroup_mma_wait(0, deps=(x, dp))
    p = gl.exp2(x * scale - lse)
    if (n < whole) | (n >= masked):
        p = _masked(p, low, high, n + PART * 64, L)
    ds = p * (dp * dp_factor - delta)
    if not KEYS:
        largest = gl.maximum(largest, gl.max(ds.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    return ds.to(gl.float8e5), largest


@gluon.jit
def _plus(acc, a, b, st, s, L: gl.constexpr, FAST: gl.constexpr):
    """Return acc + dS x of a stage. a, b: dS of its halves."""
    left = st.index(s * 2).permute((1, 0))
    right = st.index(s * 2 + 1).permute((1, 0))
    if FAST:
        y = warpgroup_mma(as_operand(a, L), left, acc, is_async=True)
        y = warpgroup_mma(as_operand(b, L), right, y, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(y,))
    else:
        none = gl.full([64, st.shape[1]], 0.0, gl.float32, L)
        y = warpgroup_mma(as_operand(a, L), left, none, use_acc=False, is_async=True)
        y = warpgroup_mma(as_operand(b, L), right, y, is_async=True)
        y = warpgroup_mma_wait(0, deps=(y,))
        acc = acc + y
    return acc


@gluon.jit
def _scores_rows(dx, so1, so2, sov, sx1, sx2, sxv, st1, st2, sl, full_own, full, empty, lse, delta, own_inv, other_inv,
                 v_inv, dout_inv, ds_scale, amax, bounds, B, S, SP, scale, H: gl.constexpr, D: gl.constexpr,
                 ST: gl.constexpr, G: gl.constexpr, KEYS: gl.constexpr, FAST: gl.constexpr):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    at, b, h = block_ids(S, H, KEYS)
    first, whole, masked, end = _seen_range(bounds, at, b, B, S, KEYS)
    r = at + G * 64 + gl.arange(0, 64, ROW)
    low, high = _own_limits(bounds, r, b, B, S, KEYS)
    factor = gl.load(ds_scale)
    logits = scale * 1.4426950408889634 * gl.load(own_inv) * gl.load(other_inv)
    delta_factor = gl.load(dout_inv) * factor
    dp_factor = delta_factor * gl.load(v_inv)
    lse_r = gl.full([64], 0.0, gl.float32, ROW)
    delta_r = lse_r
    if not KEYS:
        place = (b * H + h) * SP + r
        lse_r = gl.load(lse + place)
        delta_r = gl.load(delta + place) * delta_factor
    largest = gl.full([64], 0, gl.int32, ROW)
    none = gl.full([64, 64], 0.0, gl.float32, L)
    acc1 = gl.full([64, 128], 0.0, gl.float32, WIDE)
    acc2 = none
    a1 = so1.slice(G * 64, 64)
    a2 = so2.slice(G * 64, 64) if D > 128 else a1
    av = sov.slice(G * 64, 64)
    mbarrier.wait(full_own, 0)
    it = 0
    for n in range(first, end, 128):
        s = it % ST
        mbarrier.wait(full.index(s), it // ST & 1)
        a, largest = _half(a1, a2, av, sx1, sx2, sxv, sl, s, none, low, high, lse_r, delta_r, largest, n, whole, masked,
                           logits, dp_factor, delta_factor, L, D, KEYS, 0)  # fmt: skip
        c, largest = _half(a1, a2, av, sx1, sx2, sxv, sl, s, none, low, high, lse_r, delta_r, largest, n, whole, masked,
                           logits, dp_factor, delta_factor, L, D, KEYS, 1)  # fmt: skip
        acc1 = _plus(acc1, a, c, st1, s, WIDE, FAST)
        if D > 128:
            acc2 = _plus(acc2, a, c, st2, s, L, FAST)
        mbarrier.arrive(empty.index(s), count=1)
        it += 1
    result = scale * gl.load(other_inv) / factor
    store(dx, acc1 * result, r, b, h, S, H, D, 0, WIDE)
    if D > 128:
        store(dx, acc2 * result, r, b, h, S, H, D, 128, L)
    if not KEYS:
        exact = gl.max(largest, 0).to(gl.float32, bitcast=True) / factor
        gl.atomic_max(amax, exact.to(gl.int32, bitcast=True) & 0x7FFFFFFF, sem="relaxed")


@gluon.jit
def _scores_kernel(
    o1, o2, ov, x1, x2, xv, t1, t2, lse_tiles, delta_tiles, lse, delta, own_inv, other_inv, v_inv, dout_inv, ds_scale,
    amax, bounds, dx, B, S, SP, scale, H: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, KEYS: gl.constexpr,
    FAST: gl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries of a head, and raise amax; KEYS: dk of a block of keys."""
    so1 = gl.allocate_shared_memory(o1.dtype, o1.block_shape, o1.layout)
    sov = gl.allocate_shared_memory(ov.dtype, ov.block_shape, ov.layout)
    sx1 = gl.allocate_shared_memory(x1.dtype, [ST, x1.block_shape[0], x1.block_shape[1]], x1.layout)
    sxv = gl.allocate_shared_memory(xv.dtype, [ST, xv.block_shape[0], xv.block_shape[1]], xv.layout)
    st1 = gl.allocate_shared_memory(t1.dtype, [ST * 2, t1.block_shape[0], t1.block_shape[1]], t1.layout)
    sl = gl.allocate_shared_memory(gl.float32, [ST * 2, 128], lse_tiles.layout)
    so2 = so1
    sx2 = sx1
    st2 = st1
    if D > 128:
        so2 = gl.allocate_shared_memory(o2.dtype, o2.block_shape, o2.layout)
        sx2 = gl.allocate_shared_memory(x2.dtype, [ST, x2.block_shape[0], x2.block_shape[1]], x2.layout)
        st2 = gl.allocate_shared_memory(t2.dtype, [ST * 2, t2.block_shape[0], t2.block_shape[1]], t2.layout)
    full_own, full, empty = _barriers(ST)
    gl.warp_specialize([
        (_scores_rows, (dx, so1, so2, sov, sx1, sx2, sxv, st1, st2, sl, full_own, full, empty, lse, delta, own_inv,
                        other_inv, v_inv, dout_inv, ds_scale, amax, bounds, B, S, SP, scale, H, D, ST, 0, KEYS, FAST)),
        (_scores_rows, (dx, so1, so2, sov, sx1, sx2, sxv, st1, st2, sl, full_own, full, empty, lse, delta, own_inv,
                        other_inv, v_inv, dout_inv, ds_scale, amax, bounds, B, S, SP, scale, H, D, ST, 1, KEYS, FAST)),
        (_scores_load, (o1, o2, ov, x1, x2, xv, t1, t2, lse_tiles, delta_tiles, so1, so2, sov, sx1, sx2, sxv, st1, st2,
                        sl, full_own, full, empty, bounds, B, S, SP, H, D, ST, KEYS)),
    ], [4, 1], [240, 24])  # fmt: skip


def backward(
    dout8: Tensor, dout_inv: Tensor, q8: Tensor, q_inv: Tensor, k8: Tensor, k_inv: Tensor, v8: Tensor, v_inv: Tensor,
    dout_t: Tensor, qt: Tensor, kt: Tensor, bounds: Tensor, lse: Tensor, delta: Tensor, ds_scale: Tensor, amax: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, scale: float, fast: bool,
) -> None:  # fmt: skip
    """Write dq, dk and dv, and raise amax (as int32). The transposed copies are permuted. delta: sum(out dout8) [B, H,
    S]. ds_scale: of dS, known."""
    (B, H, S, D), rest = q8.shape, -q8.shape[2] % 128
    lse, delta = F.pad(lse * _LOG2_E, (0, rest), value=torch.inf), F.pad(delta, (0, rest))
    q, k, v, dout = by_rows(q8), by_rows(k8), by_rows(v8)[:1], by_rows(dout8)[:1]
    lines, grid, lengths = (along(lse), along(delta)), (-(-S // 128), B * H), (B, S, S + rest)
    _values_kernel[grid](  # pyright: ignore[reportIndexIssue]  (a type that `gluon.jit` hides)
        *k, *q, across(dout_t, 128, 128), lines[0], q_inv, k_inv, dout_inv, bounds, dv, *lengths, scale * _LOG2_E, H,
        D, STAGES, fast, num_warps=4,
    )  # fmt: skip
    for own, own_inv, own_v, x, x_inv, x_v, xt, dx, keys in (
        (k, k_inv, v, q, q_inv, dout, qt, dk, True),
        (q, q_inv, dout, k, k_inv, v, kt, dq, False),
    ):
        _scores_kernel[grid](  # pyright: ignore[reportIndexIssue]  (a type that `gluon.jit` hides)
            *own, *own_v, *x, *x_v, across(xt, 128, 64), across(xt, 64, 64), *lines, lse, delta, own_inv, x_inv,
            v_inv, dout_inv, ds_scale, amax, bounds, dx, *lengths, scale, H, D, STAGES, keys, fast, num_warps=4,
        )  # fmt: skip
