"""SwiGLU (arXiv 2002.05202) with a fused cast, forward and backward, and a router's weight for each row.

    forward   h = silu(g) u w                                                     [g, u] = the GEMM's two halves
    backward  dg = dh w u s (1 + g (1 - s)),  du = dh w silu(g),  dw = sum of dh silu(g) u,   s = sigmoid(g)

The backward pass makes the operands of four products: [dg, du] in FP8 for the input gradient, its transposed copy and
h's for the weight gradients. h is recomputed, so that only the GEMM's result is saved: in BF16, or in E4M3 with scales
of 1 x 128 numbers, powers of two (`narrow`). With ROW scales a row is in registers, and operands to be transposed are
written as rows first; with BLOCK scales the pass returns BF16 to `cast`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.formats import E4M3
from precision.kernels import const
from precision.kernels.common import (
    STRIPS,
    Cast,
    abs_bits,
    amax_along,
    as_bf16,
    as_bits,
    as_bytes,
    as_words,
    byte,
    cdiv,
    inverse,
    inverse_of_row,
    is_known,
    padded_rows,
    power_of_2,
    row_warps,
    scale_of,
    settled,
    sigmoid,
    tensor_scale,
    to_fp8,
    unbyte,
)

_PLAIN = Cast.parse("e4m3:1:0:0:0")  # compile-time values of kernels that do not cast


@triton.jit
def _activate(g, u, w):
    return as_bf16(g * sigmoid(g) * u * w)


@triton.jit
def gradients(dh, g, u, w):
    """Return d gate, d up, h, and the addends of the weight's gradient."""
    s = sigmoid(g)
    silu = g * s
    hu = silu * u
    d = dh * w
    return as_bf16(d * u * (s + silu * (1.0 - s))), as_bf16(d * silu), as_bf16(hu * w), dh * hu


@triton.jit
def rows_left(ends, R, GROUPS: tl.constexpr):
    if GROUPS > 0:
        return tl.load(ends + GROUPS - 1)
    return R


@triton.jit
def weights_of(weight, r, R, GROUPS: tl.constexpr):
    """Load the router's weights, or 1."""
    if GROUPS > 0:
        return tl.load(weight + r, mask=r < R, other=0.0)
    return tl.full(r.shape, 1.0, tl.float32)


@triton.jit
def _activated(y, weight, r, c, R, F, GROUPS: tl.constexpr):
    """Return the result for rows and columns, and which of them exist."""
    inside = (r < R)[:, None] & (c < F)[None, :]
    i = r[:, None].to(tl.int64) * (2 * F) + c[None, :]
    w = weights_of(weight, r, R, GROUPS)
    g = tl.load(y + i, mask=inside, other=0).to(tl.float32)
    u = tl.load(y + i + F, mask=inside, other=0).to(tl.float32)
    return _activate(g, u, w[:, None]), inside, g, u


