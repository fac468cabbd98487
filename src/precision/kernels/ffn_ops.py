"""A gated feed-forward layer as two operators, forward and backward: plain (dense, shared experts) or over experts.

    forward    x -> rows (experts) -> [g, u] = x w1^T -> h = silu(g) u w, cast -> h w2^T -> sum over a token's rows
    backward   dy cast, with rows and transposed copy -> dh = dy w2 -> [dg, du] and h, cast both ways -> dw2 = dy^T h
               -> dx = [dg, du] w1 -> sum over a token's rows; x^T from the FP8 that was kept -> dw1 = [dg, du]^T x

Every operand is cast once, by the kernel that makes it; x once for gate and up. The router's weight is applied inside
SwiGLU, so the experts' outputs are not saved, and the weight's gradient comes with SwiGLU's. Saved for backward: x in
token order, and the first GEMM's result in BF16 or FP8 (`swiglu`). x's rows are K times as large, so they are gathered
again; in FP8 this also makes their transposed copy. In BF16 they may be saved instead.

T tokens, D hidden, F width, R' rows in tiles of 128 (see `route`), E experts, K chosen.
"""

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from precision.deferred import Product
from precision.formats import E4M3
from precision.kernels import const, grouped_gemm
from precision.kernels.cast import cast, cast_blocks, gather_transposed, transpose
from precision.kernels.common import Cast, cdiv
from precision.kernels.kurtosis import add_kurtosis
from precision.kernels.route import Route, combine, gather, route
from precision.kernels.scaled_mm import plain_wgrad, scaled_nt, scaled_wgrad
from precision.kernels.swiglu import swiglu, swiglu_backward_rows, swiglu_backward_tensor
from precision.kernels.swiglu_blocks import swiglu_backward_blocks
from precision.kernels.weights import transpose_weight
from precision.observe import every, is_sampled, part_of, show, show_rows
from precision.operators import fake, operator
from precision.permutation import TILE, rows_in_tiles


@dataclass(frozen=True)
class _Casts:
    """Casts of x, h and weights, and of gradients. None: BF16. fast: how FP8 products are summed. narrow: whether the
    first GEMM's result is saved in FP8."""

    forward: Cast | None
    grad: Cast | None
    fast: bool
    narrow: bool

    @staticmethod
    @cache
    def parse(how: str) -> "_Casts":
        if not how:
            return _Casts(None, None, False, False)
        forward, grad, *flags = how.split()
        return _Casts(Cast.parse(forward), Cast.parse(grad), "fast" in flags, "narrow" in flags)

    @property
    def mode(self) -> int:
        return self.forward.mode if self.forward is not None else 0


def _nt(a: Tensor, a_inv: Tensor, w: Tensor, w_inv: Tensor, casts: _Casts, to: Route | None) -> Tensor:
    """Multiply a [R, K] by w [(G,) N, K]^T."""
    mode = casts.mode
    if mode == 0:
        return grouped_gemm.nt_bf16(a, w, to) if to is not None else a @ w.mT
    if to is not None:
        return grouped_gemm.nt(a, a_inv, w, w_inv, mode, to, casts.fast)
    return scaled_nt(a, a_inv, w, w_inv, mode, torch.bfloat16, casts.fast)


def _wgrad(
    a: Tensor, a_inv: Tensor, b: Tensor, b_inv: Tensor, casts: _Casts, to: Route | None, out: torch.dtype
) -> Tensor:
    """Multiply transposed operands a [M, R'], b [N, R']; return [(E,) M, N] in `out`."""
    if to is not None:
        return grouped_gemm.wgrad(a, a_inv, b, b_inv, casts.mode, to, out, casts.fast)
    return scaled_wgrad(a, a_inv, b, b_inv, casts.mode, out, casts.fast)


def _wgrad_bf16(a: Tensor, b: Tensor, to: Route | None, out: torch.dtype) -> Tensor:
    """Return a^T b of a [R, M], b [R, N] BF16, [(E,) M, N] in `out`."""
    return grouped_gemm.wgrad_bf16(a, b, to, out) if to is not None else plain_wgrad(a, b, out)


def _in_order(w: Tensor) -> Tensor:
    """Return an FP8 weight contiguous: a layer that keeps no transposed copy passes a view of the other order."""
    return w if w.is_contiguous() else transpose_weight(w.mT, None)


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape or (0,), device=like.device, dtype=dtype)


