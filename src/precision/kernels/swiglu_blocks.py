"""SwiGLU's backward pass with BLOCK scales, everything from one reading: what `swiglu` and `cast` do in five passes.

A program has a tile of 128 rows x 128 columns, all that shares a scale in either direction, in four parts of 32 rows
(r = 4 r4 + i). A row of a part is complete, so [dg, du] is cast into rows at once. What the transposed copies are cast
from waits in registers until the columns' scales are known: dg and du as a pair of BF16 in a word, h as the FP8 numbers
that the forward pass made of it, four rows in a word.

The arithmetic takes as long as the memory unless it is counted. So maxima are taken of pairs (16-bit integers: |x| in
BF16 sorts like the number, and NaN is the largest), and FP8 is converted straight into words, as the hardware has it:
two numbers an instruction, merged into a half of a register.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.common import (
    ON_GPU,
    Cast,
    abs_bits,
    amax_along,
    as_bf16,
    as_bits,
    as_bytes,
    as_words,
    byte,
    inverse,
    padded_rows,
    scale_of,
    to_fp8,
    unbyte,
)
from precision.kernels.swiglu import exact_gradients, weights_of


@triton.jit
def _pair(low, high):
    """Two numbers FP32 as BF16 in a word."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        high_bits = as_bf16(high).to(tl.int32, bitcast=True) & -65536
        return high_bits | ((as_bf16(low).to(tl.int32, bitcast=True) >> 16) & 0xFFFF)


@triton.jit
def _low(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _larger(a, b):
    """Larger magnitudes, BF16, of either half, NaN if there is one; their signs mean nothing."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000) | tl.maximum(a & 0x7FFF, b & 0x7FFF)


@triton.jit
def _larger_of_two(a, b):
    """The larger magnitude, FP32, or NaN."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(words, axis: tl.constexpr):
    """Largest magnitudes of either half along an axis."""
    if ON_GPU:
        return tl.reduce(words, axis, _larger) & 0x7FFF7FFF
    else:
        return tl.max(words & 0x7FFF0000, axis) | tl.max(words & 0x7FFF, axis)


@triton.jit
def _word(x0, x1, x2, x3, F8: tl.constexpr, LIMIT: tl.constexpr):
    """Four rows FP32 as words of FP8, `settled`."""
    if ON_GPU:
        if LIMIT == 448.0:
            return tl.inline_asm_elementwise(
                """{ .reg .b16 low, high;
                cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
                cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
                mov.b32 $0, {low, high}; }""",
                "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{ .reg .b16 low, high;
                cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
                cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
                mov.b32 $0, {low, high}; }""",
                "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    else:
        words = byte(to_fp8(x0, F8, LIMIT), 0) | byte(to_fp8(x1, F8, LIMIT), 1)
        return words | byte(to_fp8(x2, F8, LIMIT), 2) | byte(to_fp8(x3, F8, LIMIT), 3)


@triton.jit
def _shift_in(words, x, F8: tl.constexpr, LIMIT: tl.constexpr):
    """words with a row FP32 added as the last of four, the first one dropped."""
    if ON_GPU:
        if LIMIT == 448.0:
            return tl.inline_asm_elementwise(
                """{ .reg .b16 t; .reg .b32 u; .reg .f32 z;
                mov.f32 z, 0f00000000;
                cvt.rn.satfinite.e4m3x2.f32 t, z, $2;
                cvt.u32.u16 u, t;
                prmt.b32 $0, $1, u, 0x4321; }""",
                "=r,r,f", [words, x], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{ .reg .b16 t; .reg .b32 u; .reg .f32 z;
                mov.f32 z, 0f00000000;
                cvt.rn.satfinite.e5m2x2.f32 t, z, $2;
                cvt.u32.u16 u, t;
                prmt.b32 $0, $1, u, 0x4321; }""",
                "=r,r,f", [words, x], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
    else:
        return ((words >> 8) & 0x00FFFFFF) | byte(to_fp8(x, F8, LIMIT), 3)


@triton.jit
def _four_rows(words, F8: tl.constexpr, LIMIT: tl.constexpr):
    """The numbers in words of FP8."""
    if ON_GPU:
        if LIMIT == 448.0:
            return tl.inline_asm_elementwise(
                """{ .reg .b16 a, b, r, s, t, u; .reg .b32 p, q;
                mov.b32 {a, b}, $4;
                cvt.rn.f16x2.e4m3x2 p, a;
                cvt.rn.f16x2.e4m3x2 q, b;
                mov.b32 {r, s}, p;
                mov.b32 {t, u}, q;
                cvt.f32.f16 $0, r; cvt.f32.f16 $1, s; cvt.f32.f16 $2, t; cvt.f32.f16 $3, u; }""",
                "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{ .reg .b16 a, b, r, s, t, u; .reg .b32 p, q;
                mov.b32 {a, b}, $4;
                cvt.rn.f16x2.e5m2x2 p, a;
                cvt.rn.f16x2.e5m2x2 q, b;
                mov.b32 {r, s}, p;
                mov.b32 {t, u}, q;
                cvt.f32.f16 $0, r; cvt.f32.f16 $1, s; cvt.f32.f16 $2, t; cvt.f32.f16 $3, u; }""",
                "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
    else:
        return (
            unbyte(words, 0).to(F8, bitcast=True).to(tl.float32),
            unbyte(words, 1).to(F8, bitcast=True).to(tl.float32),
            unbyte(words, 2).to(F8, bitcast=True).to(tl.float32),
            unbyte(words, 3).to(F8, bitcast=True).to(tl.float32),
        )


@triton.jit
def _bytes(x, F8: tl.constexpr, LIMIT: tl.constexpr):
    """FP32 as FP8."""
    if ON_GPU:
        if LIMIT == 448.0:
            return tl.inline_asm_elementwise(
                """{ .reg .b16 low, high;
                cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
                cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
                mov.b32 $0, {low, high}; }""",
                "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{ .reg .b16 low, high;
                cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
                cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
                mov.b32 $0, {low, high}; }""",
                "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4,
            )  # fmt: skip
    else:
        return to_fp8(x, F8, LIMIT).to(tl.uint8, bitcast=True)


