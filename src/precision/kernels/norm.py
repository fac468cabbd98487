"""RMSNorm (arXiv 1910.07467) with a fused cast, forward and backward.

    forward   y = x rstd gain, rstd = 1 / sqrt(mean(x^2) + eps);  FP8 of BF16(y), and y itself if it has a reader
    backward  dx = rstd (g - n mean(g n)),  n = x rstd,  g = dy gain;   dgain = sum over rows of dy n

A row stays in registers while it is normed and cast.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels import const
from precision.kernels.common import (
    STRIPS,
    Cast,
    abs_bits,
    amax_along,
    as_bf16,
    as_bits,
    cdiv,
    inverse,
    inverse_of_row,
    is_known,
    power_of_2,
    row_warps,
    scale_of,
    scale_shape,
    tensor_scale,
    to_fp8,
)


@triton.jit
def _normed(x, gain, r, c, R, C, XS, eps):
    """Return x divided by its rows' root mean square, times gain; the result's position, and 1 / root mean square."""
    inside = (r < R)[:, None] & (c < C)[None, :]
    i = r[:, None] * C + c[None, :]
    v = tl.load(x + r[:, None] * XS + c[None, :], mask=inside, other=0).to(tl.float32)
    one = tl.rsqrt(tl.sum(v * v, 1) / C + eps)
    return as_bf16(v * one[:, None] * tl.load(gain + c, mask=c < C, other=0)[None, :]), i, inside, one


@triton.jit
def _amax_kernel(
    x, gain, scale_row, own, R, C, XS, eps, DELAYED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Write the result's amax into `own`, unless its scale is known."""
    if not is_known(scale_row, DELAYED):
        largest = tl.zeros((BR, BC), tl.int32)
        for strip in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
            r = (strip * BR + tl.arange(0, BR)).to(tl.int64)
            v, _, _, _ = _normed(x, gain, r, tl.arange(0, BC), R, C, XS, eps)
            largest = tl.maximum(largest, abs_bits(v))
        tl.atomic_max(own, tl.max(largest), sem="relaxed")


