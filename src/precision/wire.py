"""Tokens on their way to experts in other processes and back, and what crosses the wire.

A token that chose K experts is sent K times, each time with the router's weight. What is sent is sorted by expert, so
that what one process gets lies together; it arrives sorted by sender, then by expert, then by token.

                      forward                                          backward
    to the experts    x: FP8 with scales, or BF16; weights (FP32)      dy: FP8 with scales, or BF16
    back to tokens    y: BF16; each token sums its K rows in FP32      dx: BF16, summed in FP32; the weights' gradients

x was quantised once, by the norm. dy is quantised once, here, before it travels; where it arrives it is read back into
BF16 and cast again under the same scale, which changes no number (see `GradRows`).

Scales travel beside the numbers where there is one a row or for each 128 values of it. One scale a tensor comes from
the arena, which is the same in all processes: nothing has to be sent. Before there is a history, and with current
scaling, the processes agree on one: that of the largest amax of them all. x is quantised again then.

Legend: T tokens, D hidden, K chosen experts of a token, R = T K rows sent, A rows arrived, E experts of all processes.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from precision.backends import get_backend
from precision.config import Granularity
from precision.ffn import has_kernels
from precision.formats import fp8_values, saturating_cast
from precision.fused import sum_rows
from precision.linear import GroupedLinear
from precision.operand import GradRows, Operand
from precision.permutation import permutation
from precision.plan import GemmRecipe
from precision.scaling import Slot, absolute_max, record_amax, scale_from_amax


class Exchange(Protocol):
    """Moves rows between the processes of a group, in the sizes of one forward pass."""

    def there(self, rows: Tensor) -> Tensor:
        """Rows [R, ...], sorted by expert, to the processes that hold the experts: -> [A, ...]."""
        ...

    def back(self, rows: Tensor) -> Tensor:
        """[A, ...] as they arrived -> [R, ...] as they were sent."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """Maximum over the group of a number >= 0, 0-d FP32; NaN if there is one."""
        ...


class Choices(NamedTuple):
    """The choices of T tokens, sorted by expert. token [R]: whose each row is; weight [R] FP32: the router's; position
    [T, K]: the row of each choice; ends [E] int32: where each expert's rows end. kernels: whether `gather` and `sum`
    run as kernels of the cuda backend (BF16 results)."""

    token: Tensor
    weight: Tensor
    position: Tensor
    ends: Tensor
    kernels: bool

    @staticmethod
    def sort(expert_TK: Tensor, weight_TK: Tensor, num_experts: int, kernels: bool) -> "Choices":
        """expert [T, K] int64, weight [T, K] FP32."""
        if kernels:
            from precision.kernels.route import route

            to = route(expert_TK, weight_TK.detach(), num_experts, align=1)
            return Choices(to.token, to.weight, to.position, to.ends, True)
        order_R, index_R, inverse_TK, ends_E = permutation(expert_TK, num_experts)
        return Choices(index_R, weight_TK.detach().flatten()[order_R], inverse_TK, ends_E, False)

    @property
    def rows(self) -> int:
        """R."""
        return self.position.numel()

    def gather(self, x_TD: Tensor) -> Tensor:
        """x [T, D] -> [R, D]."""
        if not self.kernels:
            return _bytes(x_TD).index_select(0, self.token[: self.rows]).view(x_TD.dtype)
        from precision.kernels.route import gather

        return gather(x_TD.contiguous(), None, self._route(), None)[0][: self.rows]

    def sum(self, rows_RD: Tensor, add_TD: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Each token's rows, and `add`, summed in `dtype`: -> [T, D] in dtype, or with kernels in the rows'."""
        if not self.kernels:
            total = sum_rows(rows_RD, self.position, dtype)
            return total if add_TD is None else total + add_TD
        from precision.kernels.route import combine

        return combine(rows_RD, self._route(), None if add_TD is None else add_TD.contiguous())[0]

    def _route(self):
        from precision.kernels.route import Route

        return Route(self.token, self.weight, self.position, self.ends, self.ends, self.ends)


