"""`fp8_attention` on Hopper, for heads of 192 or 128 features (values: 128), in blocks of 128 rows: one warp loads, two
groups of four warps compute, 64 rows each. Here the forward pass; `hopper_attention_backward` has the rest.

    x = q[64, D] k[128 keys, D]^T          tensor cores, from shared memory
    p = 2^(scale x - top + 8) in FP8       registers; meanwhile the next x
    y = p v[128 keys, 128]                 tensor cores, p from registers; a fresh product every 128 keys
    acc = acc 2^(top before - top) + y     FP32

The left operand of a product is in registers in another order than a result: of 16 columns a thread has 2c, 2c + 1,
8 + 2c, 9 + 2c of a result, and 4c to 4c + 3 of an operand. So P is read as an operand with permuted columns, which
moves nothing, and the positions of the right operand, the transposed copy, are permuted alike in memory:

    0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15

Tiles have powers of two, so 192 features are 128 and 64. A tile may reach into the next sequence or beyond the last;
what it has there is masked, or multiplied by a P of 0.

One H100, 4 x 16 x 4096, 192/128: forward 0.48 ms (720 TF/s; cuDNN in BF16 0.61), gradients of q, k and v 0.65, 0.67 and
0.42 ms. The tensor cores are busy for 42 to 50 % of that. Groups that take turns at them, as in FlashAttention-3, made
no difference.

The kernels are written in Gluon, which has no interpreter: on a CPU `fp8_attention`'s kernels replace them.
"""

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

from precision.kernels.hopper_gemm import layout

HEADS = {(192, 128), (128, 128)}
"""Head sizes of queries and keys, and of values."""
STAGES = 2