@triton.jit
def _read(dh, y, r4, c, left, i, F: tl.constexpr, GROUPS: tl.constexpr):
    """Rows 4 r4 + i of dh, g and u of a tile. Experts' rows end at a multiple of 128, so that none lie outside."""
    r = (r4 * 4)[:, None]
    dh += r * F + c + i * F
    y += r * (2 * F) + c + i * 2 * F
    if GROUPS > 0:
        return tl.load(dh), tl.load(y), tl.load(y + F)
    else:
        inside = r + i < left
        return tl.load(dh, mask=inside, other=0), tl.load(y, mask=inside, other=0), tl.load(y + F, mask=inside, other=0)


@triton.jit
def _rows(
    one, g, u, w, d, r4, c, left, i, F: tl.constexpr,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """Rows 4 r4 + i of a tile: writes [dg, du] in FP8 -> dg and du in words, h, the weights' gradients, and the largest
    of the rows of dg and du in words."""
    dg, du, h, addend = exact_gradients(one.to(tl.float32), g.to(tl.float32), u.to(tl.float32), w[:, None])
    both = _pair(dg, du)
    top = _largest(both, 1)
    d += (r4 * 4)[:, None] * (2 * F) + c + i * 2 * F
    inside = (r4 * 4 + i < left)[:, None]
    scale = scale_of(_low(top), LIMIT, HEADROOM, POW2)[:, None]
    tl.store(d, _bytes(_low(both) * scale, F8, LIMIT), mask=inside)
    scale = scale_of(_high(top), LIMIT, HEADROOM, POW2)[:, None]
    tl.store(d + F, _bytes(_high(both) * scale, F8, LIMIT), mask=inside)
    return both, h, tl.sum(addend, 1), top


@triton.jit
def _in_order(x0, x1, x2, x3):
    """Values of rows 4 r4 + i, one after the other."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (128,))


@triton.jit(do_not_specialize=["R"])  # one row compiled apart gave wrong results on the GPU
def _blocks_kernel(
    dh, y, d, dt, ht, dw, weight, ends, amax, inv, inv_t, inv_h, R, R4, F: tl.constexpr,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    H8: tl.constexpr, H_LIMIT: tl.constexpr, H_HEADROOM: tl.constexpr, GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    busy = True
    if GROUPS > 0:
        busy = tl.program_id(1) * 128 < tl.load(ends + GROUPS - 1)
    if busy:
        row, column = tl.program_id(1).to(tl.int64) * 128, tl.program_id(0).to(tl.int64)
        left = R - tl.program_id(1) * 128
        dh += row * F
        y += row * (2 * F)
        d += row * (2 * F)
        inv += column * R + row
        weight += row
        dw += column * R + row
        r4 = tl.arange(0, 32)
        columns = tl.max_contiguous(tl.program_id(0) * 128 + tl.arange(0, 128), 8)  # 16 bytes of BF16
        c = columns[None, :]
        w0 = weights_of(weight, r4 * 4, left, GROUPS)
        w1 = weights_of(weight, r4 * 4 + 1, left, GROUPS)
        w2 = weights_of(weight, r4 * 4 + 2, left, GROUPS)
        w3 = weights_of(weight, r4 * 4 + 3, left, GROUPS)
        words = tl.zeros((32, 128), tl.int32)
        d0, d1, d2, d3 = words, words, words, words
        top0 = tl.zeros((32,), tl.int32)
        top1, top2, top3 = top0, top0, top0
        dw0 = tl.zeros((32,), tl.float32)
        dw1, dw2, dw3 = dw0, dw0, dw0
        scale0, scale1, scale2, scale3 = dw0, dw0, dw0, dw0
        # a loop that is not unrolled: the compiler would work on all parts at once and run out of registers
        for i in tl.range(4, num_stages=STAGES):
            one, g, u = _read(dh, y, r4, c, left, i, F, GROUPS)
            w = tl.where(i < 2, tl.where(i == 0, w0, w1), tl.where(i == 2, w2, w3))
            d0, d1, d2 = d1, d2, d3
            dw0, dw1, dw2 = dw1, dw2, dw3
            top0, top1, top2 = top1, top2, top3
            scale0, scale1, scale2 = scale1, scale2, scale3
            d3, h, dw3, top3 = _rows(one, g, u, w, d, r4, c, left, i, F, F8, LIMIT, HEADROOM, POW2)
            h = as_bf16(h)
            scale3 = scale_of(amax_along(h, 1), H_LIMIT, H_HEADROOM, POW2)
            words = _shift_in(words, h * scale3[:, None], H8, H_LIMIT)

        r = tl.arange(0, 128)
        top = _in_order(top0, top1, top2, top3)
        tl.store(inv + r, inverse(scale_of(_low(top), LIMIT, HEADROOM, POW2), POW2), mask=r < left)
        inv += R.to(tl.int64) * (F // 128)
        tl.store(inv + r, inverse(scale_of(_high(top), LIMIT, HEADROOM, POW2), POW2), mask=r < left)
        if GROUPS > 0:
            tl.store(dw + r, _in_order(dw0, dw1, dw2, dw3))
        tl.atomic_max(amax, tl.max(tl.maximum(abs_bits(_low(top)), abs_bits(_high(top)))), sem="relaxed")
        top = _largest(_larger(_larger(d0, d1), _larger(d2, d3)), 0)
        tile = tl.program_id(1).to(tl.int64)
        inv_t += tile * (2 * F)
        ht += row // 4
        dt += row // 4
        t = columns[:, None].to(tl.int64) * R4 + r4[None, :]
        s = scale_of(_low(top), LIMIT, HEADROOM, POW2)
        tl.store(inv_t + columns, inverse(s, POW2))
        s = s[None, :]
        words_t = _word(_low(d0) * s, _low(d1) * s, _low(d2) * s, _low(d3) * s, F8, LIMIT)
        tl.store(dt + t, tl.trans(words_t))
        s = scale_of(_high(top), LIMIT, HEADROOM, POW2)
        tl.store(inv_t + F + columns, inverse(s, POW2))
        s = s[None, :]
        words_t = _word(_high(d0) * s, _high(d1) * s, _high(d2) * s, _high(d3) * s, F8, LIMIT)
        tl.store(dt + R4.to(tl.int64) * F + t, tl.trans(words_t))

        x0, x1, x2, x3 = _four_rows(words, H8, H_LIMIT)
        x0 *= inverse(scale0, POW2)[:, None]
        x1 *= inverse(scale1, POW2)[:, None]
        x2 *= inverse(scale2, POW2)[:, None]
        x3 *= inverse(scale3, POW2)[:, None]
        most = abs_bits(_larger_of_two(_larger_of_two(x0, x1), _larger_of_two(x2, x3)))
        s = scale_of(tl.max(most, 0).to(tl.float32, bitcast=True), H_LIMIT, H_HEADROOM, POW2)
        tl.store(inv_h + tile * F + columns, inverse(s, POW2))
        s = s[None, :]
        tl.store(ht + t, tl.trans(_word(x0 * s, x1 * s, x2 * s, x3 * s, H8, H_LIMIT)))


def swiglu_backward_blocks(
    dh: Tensor, y: Tensor, weight: Tensor | None, ends: Tensor | None, amax: Tensor, how: Cast, how_h: Cast
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dh [R, F], y [R, 2F] BF16, F a multiple of 128; weight [R] FP32 and ends [E] of the experts' rows (None: plain
    rows) -> FP8, each with its inverse scales: d [R, 2F] and [R, 2F / 128] (a view of [2F / 128, R]), d_t [2F, R'] and
    [R' / 128, 2F], h_t [F, R'] and [R' / 128, F]; the weights' gradients in parts [F / 128, R] FP32. Raises the arena
    row `amax`."""
    R, F = dh.shape
    Rt, columns = padded_rows(R), F // 128
    new = {"device": dh.device, "dtype": torch.float32}
    d = torch.empty(R, 2 * F, device=dh.device, dtype=how.fmt.dtype)
    dt = torch.empty(2 * F, Rt, device=dh.device, dtype=how.fmt.dtype)
    ht = torch.empty(F, Rt, device=dh.device, dtype=how_h.fmt.dtype)
    inv, inv_t = torch.empty(2 * columns, R, **new), torch.empty(Rt // 128, 2 * F, **new)
    inv_h = torch.empty(Rt // 128, F, **new)
    dw = torch.empty(columns if weight is not None else 0, R, **new)
    _blocks_kernel[(columns, Rt // 128)](
        dh, y, as_bytes(d), as_words(dt), as_words(ht), dw, weight if weight is not None else y,
        ends if ends is not None else y, as_bits(amax), inv, inv_t, inv_h, R, Rt // 4, F,
        **how.constants, H8=how_h.constants["F8"], H_LIMIT=how_h.fmt.max, H_HEADROOM=2.0**how_h.margin,
        GROUPS=0 if ends is None else ends.shape[0], STAGES=3, num_warps=8, maxnreg=128,
    )  # fmt: skip
    return d, inv.t(), dt, inv_t, ht, inv_h, dw
