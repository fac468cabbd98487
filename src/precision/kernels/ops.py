"""The kernels as custom operators, so that compiled graphs hold them as they are. One without a docstring is the
function of its name in `norm`, `rotary` or `weights`.

Operators return new tensors and raise the arena's amax rows in place. A recipe is passed as the text of a `Cast`; a
missing optional tensor is empty. In a sampled step an operator shows rows of its cast, under the `place` of the slot
(see `precision.observe`): its only side effect besides the amax.
"""

import torch
from torch import Tensor

from precision.formats import E4M3
from precision.kernels import cast as _cast
from precision.kernels import const
from precision.kernels import norm as _norm
from precision.kernels import rotary as _rotary
from precision.kernels import weights as _weights
from precision.kernels.common import Cast, padded_rows, readable, scale_shape
from precision.observe import every, is_sampled, part_of, show, show_rows
from precision.operators import fake, operator


def _scales(x: Tensor, how: Cast, rows: int, columns: int) -> Tensor:
    inv = torch.empty(scale_shape(how.mode, rows, columns), device=x.device, dtype=torch.float32)
    return inv.t() if how.mode == const.BLOCK.value else inv


def _transposed_scales(x: Tensor, how: Cast, rows: int, columns: int) -> Tensor:
    shape = {const.TENSOR.value: (0,), const.ROW.value: (), const.BLOCK.value: (padded_rows(rows) // 128, columns)}[
        how.mode
    ]
    return torch.empty(shape, device=x.device, dtype=torch.float32)


@operator("cast", mutates_args=("amax",))
def cast(x: Tensor, scale_row: Tensor, amax: Tensor, how: str, place: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.cast.cast`; x [R, C]."""
    x, made = x.contiguous(), Cast.parse(how)
    y, inv = _cast.cast(x, scale_row, amax, made)[:2]
    if is_sampled():
        show_rows(place, x, y, inv, made.fmt)
    return y, inv


@fake(cast)
def _(x: Tensor, scale_row: Tensor, amax: Tensor, how: str, place: Tensor | None = None) -> tuple[Tensor, Tensor]:
    made = Cast.parse(how)
    return torch.empty(x.shape, device=x.device, dtype=made.fmt.dtype), _scales(x, made, *x.shape)


@operator("cast_transposed", mutates_args=("amax",))
def cast_transposed(
    x: Tensor, scale_row: Tensor, amax: Tensor, how: str, place: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.cast.cast`; the scales of the transposed copy are empty where both copies share them."""
    x, made = x.contiguous(), Cast.parse(how)
    y, inv, yt, inv_t = _cast.cast(x, scale_row, amax, made, transposed=True)
    assert yt is not None and inv_t is not None
    if is_sampled():
        show_rows(place, x, y, inv, made.fmt)
    return y, inv, yt, inv_t if made.mode != const.TENSOR.value else inv.new_empty(0)


@fake(cast_transposed)
def _(x, scale_row, amax, how: str, place=None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = Cast.parse(how)
    (R, C), new = x.shape, {"device": x.device, "dtype": made.fmt.dtype}
    data, data_t = torch.empty(R, C, **new), torch.empty(C, padded_rows(R), **new)
    return data, _scales(x, made, R, C), data_t, _transposed_scales(x, made, R, C)


@operator("transpose")
def transpose(x8: Tensor, inv: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """See `kernels.cast.transpose`; the second result is empty for TENSOR scales."""
    made = Cast.parse(how)
    yt, inv_t = _cast.transpose(x8.contiguous(), inv, made)
    return yt, inv_t if made.mode != const.TENSOR.value else inv.new_empty(0)


@fake(transpose)
def _(x8: Tensor, inv: Tensor, how: str) -> tuple[Tensor, Tensor]:
    R, C = x8.shape
    yt = torch.empty(C, padded_rows(R), device=x8.device, dtype=x8.dtype)
    return yt, _transposed_scales(x8, Cast.parse(how), R, C)


@operator("transpose_weight")
def transpose_weight(data: Tensor) -> Tensor:
    return _weights.transpose_weight(data.contiguous(), None)


@fake(transpose_weight)
def _(data: Tensor) -> Tensor:
    return data.new_empty(data.mT.shape)


@operator("rms_norm", mutates_args=("amax",))
def rms_norm(
    x: Tensor, gain: Tensor, eps: float, scale_row: Tensor, amax: Tensor, how: str, plain: bool,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `kernels.norm.rms_norm`; how empty: no FP8."""
    x, made = readable(x), Cast.parse(how) if how else None
    y, data, inv, rstd = _norm.rms_norm(x, gain, eps, scale_row, amax, made, plain)
    if is_sampled() and made is not None and place is not None:
        part = every(x)
        exact = y[part] if plain else _norm.rms_norm(x[part].contiguous(), gain, eps, scale_row, amax, None, True)[0]
        show(place, exact, data[part], part_of(inv, part), made.fmt)
    return y, data, inv, rstd


@fake(rms_norm)
def _(x, gain, eps, scale_row, amax, how: str, plain: bool, place=None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    R, C = x.shape
    y = torch.empty((R, C) if plain else (0,), device=x.device, dtype=x.dtype)
    rstd = torch.empty(R, device=x.device, dtype=torch.float32)
    if not how:
        return y, y.new_empty(0), rstd.new_empty(0), rstd
    made = Cast.parse(how)
    return y, torch.empty(R, C, device=x.device, dtype=made.fmt.dtype), _scales(x, made, R, C), rstd


@operator("rms_norm_backward")
def rms_norm_backward(dy: Tensor, x: Tensor, gain: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return _norm.rms_norm_backward(dy.contiguous(), readable(x), gain, rstd)


@fake(rms_norm_backward)
def _(dy: Tensor, x: Tensor, gain: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, device=x.device, dtype=x.dtype), torch.empty_like(gain)


@operator("rotate_heads")
def rotate_heads(q: Tensor, kv: Tensor, k_rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return _rotary.rotate_heads(q.contiguous(), kv.contiguous(), k_rope.contiguous(), table.contiguous())


@fake(rotate_heads)
def _(q: Tensor, kv: Tensor, k_rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape)


@operator("norm_and_rotate_heads")
def norm_and_rotate_heads(
    q: Tensor, kv: Tensor, k_rope: Tensor, table: Tensor, eps: float, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = q.contiguous(), kv.contiguous(), k_rope.contiguous(), table.contiguous()
    return _rotary.norm_and_rotate_heads(*inputs, eps, scale)


@fake(norm_and_rotate_heads)
def _(q, kv, k_rope, table, eps, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, heads, wide = E4M3.dtype if scale else q.dtype, q.shape[:3], {"dtype": torch.float32}
    made, rstd = ([q.new_empty(q.shape, dtype=out) for _ in "qk"], [q.new_empty(heads, **wide) for _ in "qk"])
    return made[0], made[1], rstd[0], rstd[1], q.new_empty(2, **wide)


@operator("norm_and_rotate_heads_backward")
def norm_and_rotate_heads_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, table: Tensor, q: Tensor, kv: Tensor, k_rope: Tensor, q_rstd: Tensor,
    k_rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    normed = q.contiguous(), kv.contiguous(), k_rope.contiguous(), q_rstd, k_rstd
    return _rotary.rotate_heads_backward(*map(readable, (dq, dk, dv)), table.contiguous(), normed)


@fake(norm_and_rotate_heads_backward)
def _(dq: Tensor, dk: Tensor, dv: Tensor, table: Tensor, q: Tensor, kv: Tensor, k_rope: Tensor, *rstd: Tensor):
    return q.new_empty(q.shape), q.new_empty(kv.shape), q.new_empty(k_rope.shape)


@operator("rotate_heads_backward")
def rotate_heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _rotary.rotate_heads_backward(*map(readable, (dq, dk, dv)), table.contiguous())


@fake(rotate_heads_backward)
def _(dq: Tensor, dk: Tensor, dv: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (B, S, H, D), V, R = dq.shape, dv.shape[-1], 2 * table.shape[-1]
    return dq.new_empty(B, S, H, D), dq.new_empty(B, S, H, D - R + V), dq.new_empty(B, S, R)
