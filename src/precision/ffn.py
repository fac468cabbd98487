"""Feed-forward layers, dense and over experts: from a norm's operand to the sum over a token's experts.

    gated_ffn    y = w_down (silu(w_gate x) * w_up x)
    expert_ffn   y = sum over the K chosen experts of weight * FFN_expert(x)  (+ add)

Experts may have an activation without a gate (`activation`) instead.

Where the backend has kernels for the whole layer (`cuda`, both GEMMs in one precision), the layer runs as one operator
each way: see `kernels.ffn_ops`. Elsewhere it is composed of the ops of `fused` and the linears, which define the
result.

Legend: T tokens, K chosen experts of a token, R = T K rows, D hidden, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from precision.activation import Gelu, Xielu, activate
from precision.deferred import WeightGradientQueue
from precision.fused import combine_rows, gather_rows, swiglu
from precision.kurtosis import Kurtosis
from precision.linear import GroupedLinear, Linear, quantize
from precision.observe import is_observed
from precision.operand import Feed, GradRows, Operand
from precision.permutation import permutation
from precision.rows import GemmRecipe
from precision.scaling import record_amax


def gated_ffn(
    x: Operand | Tensor, gate_up: Linear, down: Linear, down_feed: Feed, kurtosis: Kurtosis | None = None
) -> Tensor:
    """Apply the dense layer to x [..., D]; return [..., D].

    gate_up: gate first. down_feed: the Feed of `down`. kurtosis: observes the input of `down` before it is cast.
    """
    if has_kernels(gate_up, down):
        return _fused(x, gate_up, down, kurtosis=kurtosis)
    return down(swiglu(gate_up(x), down_feed, kurtosis=kurtosis, narrow=gate_up.recipe.swiglu.is_fp8))


def expert_ffn(
    x: Operand | Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    gate_up: GroupedLinear,
    down: GroupedLinear,
    *,
    down_feed: Feed,
    rows_feed: Feed | None,
    combine: torch.dtype,
    accumulate: torch.dtype,
    add: Tensor | None,
    grad: GradRows | None = None,
    choices: int = -1,
    kurtosis: Kurtosis | None = None,
    keep_rows: bool = True,
    activation: Gelu | Xielu | None = None,
) -> Tensor:
    """Apply the experts chosen for each token; return add + the weighted sum, [T, D] in add's dtype, or in combine's
    without add.

    x [T, D], expert [T, K] int64, weight [T, K] FP32, add [T, D]. rows_feed: the Feed of `gate_up`, where tokens do not
    travel as an Operand. combine, accumulate: formats of the experts' outputs and of the sum. grad: scale and amax row
    for the output gradient, if it has been FP8 before. choices: how many of the T K choices are real; the others are
    expert E, which means none; -1: all. kurtosis: as in `gated_ffn`, over all experts' rows. keep_rows: kernels for
    experts in BF16 save x's rows, T K of them, instead of gathering them from x again in the backward pass. activation:
    of experts without a gate, where `gate_up` is the up projection alone; None: SwiGLU.
    """
    if activation is None and has_row_kernels(gate_up, down, combine, accumulate):
        return _fused(x, gate_up, down, expert_TK, weight_TK, add, grad, choices, kurtosis, keep_rows)
    order_R, index_R, inverse_TK, offsets_E = permutation(expert_TK, gate_up.weight.shape[0], choices)
    weight_R = weight_TK.flatten().index_select(0, order_R)
    rows = gather_rows(x, index_R, inverse_TK, rows_feed)
    made = gate_up(rows, offsets_E)
    if activation is None:
        h_RF = swiglu(made, down_feed, weight_R, kurtosis, narrow=gate_up.recipe.swiglu.is_fp8)
    else:
        h_RF = activate(made, activation, down_feed, weight_R, offsets_E, kurtosis)
    rows_RD = down(h_RF, offsets_E, grad).to(combine)
    total_TD = combine_rows(rows_RD, index_R, inverse_TK, accumulate)
    return total_TD.to(combine) if add is None else (total_TD + add).to(add.dtype)


def has_kernels(gate_up: Linear | GroupedLinear, down: Linear | GroupedLinear) -> bool:
    """Return whether the whole layer runs in kernels (`is_fused`). False while an observer is set (see `observe`)."""
    return not is_observed() and is_fused(gate_up.recipe, down.recipe)


def has_row_kernels(gate_up: GroupedLinear, down: GroupedLinear, combine: torch.dtype, accumulate: torch.dtype) -> bool:
    """Return whether experts run in kernels, which also gather their rows and sum their results."""
    return has_kernels(gate_up, down) and combine == torch.bfloat16 and accumulate == torch.float32


def is_fused(gate_up: GemmRecipe, down: GemmRecipe) -> bool:
    """Return whether the backend has kernels for a whole layer of these recipes.

    They round where BF16 results are summed in FP32. Such a layer saves x and the first GEMM's result; experts in BF16
    save x's rows instead of x (`keep_rows`).
    """
    plain = gate_up.output.dtype == torch.bfloat16
    return gate_up == down and gate_up.backend == "cuda" and gate_up.input.bytes <= 2 and plain


def _fused(
    x: Operand | Tensor,
    gate_up: Linear | GroupedLinear,
    down: Linear | GroupedLinear,
    expert: Tensor | None = None,
    weight: Tensor | None = None,
    add: Tensor | None = None,
    grad: GradRows | None = None,
    choices: int = -1,
    kurtosis: Kurtosis | None = None,
    keep_rows: bool = True,
) -> Tensor:
    from precision.backends.cuda import cast_of

    recipe, w1, w2 = gate_up.recipe, gate_up.operand, down.operand
    assert w1 is not None and w2 is not None, "compute weights are missing: call precision.refresh_weights(model)"
    inv, how = None, ""
    carrier = x if isinstance(x, Tensor) else x.carrier if recipe.is_fp8 else x.tensor
    data = carrier.detach() if isinstance(x, Tensor) or not recipe.is_fp8 else x.data
    if not recipe.is_fp8:
        data = data.to(recipe.input.dtype)
    rows: tuple[Tensor | None, ...] = (None,) * 6
    places: tuple[Tensor | None, ...] = (None,) * 3
    if recipe.is_fp8:
        of_grads = recipe if grad is None else recipe.with_given_scale
        how = f"{cast_of(recipe, recipe.input).text} {cast_of(of_grads, recipe.grad).text}"
        how += (" fast" if recipe.sums_fast else "") + (" narrow" if recipe.swiglu.is_fp8 else "")
        slots = down.input_slot, down.grad_slot, gate_up.grad_slot
        rows = tuple(row for slot in slots if slot is not None for row in (slot.scale, slot.amax))
        places = tuple(slot.place for slot in slots if slot is not None)
        if grad is not None:
            # scale 0 means no scale: with current scaling the gradient between the GEMMs still uses its own
            between = rows[4] if of_grads is recipe else torch.zeros_like(grad.scale)
            rows = *rows[:2], *grad, between, rows[5]
            places = places[0], None, places[2]  # dy was shown where it was cast first
        if isinstance(x, Operand):
            inv = x.scale_inv
        else:
            assert gate_up.input_slot is not None
            data, inv = quantize(x, gate_up.input_slot, recipe)
    sums = None if kurtosis is None else kurtosis.sums
    fixed = _Fixed._make((data, inv, *w1, *w2, expert, *rows, *places, sums, how, choices, keep_rows, gate_up.deferred))
    return _Ffn.apply(carrier, gate_up.weight, down.weight, weight, add, *fixed)


class _Fixed(NamedTuple):
    """Inputs of `_Ffn` without a gradient. w1, w2: operands of gate_up and down, plain and transposed. h: the input of
    down. d1: the gradient of gate_up's output, [dg, du]."""

    x: Tensor
    x_inv: Tensor | None
    w1: Tensor
    w1_inv: Tensor | None
    w1t: Tensor | None
    w1t_inv: Tensor | None
    w2: Tensor
    w2_inv: Tensor | None
    w2t: Tensor | None
    w2t_inv: Tensor | None
    expert: Tensor | None
    h_scale: Tensor | None
    h_amax: Tensor | None
    dy_scale: Tensor | None
    dy_amax: Tensor | None
    d1_scale: Tensor | None
    d1_amax: Tensor | None
    h_place: Tensor | None
    dy_place: Tensor | None
    d1_place: Tensor | None
    kurtosis: Tensor | None
    how: str
    choices: int
    keep_rows: bool
    deferred: WeightGradientQueue | None