@operator("ffn_forward", mutates_args=("h_amax", "kurtosis"))
def ffn_forward(
    x: Tensor, x_inv: Tensor, w1: Tensor, w1_inv: Tensor, w2: Tensor, w2_inv: Tensor, expert: Tensor, weight: Tensor,
    add: Tensor, h_scale: Tensor, h_amax: Tensor, how: str, choices: int, h_place: Tensor | None, kurtosis: Tensor,
    keep_rows: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the layer; return y [T, D] BF16 and the tensors for backward: the first GEMM's result and its inverse
    scales (empty: it is BF16), h's scales, rows of x (with keep_rows, of BF16 experts) and the six tensors of the
    Route.

    x [T, D], w1 [(E,) 2F, D], w2 [(E,) D, F]; expert, weight [T, K] (empty: plain); choices: how many of them are not
    none (-1: all; see `route`); add [T, D] (empty: none). h_place, kurtosis [2] FP64 (empty: none): h's, for a sampled
    step.
    """
    casts = _Casts.parse(how)
    T, D = x.shape
    experts = w1.shape[0] if w1.dim() == 3 else 0
    to = route(expert, weight, experts, TILE, choices) if experts else None
    rows, rows_inv = (x, x_inv)
    if to is not None:
        rows, gathered = gather(x, x_inv if casts.mode else None, to, casts.forward)
        rows_inv = gathered if gathered is not None else x_inv
    y1 = _nt(rows, rows_inv, w1, w1_inv, casts, to)
    weights, ends = (to.weight, to.ends) if to is not None else (None, None)
    h, h_inv, saved, saved_inv = swiglu(y1, weights, ends, h_scale, h_amax, casts.forward, casts.narrow)
    if is_sampled():
        _sample_h(y1, h, h_inv, to, casts, h_place, kurtosis)
    del y1
    y = _nt(h, h_inv[0] if casts.mode == const.TENSOR.value else h_inv, w2, w2_inv, casts, to)
    if to is not None:
        y, _ = combine(y, to, add if add.numel() else None)
    elif add.numel():
        y = y + add
    kept = rows if keep_rows and casts.mode == 0 and to is not None else _empty(x, dtype=x.dtype)
    if casts.mode == const.BLOCK.value:
        h_inv = _empty(x)  # h is cast again in the backward pass
    return y, saved, saved_inv, h_inv, kept, *(to or [_empty(x) for _ in range(6)])


@fake(ffn_forward)
def _(x, x_inv, w1, w1_inv, w2, w2_inv, expert, weight, add, h_scale, h_amax, how: str, choices: int, *rest):
    mode, narrow, (T, D) = _Casts.parse(how).mode, _Casts.parse(how).narrow, x.shape
    experts = w1.shape[0] if w1.dim() == 3 else 0
    choices = expert.numel() if choices < 0 else choices
    R = rows_in_tiles(choices, experts) if experts else T
    y = torch.empty(T, D, device=x.device, dtype=torch.bfloat16)
    y1 = torch.empty(R, w1.shape[-2], device=x.device, dtype=E4M3.dtype if narrow else torch.bfloat16)
    y1_inv = _empty(x, *((2 * cdiv(w1.shape[-2] // 2, 128), R) if narrow else ()))
    h_inv = _empty(x, *{const.TENSOR.value: (2,), const.ROW.value: (R, 1)}.get(mode, ()))
    keep_rows = rest[-1]
    kept = _empty(x, R, D, dtype=x.dtype) if keep_rows and mode == 0 and experts else _empty(x, dtype=x.dtype)
    if not experts:
        return y, y1, y1_inv, h_inv, kept, *[_empty(x) for _ in range(6)]
    i32 = torch.int32
    return (
        y, y1, y1_inv, h_inv, kept, _empty(x, R, dtype=i32), _empty(x, R), _empty(x, *expert.shape, dtype=i32),
        _empty(x, experts, dtype=i32), _empty(x, experts, dtype=i32), _empty(x, R // 128, dtype=i32),
    )  # fmt: skip


@operator("ffn_backward")
def ffn_backward(
    dy: Tensor, x: Tensor, x_inv: Tensor, y1: Tensor, y1_inv: Tensor, h_inv: Tensor, x_rows: Tensor,
    routing: list[Tensor],
    w1: Tensor, w1_inv: Tensor, w2: Tensor, w2_inv: Tensor, dy_scale: Tensor, d1_scale: Tensor, how: str,
    out: torch.dtype, dy_place: Tensor | None = None, d1_place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx [T, D] BF16, dw1 [(E,) 2F, D] and dw2 [(E,) D, F] in `out` (FP32 or BF16), the router weights' gradient
    [T, K] FP32 (or empty), and the amaxes of dy and [dg, du] [2] FP32 (zeros in BF16).

    dy [T, D]; w1 [(E,) D, 2F] and w2 [(E,) F, D] in the input gradients' layout, or in FP8 views of the other one; the
    rest from `ffn_forward`.

    The amaxes are returned, not written into the arena: where an operator mutates two views of one buffer, inductor
    copies one of them, and reads the copy at the storage offset of the block that was compiled (torch 2.11).
    """
    dx, dweight, amaxes, *products = input_gradients(
        dy, x, x_inv, y1, y1_inv, h_inv, x_rows, routing, w1, w1_inv, w2, w2_inv, dy_scale, d1_scale, how, out,
        dy_place, d1_place,
    )  # fmt: skip
    dw2 = products.pop()()  # its operands are freed before dw1's are transposed
    return dx, products.pop()(), dw2, dweight, amaxes


def input_gradients(
    dy: Tensor, x: Tensor, x_inv: Tensor, y1: Tensor, y1_inv: Tensor, h_inv: Tensor, x_rows: Tensor,
    routing: list[Tensor],
    w1: Tensor, w1_inv: Tensor, w2: Tensor, w2_inv: Tensor, dy_scale: Tensor, d1_scale: Tensor, how: str,
    out: torch.dtype, dy_place: Tensor | None = None, d1_place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Product, Product]:  # fmt: skip
    """Return dx, the router weights' gradient and the amaxes of `ffn_backward`, and functions that compute dw1 and
    dw2, once each."""
    casts, dy = _Casts.parse(how), dy.contiguous()
    to = Route(*routing) if w1.dim() == 3 else None
    amaxes = torch.zeros(2, device=dy.device)
    if casts.forward is None or casts.grad is None:
        dx, dweight, dw1, dw2 = _backward_bf16(dy, x, x_rows, y1, to, w1, w2, casts, out)
        return dx, dweight, amaxes, dw1, dw2
    forward, inv1 = casts.forward, y1_inv if casts.narrow else None
    d, d_inv, dt, dt_inv = _cast_dy(dy, dy_scale, amaxes[0], casts.grad, to, dy_place)
    dh = _nt(d, d_inv, _in_order(w2), w2_inv, casts, to)
    del d
    d1, d1_inv, d1t, d1t_inv, ht, ht_inv, dw = _through_swiglu(
        dh, y1, inv1, h_inv, to, d1_scale, amaxes[1], forward, casts.grad
    )
    if is_sampled():
        _sample_d1(dh, y1, inv1, d1, d1_inv, to, casts.grad, d1_place)
    del dh
    dx, dweight = _nt(d1, d1_inv, _in_order(w1), w1_inv, casts, to), _empty(x)
    if to is not None:
        dx, made = combine(dx, to, partial=dw)
        assert made is not None
        dweight = made

    def dw1() -> Tensor:
        if to is None:
            xt, xt_inv = transpose(x, x_inv, forward)
        else:
            _, _, xt, xt_inv = gather_transposed(x, x_inv, to.token, to.ends, forward, rows=False)
        return _wgrad(d1t, d1t_inv, xt, xt_inv, casts, to, out)

    return dx, dweight, amaxes, dw1, partial(_wgrad, dt, dt_inv, ht, ht_inv, casts, to, out)


def _cast_dy(
    dy: Tensor, scale: Tensor, amax: Tensor, how: Cast, to: Route | None, place: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dy in FP8, in the experts' order, and its transposed copy, each with its inverse scales."""
    if to is not None and how.mode == const.BLOCK.value:
        d, d_inv, dt, dt_inv = cast_blocks(dy, amax, how, rows=True, transposed=True, ends=to.ends, token=to.token)
        if is_sampled():
            part = every(d)
            live = to.token[part]
            show(place, dy.index_select(0, live.clamp_min(0)), d[part], d_inv[part], how.fmt, live)
    else:
        d, d_inv, dt, dt_inv = cast(dy, scale, amax, how, transposed=to is None)
        if is_sampled():
            show_rows(place, dy, d, d_inv, how.fmt)
        if to is not None:
            d, d_inv, dt, dt_inv = gather_transposed(d, d_inv, to.token, to.ends, how, rows=True)
    assert d is not None and d_inv is not None and dt is not None and dt_inv is not None
    return d, d_inv, dt, dt_inv


def _through_swiglu(
    dh: Tensor, y1: Tensor, y1_inv: Tensor | None, h_inv: Tensor, to: Route | None, scale: Tensor, amax: Tensor,
    forward: Cast, grad: Cast,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return [dg, du] in FP8, its transposed copy and h's, each with its inverse scales; and the addends of the router
    weights' gradient."""
    weight, ends = (to.weight, to.ends) if to is not None else (None, None)
    if grad.mode == const.TENSOR.value:
        d1, d1t, ht, d1_inv, dw = swiglu_backward_tensor(
            dh, y1, weight, ends, h_inv, scale, amax, grad, forward, y1_inv
        )
        return d1, d1_inv, d1t, d1_inv, ht, h_inv[0], dw
    if grad.mode == const.ROW.value:
        d1, h, d1_inv, dw = swiglu_backward_rows(dh, y1, weight, ends, h_inv, amax, grad, forward, y1_inv)
        return d1, d1_inv, *transpose(d1, d1_inv, grad, ends), *transpose(h, h_inv, forward, ends), dw
    if dh.shape[1] % 128 == 0:
        return swiglu_backward_blocks(dh, y1, weight, ends, amax, grad, forward, y1_inv)
    # a block has columns of gate and of up
    exact, h, _, dw = swiglu_backward_rows(dh, y1, weight, ends, None, amax, None, None, y1_inv)
    d1, d1_inv, d1t, d1t_inv = cast_blocks(exact, amax, grad, rows=True, transposed=True, ends=ends)
    unseen = torch.zeros((), device=h.device)
    _, _, ht, ht_inv = cast_blocks(h, unseen, forward, rows=False, transposed=True, again=True, ends=ends)
    assert d1t is not None and d1t_inv is not None and ht is not None and ht_inv is not None
    return d1, d1_inv, d1t, d1t_inv, ht, ht_inv, dw


@fake(ffn_backward)
def _(dy, x, x_inv, y1, y1_inv, h_inv, x_rows, routing, w1, w1_inv, w2, w2_inv, dy_scale, d1_scale, how, out, *places):
    weights = _empty(x, *routing[2].shape) if w1.dim() == 3 else _empty(x)
    dx = torch.empty(dy.shape, device=x.device, dtype=torch.bfloat16)
    dw1, dw2 = (_empty(x, *w.mT.shape, dtype=out) for w in (w1, w2))
    return dx, dw1, dw2, weights, _empty(x, 2)


def _backward_bf16(
    dy: Tensor,
    x: Tensor,
    x_rows: Tensor,
    y1: Tensor,
    to: Route | None,
    w1: Tensor,
    w2: Tensor,
    casts: _Casts,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Product, Product]:
    weight, ends = (to.weight, to.ends) if to is not None else (None, None)
    d = gather(dy, None, to, None)[0] if to is not None else dy
    dh = _nt(d, d, w2, w2, casts, to)
    d1, h, _, dw = swiglu_backward_rows(dh, y1, weight, ends, None, _empty(dy, 1), None, None)
    del dh
    dx, dweight = _nt(d1, d1, w1, w1, casts, to), _empty(dy)
    if to is not None:
        dx, made = combine(dx, to, partial=dw)
        assert made is not None
        dweight = made

    def dw1() -> Tensor:
        rows = x
        if to is not None:
            rows = x_rows if x_rows.numel() else gather(x, None, to, None)[0]
        return _wgrad_bf16(d1, rows, to, out)

    return dx, dweight, dw1, partial(_wgrad_bf16, d, h, to, out)


def _sample_h(
    y1: Tensor, h: Tensor, h_inv: Tensor, to: Route | None, casts: _Casts, place: Tensor | None, kurtosis: Tensor
) -> None:
    """Show rows of h in BF16, recomputed where only FP8 is in memory: their cast, and their kurtosis."""
    part = every(y1)
    live = None if to is None else to.token[part]
    exact, inv = h[part], h_inv
    if casts.forward is not None:
        exact, *_ = swiglu(y1[part].contiguous(), *_sampled_route(to, part), h_inv, _empty(h, 1), None)
        inv = h_inv[0] if casts.mode == const.TENSOR.value else h_inv[part]
        show(place, exact, h[part], inv, casts.forward.fmt, live)
    if kurtosis.numel():
        add_kurtosis(kurtosis, exact, live)


def _sample_d1(
    dh: Tensor, y1: Tensor, y1_inv: Tensor | None, d1: Tensor, d1_inv: Tensor, to: Route | None, how: Cast,
    place: Tensor | None,
) -> None:  # fmt: skip
    """Show rows of [dg, du], recomputed in BF16."""
    part = every(y1)
    rows, inv = (dh[part].contiguous(), y1[part].contiguous()), None if y1_inv is None else y1_inv[:, part].contiguous()
    exact, _, _, _ = swiglu_backward_rows(*rows, *_sampled_route(to, part), None, _empty(dh, 1), None, None, inv)
    show(place, exact, d1[part], part_of(d1_inv, part), how.fmt, None if to is None else to.token[part])


def _sampled_route(to: Route | None, part: slice) -> tuple[Tensor | None, Tensor | None]:
    """Return the router's weights of the sampled rows, and where these end; unused rows are recomputed too, with
    arbitrary values."""
    if to is None:
        return None, None
    weight = to.weight[part].contiguous()
    return weight, torch.full((1,), len(weight), dtype=torch.int32, device=weight.device)
