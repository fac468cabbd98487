"""SwiGLU's backward pass with BLOCK scales in one launch; the equations are in `swiglu`.

Three programs share a tile of 128 x 128 of h's gradient, gate and up: one casts the gate's gradient, one up's (both in
blocks along rows and along columns), one h again (along columns). The second and third read the tile from L2. One
program for all three has too few threads for its registers: loads wait while it computes. In passes of its own, with
[dg, du] and h in BF16 between them, this moves 23 bytes per element of h instead of 11.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.cast import cast_tile
from precision.kernels.common import Cast, as_bits, as_words, cdiv, padded_rows
from precision.kernels.swiglu import given, gradients, groups, read, rows_left, weights_of


@triton.jit
def _narrow(x):
    """Return BF16 of FP32 numbers that are BF16 already: half of the registers."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _value(
    dh, y, y_inv, weight, r, c, block, R, F, GROUPS: tl.constexpr, NARROW: tl.constexpr, WHICH: tl.constexpr,
):  # fmt: skip
    """Return one of dg, du and h for rows and columns, BF16, and the addends of the weight's gradient, summed."""
    w = weights_of(weight, r, R, GROUPS)
    one, g, u = read(dh, y, y_inv, r, c, block, R, F, NARROW)
    results = gradients(one.to(tl.float32), g.to(tl.float32), u.to(tl.float32), w[:, None])
    return _narrow(results[WHICH]), tl.sum(results[3], 1)


@triton.jit
def _values(
    dh, y, y_inv, weight, r, c, block, R, F, GROUPS: tl.constexpr, NARROW: tl.constexpr, WHICH: tl.constexpr,
):  # fmt: skip
    v0, s0 = _value(dh, y, y_inv, weight, r, c, block, R, F, GROUPS, NARROW, WHICH)
    v1, s1 = _value(dh, y, y_inv, weight, r + 1, c, block, R, F, GROUPS, NARROW, WHICH)
    v2, s2 = _value(dh, y, y_inv, weight, r + 2, c, block, R, F, GROUPS, NARROW, WHICH)
    v3, s3 = _value(dh, y, y_inv, weight, r + 3, c, block, R, F, GROUPS, NARROW, WHICH)
    return (v0, v1, v2, v3), (s0, s1, s2, s3)


@triton.jit(do_not_specialize=["R"])
def _backward_kernel(
    dh, y, y_inv, d, dt, ht, dw, weight, ends, amax, inv, inv_t, inv_ht, R, F, R4, COLUMNS,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    H8: tl.constexpr, H_LIMIT: tl.constexpr, GROUPS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0) % 3
    tile = tl.program_id(0) // 3  # one axis, since the second axis of a grid is limited to 65,535
    row = tile // COLUMNS
    column = tile % COLUMNS
    if row * 128 < rows_left(ends, R4 * 4, GROUPS):
        r = row * 128 + tl.arange(0, 32) * 4
        c = column * 128 + tl.arange(0, 128)
        if which == 0:
            parts, _ = _values(dh, y, y_inv, weight, r, c, column, R, F, GROUPS, NARROW, 0)
            cast_tile(
                parts, d, dt, amax, inv, inv_t, row, column, R, 2 * F, R4,
                F8, LIMIT, HEADROOM, POW2, True, True, False,
            )  # fmt: skip
        elif which == 1:
            parts, _ = _values(dh, y, y_inv, weight, r, c, column, R, F, GROUPS, NARROW, 1)
            cast_tile(
                parts, d, dt, amax, inv, inv_t, row, COLUMNS + column, R, 2 * F, R4,
                F8, LIMIT, HEADROOM, POW2, True, True, False,
            )  # fmt: skip
        else:
            parts, sums = _values(dh, y, y_inv, weight, r, c, column, R, F, GROUPS, NARROW, 2)
            if GROUPS > 0:
                for i in tl.static_range(4):
                    tl.store(dw + column.to(tl.int64) * R + r + i, sums[i])
            cast_tile(
                parts, ht, ht, None, inv_ht, inv_ht, row, column, R, F, R4,
                H8, H_LIMIT, HEADROOM, POW2, False, True, True,
            )  # fmt: skip


def swiglu_backward_blocks(
    dh: Tensor, y: Tensor, weight: Tensor | None, ends: Tensor | None, amax: Tensor, how: Cast, how_h: Cast,
    y_inv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return d [R, 2F] FP8 and its inverse scales [R, 2F / 128], d_t [2F, R'] and [R' / 128, 2F], h_t [F, R'] and [R' /
    128, F], and the weights' gradients in parts [F / 128, R] FP32. Raises the arena row `amax` of d.

    dh [R, F], y [R, 2F] BF16, or E4M3 with y_inv as `swiglu` returned them, F a multiple of 128. The results are the
    bits of `swiglu_backward_rows` in BF16 and `cast_blocks`, with h's copy cast from its FP8 numbers.
    """
    (R, F), device = dh.shape, dh.device
    Rt, columns = padded_rows(R), cdiv(F, 128)
    assert F % 128 == 0 and (how.margin, how.power_of_two) == (how_h.margin, how_h.power_of_two)
    d = torch.empty(R, 2 * F, device=device, dtype=how.fmt.dtype)
    dt = torch.empty(2 * F, Rt, device=device, dtype=how.fmt.dtype)
    ht = torch.empty(F, Rt, device=device, dtype=how_h.fmt.dtype)
    inv = torch.empty(2 * columns, R, device=device)
    inv_t = torch.empty(Rt // 128, 2 * F, device=device)
    inv_ht = torch.empty(Rt // 128, F, device=device)
    dw = torch.empty(columns if weight is not None else 0, R, device=device)
    _backward_kernel[(3 * columns * (Rt // 128),)](
        dh, y, given(y_inv, y), d, as_words(dt), as_words(ht), dw, given(weight, y), given(ends, y), as_bits(amax), inv,
        inv_t, inv_ht, R, F, Rt // 4, columns, **how.constants, H8=how_h.constants["F8"], H_LIMIT=how_h.fmt.max,
        GROUPS=groups(ends), NARROW=y_inv is not None, num_warps=8, maxnreg=128,
    )  # fmt: skip
    return d, inv.t(), dt, inv_t, ht, inv_ht, dw