class _Ffn(torch.autograd.Function):
    """Both GEMMs and the activation between them; for experts also the permutation to their rows and back.

    carrier, weight1, weight2, weight and add receive gradients. The other arguments are the fields of `_Fixed`, one by
    one, so that autograd and Dynamo see each tensor.
    """

    @staticmethod
    def forward(ctx, carrier, weight1, weight2, weight, add, *fixed) -> Tensor:
        from precision.kernels import ffn_ops
        from precision.kernels.common import by_block

        f = _Fixed(*fixed)
        none = f.x.new_empty(0, dtype=torch.float32)
        unseen = f.x.new_empty(1, dtype=torch.float32)
        x = f.x.reshape(-1, f.x.shape[-1])
        inv = none if f.x_inv is None else f.x_inv
        inv = by_block(inv.reshape(-1, inv.shape[-1])) if inv.dim() > 1 else inv
        y, *kept = ffn_ops.ffn_forward(
            x, inv, f.w1, _or(f.w1_inv, none), f.w2, _or(f.w2_inv, none), _or(f.expert, none), _or(weight, none),
            _or(add, none), _or(f.h_scale, none), _or(f.h_amax, unseen), f.how, f.choices, f.h_place,
            _or(f.kurtosis, none), f.keep_rows,
        )  # fmt: skip
        keep_x = none if kept[3].numel() else x
        w1t, w1t_inv = _or(f.w1t, f.w1), f.w1_inv if f.w1t_inv is None else f.w1t_inv
        w2t, w2t_inv = _or(f.w2t, f.w2), f.w2_inv if f.w2t_inv is None else f.w2t_inv
        ctx.save_for_backward(keep_x, inv, *kept, w1t.mT, w1t_inv, w2t.mT, w2t_inv)
        # arena rows are not saved for backward: other views of the arena are written in between
        ctx.rows, ctx.places = (f.dy_scale, f.dy_amax, f.d1_scale, f.d1_amax), (f.dy_place, f.d1_place)
        ctx.how, ctx.shape, ctx.dtype = f.how, carrier.shape, carrier.dtype
        assert weight1.dtype == weight2.dtype
        ctx.weight_dtype = weight1.dtype
        ctx.weighted, ctx.added = weight is not None, add is not None
        ctx.deferred, ctx.weights = f.deferred, None if f.deferred is None else (weight1, weight2)
        return y.view(carrier.shape)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        from precision.kernels import ffn_ops

        x, x_inv, y1, y1_inv, h_inv, x_rows, *rest = ctx.saved_tensors
        routing, (w1t, w1t_inv, w2t, w2t_inv) = rest[:6], rest[6:]
        none = y1.new_empty(0, dtype=torch.float32)
        dy_scale, dy_amax, d1_scale, d1_amax = ctx.rows
        given = (
            grads[0].reshape(-1, grads[0].shape[-1]), x, x_inv, y1, y1_inv, h_inv, x_rows, routing,
            w1t, _or(w1t_inv, none), w2t, _or(w2t_inv, none), _or(dy_scale, none), _or(d1_scale, none), ctx.how,
            ctx.weight_dtype, *ctx.places,
        )  # fmt: skip
        if ctx.deferred is None:
            dx, dw1, dw2, dweight, amaxes = ffn_ops.ffn_backward(*given)
        else:
            dw1 = dw2 = None
            dx, dweight, amaxes, *products = ffn_ops.input_gradients(*given)
            for parameter, product in zip(ctx.weights, products, strict=True):
                ctx.deferred.put(parameter, product)
        if dy_amax is not None:
            record_amax(dy_amax, amaxes[0])
            record_amax(d1_amax, amaxes[1])
        dx = dx.to(ctx.dtype).view(ctx.shape)
        dweight, dadd = dweight if ctx.weighted else None, grads[0] if ctx.added else None
        return dx, dw1, dw2, dweight, dadd, *(None,) * len(_Fixed._fields)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