@triton.jit
def _save(x, y8, y_inv, r, i, inside, block, R, F, F8: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Save a tile of gate or up at positions i, in blocks of 1 x 128: of F columns those from number `block` on."""
    parts = tl.reshape(x, (BR * (BC // 128), 128))
    scale = scale_of(amax_along(parts, 1), 448.0, 1.0, True)
    x8 = to_fp8(tl.reshape(parts * scale[:, None], (BR, BC)), F8, 448.0)
    tl.store(y8 + i, x8, mask=inside)
    b = block + tl.arange(0, BC // 128)
    at = y_inv + b[None, :].to(tl.int64) * R + r[:, None]
    tl.store(at, tl.reshape(inverse(scale, True), (BR, BC // 128)), mask=(b * 128 < F)[None, :] & (r < R)[:, None])


@triton.jit
def read(dh, y, y_inv, r, c, block, R, F, NARROW: tl.constexpr):
    """Load h's gradient, gate and up for rows and columns, unconverted unless NARROW. block: of 128 columns, that c is
    in."""
    r64 = r[:, None].to(tl.int64)
    inside = (r < R)[:, None] & (c < F)[None, :]
    o = r64 * (2 * F) + c[None, :]
    one = tl.load(dh + r64 * F + c[None, :], mask=inside, other=0)
    g, u = tl.load(y + o, mask=inside, other=0.0), tl.load(y + o + F, mask=inside, other=0.0)
    if NARROW:
        at = y_inv + tl.cast(block, tl.int64) * R + r
        g = g.to(tl.float32) * tl.load(at, mask=r < R, other=0)[:, None]
        u = u.to(tl.float32) * tl.load(at + tl.cdiv(F, 128).to(tl.int64) * R, mask=r < R, other=0)[:, None]
    return one, g, u


@triton.jit
def _changed(dh, y, y_inv, weight, r, c, block, R, F, GROUPS: tl.constexpr, NARROW: tl.constexpr):
    """Return `gradients` for rows and columns."""
    w = weights_of(weight, r, R, GROUPS)
    one, g, u = read(dh, y, y_inv, r, c, block, R, F, NARROW)
    return gradients(one.to(tl.float32), g.to(tl.float32), u.to(tl.float32), w[:, None])


@triton.jit
def _amax_kernel(
    dh, y, y_inv, weight, ends, scale_row, own, R, F, COLUMNS, DELAYED: tl.constexpr, BACKWARD: tl.constexpr,
    GROUPS: tl.constexpr, NARROW: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the amax into `own`, unless the scale is known: of the result, or (BACKWARD) of the gradients of gate and
    up."""
    if not is_known(scale_row, DELAYED):
        largest = tl.zeros((BR, BC), tl.int32)
        tiles = tl.cdiv(rows_left(ends, R, GROUPS), BR) * COLUMNS
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            r = tile // COLUMNS * BR + tl.arange(0, BR)
            c = tile % COLUMNS * BC + tl.arange(0, BC)
            if BACKWARD:
                block = tile % COLUMNS * BC // 128
                dg, du, _, _ = _changed(dh, y, y_inv, weight, r, c, block, R, F, GROUPS, NARROW)
                largest = tl.maximum(largest, tl.maximum(abs_bits(dg), abs_bits(du)))
            else:
                largest = tl.maximum(largest, abs_bits(_activated(y, weight, r, c, R, F, GROUPS)[0]))
        tl.atomic_max(own, tl.max(largest), sem="relaxed")


@triton.jit
def _forward_kernel(
    y, y8, y_inv, h, weight, ends, scale_row, own, amax, inv, R, F, COLUMNS,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    MODE: tl.constexpr, GROUPS: tl.constexpr, NARROW: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // COLUMNS  # of tiles; one axis, since the second axis of a grid is limited to 65,535
    column = tl.program_id(0) % COLUMNS
    if row * BR < rows_left(ends, R, GROUPS):
        r = row * BR + tl.arange(0, BR)
        c = column * BC + tl.arange(0, BC)
        v, inside, g, u = _activated(y, weight, r, c, R, F, GROUPS)
        if NARROW:
            i = r[:, None].to(tl.int64) * (2 * F) + c[None, :]
            block = column * BC // 128
            _save(g, y8, y_inv, r, i, inside, block, R, F, F8, BR, BC)
            _save(u, y8, y_inv + tl.cdiv(F, 128).to(tl.int64) * R, r, i + F, inside, block, R, F, F8, BR, BC)
        o = r[:, None].to(tl.int64) * F + c[None, :]
        if MODE == 0:
            tl.store(h + o, v.to(tl.bfloat16), mask=inside)
        elif MODE == const.TENSOR:
            scale = tensor_scale(scale_row, own, LIMIT, HEADROOM, POW2, DELAYED)
            tl.store(h + o, to_fp8(v * scale, F8, LIMIT), mask=inside)
            tl.atomic_max(amax, tl.max(abs_bits(v)), sem="relaxed")
            if tl.program_id(0) == 0:
                tl.store(inv, inverse(scale))
                tl.store(inv + 1, scale)
        else:  # the tile is as wide as the block that shares a scale
            top = amax_along(v, 1)
            scale = scale_of(top, LIMIT, HEADROOM, POW2)
            tl.store(h + o, to_fp8(v * scale[:, None], F8, LIMIT), mask=inside)
            one = inverse_of_row(scale, top) if MODE == const.ROW else inverse(scale)
            tl.store(inv + column.to(tl.int64) * R + r, one, mask=r < R)
            tl.atomic_max(amax, tl.max(abs_bits(top)), sem="relaxed")


@triton.jit
def _backward_kernel(
    dh, y, y_inv, d, dt, ht, dw, weight, ends, scale_row, own, amax, inv, h_scale, R, F, R4, COLUMNS,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    H8: tl.constexpr, H_LIMIT: tl.constexpr, GROUPS: tl.constexpr, NARROW: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute [dg, du], its transposed copy and h's, in FP8 with one scale per tensor. All loads come before all
    stores."""
    row = tl.program_id(0) // COLUMNS  # of tiles; one axis, since the second axis of a grid is limited to 65,535
    column = tl.program_id(0) % COLUMNS
    if row * BR < rows_left(ends, R4 * 4, GROUPS):  # plain rows: up to the end of the transposed copies
        r4 = row * (BR // 4) + tl.arange(0, BR // 4)
        c = column * BC + tl.arange(0, BC)
        wg = tl.zeros((BR // 4, BC), tl.int32)
        wu = tl.zeros((BR // 4, BC), tl.int32)
        wh = tl.zeros((BR // 4, BC), tl.int32)
        largest = tl.zeros((BR // 4, BC), tl.int32)
        sums = tl.zeros((BR // 4, 4), tl.float32)
        j = tl.arange(0, 4)[None, :]
        scale = tensor_scale(scale_row, own, LIMIT, HEADROOM, POW2, DELAYED)
        scale_h = tl.load(h_scale)
        for i in tl.static_range(4):
            block = column * BC // 128
            dg, du, h, addend = _changed(dh, y, y_inv, weight, r4 * 4 + i, c, block, R, F, GROUPS, NARROW)
            largest = tl.maximum(largest, tl.maximum(abs_bits(dg), abs_bits(du)))
            if GROUPS > 0:
                sums += tl.where(j == i, tl.sum(addend, 1)[:, None], 0.0)
            wg |= byte(to_fp8(dg * scale, F8, LIMIT), i)
            wu |= byte(to_fp8(du * scale, F8, LIMIT), i)
            wh |= byte(to_fp8(h * scale_h, H8, H_LIMIT), i)
        tl.atomic_max(amax, tl.max(largest), sem="relaxed")
        if GROUPS > 0:
            tl.store(dw + column.to(tl.int64) * R + (r4 * 4)[:, None] + j, sums)
        if tl.program_id(0) == 0:
            tl.store(inv, inverse(scale))
        wg = settled(wg)
        wu = settled(wu)
        wh = settled(wh)
        for i in tl.static_range(4):
            r = r4 * 4 + i
            inside = (r < R)[:, None] & (c < F)[None, :]
            o = r[:, None].to(tl.int64) * (2 * F) + c[None, :]
            tl.store(d + o, unbyte(wg, i), mask=inside)
            tl.store(d + o + F, unbyte(wu, i), mask=inside)
        t = c[:, None].to(tl.int64) * R4 + r4[None, :]
        mask = (c < F)[:, None]
        tl.store(dt + t, tl.trans(wg), mask=mask)
        tl.store(dt + t + R4.to(tl.int64) * F, tl.trans(wu), mask=mask)
        tl.store(ht + t, tl.trans(wh), mask=mask)


@triton.jit
def _backward_rows_kernel(
    dh, y, y_inv, d, h, dw, weight, ends, amax, inv, inv_h, R, F,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    H8: tl.constexpr, H_LIMIT: tl.constexpr, MODE: tl.constexpr, GROUPS: tl.constexpr, NARROW: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute one row per program. ROW: FP8 under the row's own scale; 0: BF16."""
    r = tl.program_id(0)
    if r < rows_left(ends, R, GROUPS):
        c = tl.arange(0, BC)
        inside = c < F
        o = r.to(tl.int64) * (2 * F) + c
        w = 1.0
        if GROUPS > 0:
            w = tl.load(weight + r)
        one = tl.load(dh + r.to(tl.int64) * F + c, mask=inside, other=0).to(tl.float32)
        g = tl.load(y + o, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(y + o + F, mask=inside, other=0.0).to(tl.float32)
        if NARROW:
            at = y_inv + (c // 128).to(tl.int64) * R + r
            g *= tl.load(at, mask=inside, other=0)
            u *= tl.load(at + tl.cdiv(F, 128).to(tl.int64) * R, mask=inside, other=0)
        dg, du, hh, addend = gradients(one, g, u, w)
        if MODE == 0:
            tl.store(d + o, dg.to(tl.bfloat16), mask=inside)
            tl.store(d + o + F, du.to(tl.bfloat16), mask=inside)
            tl.store(h + r.to(tl.int64) * F + c, hh.to(tl.bfloat16), mask=inside)
        else:
            top = tl.max(tl.maximum(abs_bits(dg), abs_bits(du)), 0)
            one_h = tl.load(inv_h + r)
            scale_h = tl.where(one_h > 0, inverse(tl.where(one_h > 0, one_h, 1.0)), 1.0)
            amax_row = top.to(tl.float32, bitcast=True)
            scale = scale_of(amax_row, LIMIT, HEADROOM, POW2)
            tl.store(d + o, to_fp8(dg * scale, F8, LIMIT), mask=inside)
            tl.store(d + o + F, to_fp8(du * scale, F8, LIMIT), mask=inside)
            tl.store(h + r.to(tl.int64) * F + c, to_fp8(hh * scale_h, H8, H_LIMIT), mask=inside)
            tl.store(inv + r, inverse_of_row(scale, amax_row))
            tl.atomic_max(amax, top, sem="relaxed")
        if GROUPS > 0:
            tl.store(dw + r, tl.sum(addend, 0))


def swiglu(
    y: Tensor, weight: Tensor | None, ends: Tensor | None, scale_row: Tensor, amax: Tensor, how: Cast | None,
    narrow: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return h [R, F] and its inverse scales: FP8 as from `cast` (TENSOR: [inverse scale, scale]), BF16 without `how`;
    and y as saved for backward with its inverse scales: y itself and nothing, or with `narrow` E4M3 and [blocks, R].

    y [R, 2F] BF16, weight [R] FP32 and ends [E] of the experts' rows (None: plain rows).
    """
    R, F = y.shape[0], y.shape[1] // 2
    mode = 0 if how is None else how.mode
    constants = (how or _PLAIN).constants
    h = torch.empty(R, F, device=y.device, dtype=torch.bfloat16 if how is None else how.fmt.dtype)
    shape = {0: (0,), const.TENSOR.value: (2,), const.ROW.value: (R, 1), const.BLOCK.value: (cdiv(F, 128), R)}[mode]
    # rows beyond the experts' last are not written; the largest scale must not include stale values
    inv = torch.zeros(shape, device=y.device, dtype=torch.float32)
    own = torch.zeros(1, device=y.device, dtype=torch.int32) if mode == const.TENSOR.value else as_bits(inv)
    if mode == const.ROW.value:
        BC = max(128, power_of_2(F)) if narrow else power_of_2(F)
        BR, warps = max(1, min(128, 4096 // BC)), row_warps(BC)  # experts' rows end at multiples of 128
    else:
        BR, BC, warps = 64, 128, 4
    saved = y if not narrow else torch.empty(R, 2 * F, device=y.device, dtype=E4M3.dtype)
    saved_inv = torch.empty((2 * cdiv(F, 128), R) if narrow else (0,), device=y.device, dtype=torch.float32)
    columns = cdiv(F, BC)
    grid, blocks = columns * cdiv(R, BR), {"GROUPS": groups(ends), "BR": BR, "BC": BC, "num_warps": warps}
    if mode == const.TENSOR.value:
        _amax_kernel[(min(STRIPS, grid),)](
            y, y, saved_inv, given(weight, y), given(ends, y), scale_row, own, R, F, columns,
            DELAYED=constants["DELAYED"], BACKWARD=False, NARROW=False, **blocks,
        )  # fmt: skip
    _forward_kernel[(grid,)](
        y, saved, saved_inv, h, given(weight, y), given(ends, y), scale_row, own, as_bits(amax), inv, R, F, columns,
        **constants, MODE=mode, NARROW=narrow, **blocks,
    )  # fmt: skip
    return h, inv.t() if mode == const.BLOCK.value else inv, saved, saved_inv


def swiglu_backward_tensor(
    dh: Tensor, y: Tensor, weight: Tensor | None, ends: Tensor | None, h_scale: Tensor, scale_row: Tensor, amax: Tensor,
    how: Cast, how_h: Cast, y_inv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward with TENSOR scales: return d [R, 2F] and d_t [2F, R'] FP8, h_t [F, R'] FP8, d's inverse scale (0-d), and
    the weights' gradients in parts [n, R] FP32.

    dh [R, F], y [R, 2F] BF16, or E4M3 with y_inv; h_scale [2]; as `swiglu` returned them.
    """
    R, F = dh.shape
    Rt, device = padded_rows(R), dh.device
    d = torch.empty(R, 2 * F, device=device, dtype=how.fmt.dtype)
    dt = torch.empty(2 * F, Rt, device=device, dtype=how.fmt.dtype)
    ht = torch.empty(F, Rt, device=device, dtype=how_h.fmt.dtype)
    BR, BC = 64, 64
    columns = cdiv(F, BC)
    grid = columns * (Rt // BR)
    blocks = {"GROUPS": groups(ends), "NARROW": y_inv is not None, "BR": BR, "BC": BC, "num_warps": 8}
    dw = torch.empty(columns if weight is not None else 0, R, device=device)
    # without any row nothing is written, and the weights' gradients are zero times this scale
    own, inv = torch.zeros(1, device=device, dtype=torch.int32), torch.zeros((), device=device)
    _amax_kernel[(min(STRIPS, grid),)](
        dh, y, given(y_inv, y), given(weight, y), given(ends, y), scale_row, own, R, F, columns,
        DELAYED=how.delayed, BACKWARD=True, **blocks,
    )  # fmt: skip
    _backward_kernel[(grid,)](
        dh, y, given(y_inv, y), as_bytes(d), as_words(dt), as_words(ht), dw, given(weight, y), given(ends, y),
        scale_row, own, as_bits(amax), inv, h_scale[1:], R, F, Rt // 4, columns, **how.constants,
        H8=how_h.constants["F8"], H_LIMIT=how_h.fmt.max, **blocks,
    )  # fmt: skip
    return d, dt, ht, inv, dw


def swiglu_backward_rows(
    dh: Tensor, y: Tensor, weight: Tensor | None, ends: Tensor | None, inv_h: Tensor | None, amax: Tensor,
    how: Cast | None, how_h: Cast | None, y_inv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward with ROW scales, or BF16 without `how`: return d [R, 2F], h [R, F], d's inverse scales [R, 1] (empty for
    BF16), and the weights' gradients [1, R] FP32.

    y [R, 2F] BF16, or E4M3 with y_inv; inv_h [R, 1]: h's inverse scales; as `swiglu` returned them.
    """
    R, F = dh.shape
    device = dh.device
    d = torch.empty(R, 2 * F, device=device, dtype=torch.bfloat16 if how is None else how.fmt.dtype)
    h = torch.empty(R, F, device=device, dtype=torch.bfloat16 if how_h is None else how_h.fmt.dtype)
    # rows beyond the experts' last are not written; the largest scale must not include stale values
    inv = torch.zeros((0,) if how is None else (R, 1), device=device)
    dw = torch.empty(1 if weight is not None else 0, R, device=device)
    BC = power_of_2(F)
    casts = (how or _PLAIN).constants
    _backward_rows_kernel[(max(R, 1),)](
        dh, y, given(y_inv, y), d, h, dw, given(weight, y), given(ends, y), as_bits(amax), inv, given(inv_h, dw), R, F,
        **casts, H8=(how_h or _PLAIN).constants["F8"], H_LIMIT=(how_h or _PLAIN).fmt.max,
        MODE=0 if how is None else how.mode, GROUPS=groups(ends), NARROW=y_inv is not None, BC=BC,
        num_warps=row_warps(BC),
    )  # fmt: skip
    return d, h, inv, dw


def given(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a pointer for an argument that the kernel may not read."""
    return other if tensor is None else tensor


def groups(ends: Tensor | None) -> int:
    return 0 if ends is None else ends.shape[0]