@triton.jit
def _forward_kernel(
    x, gain, y, y8, rstd, scale_row, own, amax, inv, R, C, XS, eps,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    MODE: tl.constexpr, PLAIN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    v, i, inside, one = _normed(x, gain, r, tl.arange(0, BC), R, C, XS, eps)
    tl.store(rstd + r, one, mask=r < R)
    if PLAIN:
        tl.store(y + i, v.to(tl.bfloat16), mask=inside)
    if MODE == const.TENSOR:
        scale = tensor_scale(scale_row, own, LIMIT, HEADROOM, POW2, DELAYED)
        tl.store(y8 + i, to_fp8(v * scale, F8, LIMIT), mask=inside)
        tl.atomic_max(amax, tl.max(abs_bits(v)), sem="relaxed")
        if tl.program_id(0) == 0:
            tl.store(inv, inverse(scale))
    if MODE == const.ROW:
        top = amax_along(v, 1)
        scale = scale_of(top, LIMIT, HEADROOM, POW2)
        tl.store(y8 + i, to_fp8(v * scale[:, None], F8, LIMIT), mask=inside)
        tl.store(inv + r, inverse_of_row(scale, top), mask=r < R)
        tl.atomic_max(amax, tl.max(abs_bits(top)), sem="relaxed")
    if MODE == const.BLOCK:
        blocks = tl.reshape(v, (BR * (BC // 128), 128))
        top = amax_along(blocks, 1)
        scale = scale_of(top, LIMIT, HEADROOM, POW2)
        v = tl.reshape(blocks * scale[:, None], (BR, BC))
        tl.store(y8 + i, to_fp8(v, F8, LIMIT), mask=inside)
        b = tl.arange(0, BC // 128)
        at = inv + b[None, :].to(tl.int64) * R + r[:, None]
        mask = (b * 128 < C)[None, :] & (r < R)[:, None]
        tl.store(at, tl.reshape(inverse(scale), (BR, BC // 128)), mask=mask)
        tl.atomic_max(amax, tl.max(abs_bits(top)), sem="relaxed")


@triton.jit
def _backward_kernel(dy, x, gain, rstd, dx, dgain, R, C, XS, STRIPS, BC: tl.constexpr):
    c = tl.arange(0, BC)
    inside = c < C
    g = tl.load(gain + c, mask=inside, other=0)
    total = tl.zeros((BC,), tl.float32)
    for r in range(tl.program_id(0), R, STRIPS):
        i = tl.cast(r, tl.int64) * C + c
        one = tl.load(rstd + r)
        n = tl.load(x + tl.cast(r, tl.int64) * XS + c, mask=inside, other=0).to(tl.float32) * one
        d = tl.load(dy + i, mask=inside, other=0).to(tl.float32)
        total += d * n
        d *= g
        mean = tl.sum(d * n, 0) / C
        tl.store(dx + i, ((d - n * mean) * one).to(dx.dtype.element_ty), mask=inside)
    tl.store(dgain + tl.program_id(0).to(tl.int64) * C + c, total, mask=inside)


def rms_norm(
    x: Tensor, gain: Tensor, eps: float, scale_row: Tensor, amax: Tensor, how: Cast | None, plain: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm x [R, C] BF16, features adjacent, with gain [C] FP32.

    Returns y [R, C] BF16 (empty unless `plain`), FP8 data and inverse scales as from `cast` (empty without `how`), and
    rstd [R] FP32.
    """
    (R, C), XS = x.shape, x.stride(0)
    new = {"device": x.device, "dtype": torch.float32}
    y = torch.empty((R, C) if plain else (0,), device=x.device, dtype=x.dtype)
    rstd, inv = torch.empty(R, **new), torch.empty(0, **new)
    y8, own = y, as_bits(rstd)
    mode, constants = 0, Cast.parse("e4m3:1:0:0:0").constants
    BC = max(128, power_of_2(C))
    BR = max(1, 4096 // BC)
    if how is not None:
        mode, constants = how.mode, how.constants
        y8 = torch.empty(R, C, device=x.device, dtype=how.fmt.dtype)
        inv = torch.empty(scale_shape(mode, R, C), **new)
        own = torch.zeros(1, device=x.device, dtype=torch.int32) if mode == const.TENSOR.value else own
    tiles, blocks = cdiv(R, BR), {"BR": BR, "BC": BC, "num_warps": row_warps(BC)}
    if mode == const.TENSOR.value:
        _amax_kernel[(min(STRIPS, tiles),)](
            x, gain, scale_row, own, R, C, XS, eps, DELAYED=constants["DELAYED"], **blocks,
        )  # fmt: skip
    _forward_kernel[(tiles,)](
        x, gain, y, y8, rstd, scale_row, own, as_bits(amax), inv, R, C, XS, eps,
        **constants, MODE=mode, PLAIN=plain, **blocks,
    )  # fmt: skip
    return y, y8 if mode else y.new_empty(0), inv.t() if mode == const.BLOCK.value else inv, rstd


def rms_norm_backward(dy: Tensor, x: Tensor, gain: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx [R, C] in x's dtype and dgain [C] FP32, for dy, x [R, C] BF16, x's features adjacent, and rstd [R]."""
    (R, C), XS = x.shape, x.stride(0)
    strips = min(STRIPS, max(R, 1))  # each sums dgain over its rows
    dx = x.new_empty(R, C)
    partial = torch.empty(strips, C, device=x.device, dtype=torch.float32)
    BC = power_of_2(C)
    _backward_kernel[(strips,)](dy, x, gain, rstd, dx, partial, R, C, XS, strips, BC, num_warps=row_warps(BC))
    return dx, partial.sum(0)