@gluon.jit
def visible_keys(bounds, at, S, M: gl.constexpr, N: gl.constexpr):
    """See `attention_tiles.keys_of`."""
    first = gl.load(bounds + at) // N * N
    last = gl.load(bounds + gl.minimum(at + M, S) - 1)
    diagonal = at // N * N
    whole = gl.maximum(gl.minimum((last + N - 1) // N * N, diagonal), first)
    return first, whole, diagonal, gl.minimum(at + M, S)


@gluon.jit
def block_ids(S, H: gl.constexpr, KEYS: gl.constexpr):
    """Return the first row of a program, its sequence and its head; the longest ranges first."""
    if KEYS:
        at = gl.program_id(0) * 128
    else:
        at = (gl.num_programs(0) - 1 - gl.program_id(0)) * 128
    return at, gl.program_id(1) // H, gl.program_id(1) % H


@gluon.jit
def fetch(x1, x2, row, h, bar, to1, to2, D: gl.constexpr):
    """Start to load 128 rows of the D features of head h into shared memory."""
    tma.async_copy_global_to_shared(x1, [row, h * D], bar, to1)
    if D > 128:
        tma.async_copy_global_to_shared(x2, [row, h * D + 128], bar, to2)


@gluon.jit
def product(a1, a2, sb1, sb2, s, none, D: gl.constexpr):
    """Start a b^T over D features."""
    x = warpgroup_mma(a1, sb1.index(s).permute((1, 0)), none, use_acc=False, is_async=True)
    if D > 128:
        x = warpgroup_mma(a2, sb2.index(s).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def as_operand(p8, L: gl.constexpr):
    """Return p8 [64, W], as an accumulator has it, as the left operand in registers: its columns are permuted, as
    those of the right operand in memory are."""
    W: gl.constexpr = p8.shape[1]
    x = gl.reshape(gl.permute(gl.reshape(p8, (64, W // 16, 2, 4, 2)), (0, 1, 3, 2, 4)), (64, W))
    return gl.convert_layout(x, gl.DotOperandLayout(operand_index=0, parent=L, k_width=4))


@gluon.jit
def store(to, x, r, b, h, S, H: gl.constexpr, WIDTH: gl.constexpr, AT: gl.constexpr, L: gl.constexpr):
    """Store x [64, W] in BF16 to [B, S, H, WIDTH], columns from AT on."""
    r = gl.convert_layout(r, gl.SliceLayout(1, L))
    c = gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    row = (b * S + r).to(gl.int64) * (H * WIDTH) + h * WIDTH + AT
    inside = gl.expand_dims(r < S, 1) & (gl.expand_dims(c, 0) >= 0)
    gl.store(to + gl.expand_dims(row, 1) + gl.expand_dims(c, 0), x.to(gl.bfloat16), mask=inside)


@gluon.jit
def _softmax(s, total, top, scale, m, start_m, n, whole, diagonal, L: gl.constexpr):
    """Return P in FP8, the new total and top, and the factor of earlier sums."""
    if (n < whole) | (n >= diagonal):
        key = n + gl.arange(0, 128, gl.SliceLayout(0, L))
        seen = (gl.expand_dims(key, 0) >= gl.expand_dims(start_m, 1)) & (gl.expand_dims(key, 0) <= gl.expand_dims(m, 1))
        s = gl.where(seen, s, -float("inf"))
    higher = gl.maximum(top, gl.max(s, 1))
    p = gl.exp2(s * scale - gl.expand_dims(higher * scale - 8.0, 1))
    shrink = gl.exp2((top - higher) * scale)
    return p.to(gl.float8e4nv), total * shrink + gl.sum(p, 1), higher, shrink


@gluon.jit
def _forward_load(q1, q2, k1, k2, vt, sq1, sq2, sk1, sk2, sv, full_q, full_k, empty_k, full_v, empty_v, bounds, S,
                  H: gl.constexpr, D: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    at, b, h = block_ids(S, H, False)
    first, whole, diagonal, end = visible_keys(bounds + b * S, at, S, 128, 128)
    mbarrier.expect(full_q, 128 * D)
    fetch(q1, q2, b * S + at, h, full_q, sq1, sq2, D)
    it = 0
    for n in range(first, end, 128):
        s = it % ST
        phase = (it // ST & 1) ^ 1
        mbarrier.wait(empty_k.index(s), phase)
        bar = full_k.index(s)
        mbarrier.expect(bar, 128 * D)
        fetch(k1, k2, b * S + n, h, bar, sk1.index(s), sk2.index(s), D)
        mbarrier.wait(empty_v.index(s), phase)
        bar = full_v.index(s)
        mbarrier.expect(bar, 128 * 128)
        tma.async_copy_global_to_shared(vt, [(b * H + h) * 128, n], bar, sv.index(s))
        it += 1


@gluon.jit
def _forward_rows(out, lse, sq1, sq2, sk1, sk2, sv, full_q, full_k, empty_k, full_v, empty_v, q_inv, k_inv, v_inv,
                  bounds, S, scale, H: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, G: gl.constexpr):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    at, b, h = block_ids(S, H, False)
    first, whole, diagonal, end = visible_keys(bounds + b * S, at, S, 128, 128)
    m = at + G * 64 + gl.arange(0, 64, ROW)
    start_m = gl.load(bounds + b * S + m, mask=m < S, other=0)
    scale *= gl.load(q_inv) * gl.load(k_inv)
    none = gl.full([64, 128], 0.0, gl.float32, L)
    acc = none
    total = gl.full([64], 0.0, gl.float32, ROW)
    top = gl.full([64], -1.0e15, gl.float32, ROW)  # finite, also times scale
    a1 = sq1.slice(G * 64, 64)
    a2 = sq2.slice(G * 64, 64) if D > 128 else a1
    mbarrier.wait(full_q, 0)
    mbarrier.wait(full_k.index(0), 0)
    x = product(a1, a2, sk1, sk2, 0, none, D)
    x = warpgroup_mma_wait(0, deps=(x,))
    mbarrier.arrive(empty_k.index(0), count=1)
    it = 0
    for n in range(first, end - 128, 128):
        s = it % ST
        ahead = (it + 1) % ST
        mbarrier.wait(full_k.index(ahead), (it + 1) // ST & 1)
        z = product(a1, a2, sk1, sk2, ahead, none, D)
        p8, total, top, shrink = _softmax(x, total, top, scale, m, start_m, n, whole, diagonal, L)
        mbarrier.wait(full_v.index(s), it // ST & 1)
        y = warpgroup_mma(as_operand(p8, L), sv.index(s).permute((1, 0)), none, use_acc=False, is_async=True)
        x, y = warpgroup_mma_wait(0, deps=(z, y))
        mbarrier.arrive(empty_k.index(ahead), count=1)
        mbarrier.arrive(empty_v.index(s), count=1)
        acc = acc * gl.expand_dims(shrink, 1) + y
        it += 1
    last = (end - 1) // 128 * 128
    p8, total, top, shrink = _softmax(x, total, top, scale, m, start_m, last, whole, diagonal, L)
    mbarrier.wait(full_v.index(it % ST), it // ST & 1)
    y = warpgroup_mma(as_operand(p8, L), sv.index(it % ST).permute((1, 0)), none, use_acc=False, is_async=True)
    y = warpgroup_mma_wait(0, deps=(y,))
    acc = acc * gl.expand_dims(shrink, 1) + y
    store(out, acc * gl.expand_dims(gl.load(v_inv) / total, 1), m, b, h, S, H, 128, 0, L)
    gl.store(
        lse + (b * H + h).to(gl.int64) * S + m, (top * scale + gl.log2(total) - 8.0) * 0.6931471805599453, mask=m < S
    )


@gluon.jit
def _forward_kernel(
    q1, q2, k1, k2, vt, q_inv, k_inv, v_inv, bounds, out, lse, S, scale, H: gl.constexpr, D: gl.constexpr,
    ST: gl.constexpr,
):  # fmt: skip
    sq1 = gl.allocate_shared_memory(q1.dtype, q1.block_shape, q1.layout)
    sk1 = gl.allocate_shared_memory(k1.dtype, [ST, k1.block_shape[0], k1.block_shape[1]], k1.layout)
    sv = gl.allocate_shared_memory(vt.dtype, [ST, vt.block_shape[0], vt.block_shape[1]], vt.layout)
    sq2 = sq1
    sk2 = sk1
    if D > 128:
        sq2 = gl.allocate_shared_memory(q2.dtype, q2.block_shape, q2.layout)
        sk2 = gl.allocate_shared_memory(k2.dtype, [ST, k2.block_shape[0], k2.block_shape[1]], k2.layout)
    full_q = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_k = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_q, count=1)
    for i in gl.static_range(ST):
        mbarrier.init(full_k.index(i), count=1)
        mbarrier.init(full_v.index(i), count=1)
        mbarrier.init(empty_k.index(i), count=2)
        mbarrier.init(empty_v.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_forward_rows, (out, lse, sq1, sq2, sk1, sk2, sv, full_q, full_k, empty_k, full_v, empty_v, q_inv, k_inv,
                         v_inv, bounds, S, scale, H, D, ST, 0)),
        (_forward_rows, (out, lse, sq1, sq2, sk1, sk2, sv, full_q, full_k, empty_k, full_v, empty_v, q_inv, k_inv,
                         v_inv, bounds, S, scale, H, D, ST, 1)),
        (_forward_load, (q1, q2, k1, k2, vt, sq1, sq2, sk1, sk2, sv, full_q, full_k, empty_k, full_v, empty_v, bounds,
                         S, H, D, ST)),
    ], [4, 1], [240, 24])  # fmt: skip


def forward(
    q8: Tensor, q_inv: Tensor, k8: Tensor, k_inv: Tensor, vt: Tensor, v_inv: Tensor, bounds: Tensor, out: Tensor,
    lse: Tensor, scale: float,
) -> None:  # fmt: skip
    """Write out and lse, to base e. vt: permuted. scale: with log2(e)."""
    B, H, S, D = q8.shape
    _forward_kernel[(-(-S // 128), B * H)](  # pyright: ignore[reportIndexIssue]  (a type that `gluon.jit` hides)
        *by_rows(q8), *by_rows(k8), across(vt, 128, 128), q_inv, k_inv, v_inv, bounds, out, lse, S, scale, H, D,
        STAGES, num_warps=4,
    )  # fmt: skip


def by_rows(x: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Describe FP8 x [B, H, S, D], in memory [B, S, H, D]: tiles of 128 positions of a head, its first 128 features and
    the other 64."""
    B, H, S, D = x.shape
    flat = x.transpose(1, 2).view(B * S, H * D)
    first = TensorDescriptor.from_tensor(flat, [128, 128], layout(8))
    return first, TensorDescriptor.from_tensor(flat, [128, 64], layout(8, 64)) if D > 128 else first


def across(xt: Tensor, features: int, positions: int) -> TensorDescriptor:
    """Describe a transposed copy [B, H, W, S'] by tiles."""
    return TensorDescriptor.from_tensor(xt.view(-1, xt.shape[-1]), [features, positions], layout(8, positions))


def along(x: Tensor) -> TensorDescriptor:
    """Describe numbers of positions [B, H, S'] by rows of 128."""
    return TensorDescriptor.from_tensor(x.view(-1), [128], layout(32, 0, 1))