@dataclass
class GradFormat:
    """How dy travels: cast as `recipe` says into the arena rows of `slot`. known: whether the arena has a scale. rows:
    what it is cast with where it arrives."""

    slot: Slot
    recipe: GemmRecipe
    known: bool
    rows: GradRows

    @staticmethod
    def of(down: GroupedLinear, known: bool) -> "GradFormat | None":
        """For experts whose second GEMM is `down`; None if its gradients are not FP8."""
        if down.grad_slot is None or down.te is not None:
            return None
        scale, amax = down.grad_slot.scale, down.grad_slot.amax
        assert scale is not None and amax is not None, "precision.bind(model, ...) has not been called"
        return GradFormat(
            down.grad_slot,
            down.recipe,
            known,
            GradRows(scale if known else torch.zeros_like(scale), torch.zeros_like(amax)),
        )

    def quantize(self, dy: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """FP8 data and inverse scales of dy [T, D]; records its amax."""
        slot, recipe = self.slot, self.recipe
        assert slot.scale is not None and slot.amax is not None
        if self.known or recipe.scaling.granularity is not Granularity.tensor:
            return get_backend(recipe.backend).quantize(dy, slot.scale, slot.amax, recipe.grad, recipe)
        own = absolute_max(dy)
        record_amax(slot.amax, own)
        data, inv = _cast_together(dy, own, exchange, recipe, gradient=True)
        self.rows.scale.copy_(inv.reciprocal())
        return data, inv


def send(
    x: Operand | Tensor,
    weight_TK: Tensor,
    choices: Choices,
    exchange: Exchange,
    experts: GroupedLinear,
    known: bool,
) -> tuple[Operand | Tensor, Tensor]:
    """Tokens x [T, D] and the router's weights [T, K] FP32 to the experts: x [A, D] and weights [A, 1].

    experts: what reads x, in FP8 if x is an Operand. known: whether the arena has a scale for it. The gradient's rows
    come back in the dtype of x (of an Operand: of the tensor it was cast from).
    """
    if isinstance(x, Tensor):
        x_AD, weight_A1, _, _ = _Send.apply(x, weight_TK, x.detach(), None, choices, exchange)
        return x_AD, weight_A1
    data, inv, recipe = x.data, x.scale_inv, experts.recipe
    if inv.dim() == 0 and not known:
        plain = x.tensor.detach()
        data, inv = _cast_together(plain, absolute_max(plain), exchange, recipe, gradient=False)
    per_row = inv if inv.dim() else None
    carrier, weight_A1, data, inv_A = _Send.apply(x.carrier, weight_TK, data, per_row, choices, exchange)
    return Operand(carrier, data, inv if per_row is None else inv_A, kept=False), weight_A1


def bring_back(
    y_AD: Tensor, add_TD: Tensor, choices: Choices, exchange: Exchange, grad: GradFormat | None, accumulate: torch.dtype
) -> Tensor:
    """Experts' results [A, D], as rows arrived -> add + each token's sum, [T, D] in add's dtype. grad: FP8 for dy, else
    it travels in y's dtype."""
    return _BringBack.apply(y_AD, add_TD, choices, exchange, grad, accumulate)


class _Send(torch.autograd.Function):
    """carrier: x's autograd edge; data, inv [T, ...] (or None): what travels."""

    @staticmethod
    def forward(
        ctx,
        carrier: Tensor,
        weight_TK: Tensor,
        data: Tensor,
        inv: Tensor | None,
        choices: Choices,
        exchange: Exchange,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        R = choices.rows
        beside = choices.weight[:R, None]
        if inv is not None:
            beside = torch.cat([beside, inv.index_select(0, choices.token[:R])], 1)
        data_AD, beside = exchange.there(choices.gather(data)), exchange.there(beside)
        # scales of blocks lie as kernels read them, one block of all rows after the other
        inv_A, weight_A1 = beside[:, 1:].t().contiguous().t(), beside[:, :1].contiguous()
        ctx.save_for_backward(*choices[:4])
        ctx.kernels, ctx.exchange, ctx.dtype = choices.kernels, exchange, carrier.dtype
        if data.dtype == carrier.dtype:
            x_AD, data_AD = data_AD, data_AD.new_empty(0)
        else:
            x_AD = carrier.new_zeros(()).expand(data_AD.shape)
        ctx.mark_non_differentiable(data_AD, inv_A)
        return x_AD, weight_A1, data_AD, inv_A

    @staticmethod
    def backward(ctx, *grads: Tensor):
        choices = _saved_choices(ctx)
        dx_RD = ctx.exchange.back(grads[0])
        dweight_R = ctx.exchange.back(grads[1]).squeeze(1)
        dx_TD = choices.sum(dx_RD, None, torch.float32).to(ctx.dtype)
        return dx_TD, dweight_R[choices.position.long()], *(None,) * 4


class _BringBack(torch.autograd.Function):
    """add + sum over each token's rows; see `bring_back`."""

    @staticmethod
    def forward(
        ctx,
        y_AD: Tensor,
        add_TD: Tensor,
        choices: Choices,
        exchange: Exchange,
        grad: GradFormat | None,
        accumulate: torch.dtype,
    ) -> Tensor:
        y_RD = exchange.back(y_AD)
        ctx.save_for_backward(*choices[:4])
        ctx.kernels, ctx.exchange, ctx.grad, ctx.dtype = choices.kernels, exchange, grad, y_AD.dtype
        return choices.sum(y_RD, add_TD, accumulate).to(add_TD.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        choices, exchange, dy = _saved_choices(ctx), ctx.exchange, grads[0]
        if ctx.grad is None:
            return exchange.there(choices.gather(dy.to(ctx.dtype))), dy, *(None,) * 4
        data, inv = ctx.grad.quantize(dy.to(ctx.dtype), exchange)
        data_AD = exchange.there(choices.gather(data))
        if inv.dim():
            inv = exchange.there(inv.index_select(0, choices.token[: choices.rows]))
        return read_back(data_AD, inv, ctx.dtype), dy, *(None,) * 4


def _saved_choices(ctx) -> Choices:
    token, weight, position, ends = ctx.saved_tensors
    return Choices(token, weight, position, ends, ctx.kernels)


def read_back(data: Tensor, inv: Tensor, dtype: torch.dtype) -> Tensor:
    """What FP8 data [A, D] with inverse scales [], [A, 1] or [A, ceil(D / 128)] stands for."""
    D = data.shape[-1]
    if inv.dim() and inv.shape[-1] > 1:
        inv = inv.repeat_interleave(128, -1)[:, :D]
    return (fp8_values(data).float() * inv).to(dtype)


def _cast_together(
    x: Tensor, own: Tensor, exchange: Exchange, recipe: GemmRecipe, gradient: bool
) -> tuple[Tensor, Tensor]:
    """FP8 data and inverse scale (0-d) of x, under one scale for the whole group. own: amax of x."""
    fmt, scaling = recipe.grad if gradient else recipe.input, recipe.scaling
    scale = scale_from_amax(exchange.largest(own), fmt.max, scaling.margin, scaling.power_of_two)
    return saturating_cast(x, scale, fmt), scale.reciprocal()


def _bytes(x: Tensor) -> Tensor:
    """FP8 as bytes: few ops know it."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def travels_by_kernels(
    gate_up: GroupedLinear, down: GroupedLinear, combine: torch.dtype, accumulate: torch.dtype
) -> bool:
    """Whether rows are gathered and summed by kernels: where the experts' layer is one of kernels."""
    return has_kernels(gate_up, down) and combine == torch.bfloat16 and accumulate == torch.float32
