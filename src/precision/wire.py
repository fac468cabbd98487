"""Sending tokens to experts in other processes and back, and the formats on the wire.

A token is sent once to each process that holds any of its K experts, with a list of them and the router's weights. Rows
are sorted by process, then by token. The receiver sums its experts' weighted results and returns one row.

                      forward                                          backward
    to the experts    x: FP8 with scales, or BF16; experts, weights    dy: FP8 with scales, or BF16
    back to tokens    y: BF16, the sum over the experts of one         dx: BF16, likewise; the weights' gradients
                      process in FP32; summed over processes in FP32

With top-6 of 64 experts on 8 processes these are 4.4 rows per token; one row per expert would be 6.

The norm quantises x once. dy is quantised here once, before it is sent; the receiver reads it back into BF16 and casts
it again under the same scale, which changes no number (see `GradRows`).

Scales are sent beside the numbers where there is one per row or per 128 values of it. A scale per tensor comes from the
arena, which is the same in all processes, so it is not sent. Before there is a history, and with current scaling, the
processes agree on the scale of the largest amax among them, and x is quantised again.

Legend: T tokens, D hidden, K chosen experts of a token, P processes, R rows sent, A rows arrived, E experts in all.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from precision import formats
from precision.backends import get_backend
from precision.config import Granularity
from precision.formats import Format, saturating_cast
from precision.fused import sum_rows
from precision.linear import GroupedLinear
from precision.observe import report
from precision.operand import GradRows, Operand
from precision.rows import GemmRecipe
from precision.scaling import Slot, absolute_max, record_amax, scale_from_amax


class Exchange(Protocol):
    """Moves rows between the processes of a group, in the sizes of one forward pass; several tensors in one message."""

    def to_experts(self, *rows: Tensor) -> list[Tensor]:
        """Send rows [R, ...], sorted by process, to their processes; return the arrived rows [A, ...] of each
        tensor."""
        ...

    def to_tokens(self, *rows: Tensor) -> list[Tensor]:
        """Return rows [A, ...] to their senders; the result [R, ...] is in the order sent, valid until the next
        message."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """Return the maximum over the group of a number >= 0, 0-d FP32; NaN if any is NaN."""
        ...


class RowMap(NamedTuple):
    """The rows that T tokens send.

    token [R]: the token of each row. process [R]: its destination. position [T, P]: the row of a token to a process, -1
    for none. owner [T, K]: the process of each chosen expert. each: experts per process. kernels: whether `gather` and
    `sum` run as kernels of the cuda backend (BF16 results). partial: whether some chosen experts are in none of the P
    processes (owner P).

    Until `cut`, when the host knows R, token and process have room for the largest R. With slots (`in_slots`), R is
    fixed: each process gets `slots` rows, used ones first; token is -1 in the unused ones.
    """

    token: Tensor
    process: Tensor
    position: Tensor
    owner: Tensor
    each: int
    kernels: bool
    slots: int = 0
    partial: bool = False

    @staticmethod
    def packed(expert_TK: Tensor, processes: int, each: int, kernels: bool, partial: bool = False) -> "RowMap":
        """Compute the rows to send for expert [T, K] int64; process p holds experts p * each to (p + 1) * each - 1.
        partial: `processes * each` stands for an expert that none of them holds."""
        (T, K), P = expert_TK.shape, processes
        owner_TK = expert_TK // each
        wanted_PT = torch.zeros(P + partial, T, dtype=torch.bool, device=expert_TK.device)
        wanted_PT = wanted_PT.scatter_(0, owner_TK.t(), True)[:P]
        row_PT = wanted_PT.flatten().cumsum(0).view(P, T) - 1
        room = T * min(K, P)
        place_PT = torch.where(wanted_PT, row_PT, room)
        index = torch.zeros(room + 1, dtype=torch.int64, device=expert_TK.device)
        index.scatter_(0, place_PT.flatten(), torch.arange(P * T, device=expert_TK.device))
        position_TP = torch.where(wanted_PT, row_PT, -1).t().contiguous()
        fmt = torch.int32 if kernels else torch.int64
        return RowMap((index % T).to(fmt), index // T, position_TP.to(fmt), owner_TK, each, kernels, partial=partial)

    @staticmethod
    def in_slots(expert_TK: Tensor, processes: int, each: int, kernels: bool, slots: int) -> tuple["RowMap", Tensor]:
        """As `packed`, with `slots` rows per process; also return how many rows each process needs, [P] int64. Excess
        rows are not sent."""
        T, P = expert_TK.shape[0], processes
        device, owner_TK = expert_TK.device, expert_TK // each
        wanted_PT = torch.zeros(P, T, dtype=torch.bool, device=device).scatter_(0, owner_TK.t(), True)
        place_PT = wanted_PT.cumsum(1) - 1
        sent_PT = wanted_PT & (place_PT < slots)
        row_PT = place_PT + torch.arange(P, device=device)[:, None] * slots
        token = torch.full((P * slots + 1,), -1, dtype=torch.int64, device=device)
        token_PT = torch.arange(T, device=device).expand(P, T)
        token.scatter_(0, torch.where(sent_PT, row_PT, P * slots).flatten(), token_PT.flatten())
        process = torch.arange(P * slots, device=device) // slots
        position_TP = torch.where(sent_PT, row_PT, -1).t().contiguous()
        fmt = torch.int32 if kernels else torch.int64
        made = RowMap(token[:-1].to(fmt), process, position_TP.to(fmt), owner_TK, each, kernels, slots)
        return made, wanted_PT.sum(1)

    def cut(self, rows: int) -> "RowMap":
        """Cut token and process to R rows."""
        return self._replace(token=self.token[:rows], process=self.process[:rows])

    def counts(self) -> Tensor:
        """Return [P, 2] int64: the rows to each process, and the number of their choices."""
        P, owner = self.position.shape[1], self.owner.flatten()
        choices_P = torch.zeros(P + self.partial, dtype=torch.int64, device=owner.device)
        choices_P = choices_P.scatter_add_(0, owner, torch.ones_like(owner))[:P]
        return torch.stack([(self.position >= 0).sum(0), choices_P], 1)

    def gather(self, x_TD: Tensor) -> Tensor:
        """Gather x [T, D] into rows [R, D]."""
        if not self.kernels:
            numbers = x_TD.view(torch.uint8) if x_TD.element_size() == 1 else x_TD  # few ops support FP8
            return self.of_tokens(numbers).view(x_TD.dtype)
        from precision.kernels.route import gather

        return gather(x_TD.contiguous(), None, self._route(), None)[0]

    def of_tokens(self, x: Tensor) -> Tensor:
        """Gather x [T, ...] into [R, ...]; 0 in unused slots."""
        if not self.slots:
            return x.index_select(0, self.token)
        return x.index_select(0, self.token.clamp_min(0)).masked_fill_((self.token < 0)[:, None], 0)

    def sum(self, rows_RD: Tensor, add_TD: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Sum each token's rows, and `add`, in `dtype`; return [T, D] in dtype, or with kernels in the rows' dtype."""
        if not self.kernels:
            none = rows_RD.shape[0]
            if self.slots:  # add one row of zeros for missing places
                rows_RD = torch.cat([rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])])
            total = sum_rows(rows_RD, torch.where(self.position < 0, none, self.position), dtype)
            return total if add_TD is None else total + add_TD
        from precision.kernels.route import combine

        return combine(rows_RD, self._route(), None if add_TD is None else add_TD.contiguous())[0]

    def _route(self):
        from precision.kernels.route import Route

        end = torch.full((1,), self.token.shape[0], dtype=torch.int32, device=self.token.device)
        return Route(self.token, self.token, self.position, end, end, end)


@dataclass
class GradFormat:
    """Format of dy on the wire: cast by `recipe` into the arena rows of `slot`. known: whether the arena has a scale.
    rows: scale and amax row for the cast at the receiver."""

    slot: Slot
    recipe: GemmRecipe
    known: bool
    rows: GradRows

    @staticmethod
    def of(down: GroupedLinear, known: bool) -> "GradFormat | None":
        """Return the format for experts with `down` as their second GEMM; None if its gradients are not FP8."""
        if down.grad_slot is None or down.te is not None:
            return None
        scale, amax = down.grad_slot.rows
        rows = GradRows(scale if known else torch.zeros_like(scale), torch.zeros_like(amax))
        return GradFormat(down.grad_slot, down.recipe, known, rows)

    @staticmethod
    def again(down: GroupedLinear, first: GradRows) -> "GradFormat | None":
        """Return the format for gradients that were sent before, under the scale of `first`: the same numbers.
        Their amax is recorded already."""
        made = GradFormat.of(down, True)
        if made is not None:
            made.slot = Slot(made.slot.names, made.slot.format)
            made.slot.scale, made.slot.amax, made.rows = first.scale, torch.zeros_like(first.amax), first
            made.recipe = made.recipe.with_given_scale
        return made

    def quantize(self, dy: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """Return FP8 data and inverse scales of dy [T, D]; record its amax."""
        recipe, (scale, amax), place = self.recipe, self.slot.rows, self.slot.place
        if self.known or recipe.scaling.granularity is not Granularity.tensor:
            return get_backend(recipe.backend).quantize(dy, scale, amax, recipe.grad, recipe, place)
        own = absolute_max(dy)
        record_amax(amax, own)
        data, inv = _cast_under_group_scale(dy, own, exchange, recipe.grad, recipe)
        report(place, amax, dy, data, inv, recipe.grad)
        self.rows.scale.copy_(inv.reciprocal())
        return data, inv


def send(
    x: Operand | Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    row_map: RowMap,
    exchange: Exchange,
    experts: GroupedLinear,
    known: bool,
) -> tuple[Operand | Tensor, Tensor, Tensor]:
    """Send tokens x [T, D] to their experts [T, K] int64 with the router's weights [T, K] FP32.

    Returns x [A, D], experts [A, K] int64 and weights [A, K] of the rows that arrived. Experts count from the first one
    of this process; `each`, one too many, marks those that are elsewhere.

    experts: the layer that reads x, in FP8 if x is an Operand. known: whether the arena has a scale for it. The
    gradient's rows return in the dtype of x (for an Operand: of the tensor it was cast from).
    """
    if isinstance(x, Tensor):
        x_AD, expert_AK, weight_AK, _, _ = _Send.apply(x, expert_TK, weight_TK, x.detach(), None, row_map, exchange)
        return x_AD, expert_AK, weight_AK
    data, inv, recipe = x.data, x.scale_inv, experts.recipe
    if inv.dim() == 0 and not known:
        plain = x.tensor.detach()
        data, inv = _cast_under_group_scale(plain, absolute_max(plain), exchange, recipe.input, recipe)
    per_row = inv if inv.dim() else None
    carrier, expert_AK, weight_AK, data, inv_A = _Send.apply(
        x.carrier, expert_TK, weight_TK, data, per_row, row_map, exchange
    )
    return Operand(carrier, data, inv if per_row is None else inv_A, kept=False), expert_AK, weight_AK


def return_to_tokens(
    y_AD: Tensor,
    add_TD: Tensor | None,
    row_map: RowMap,
    exchange: Exchange,
    grad: GradFormat | None,
    accumulate: torch.dtype,
) -> Tensor:
    """Return the experts' results [A, D] to their tokens: add + each token's sum, [T, D] in add's dtype (without add:
    the results').

    y_AD: in the order of arrival. grad: FP8 format of dy; None: dy is sent in y's dtype.
    """
    return _ReturnToTokens.apply(y_AD, add_TD, row_map, exchange, grad, accumulate)


class _Send(torch.autograd.Function):
    """Autograd function of `send`. carrier: x's autograd edge. data, inv [T, ...] (or None): the tensors sent."""

    @staticmethod
    def forward(
        ctx,
        carrier: Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        data: Tensor,
        inv: Tensor | None,
        row_map: RowMap,
        exchange: Exchange,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        K, each = expert_TK.shape[1], row_map.each
        local_RK = row_map.of_tokens(expert_TK) - row_map.process[:, None] * each
        elsewhere = (local_RK < 0) | (local_RK > each)
        if row_map.slots:
            elsewhere |= (row_map.token < 0)[:, None]
        local_RK = torch.where(elsewhere, each, local_RK)
        # experts are counted down to 0, which means none, so that unused rows arrive as none
        metadata = [(each - local_RK).int(), row_map.of_tokens(weight_TK).view(torch.int32)]
        if inv is not None:
            metadata.append(row_map.of_tokens(inv).view(torch.int32))
        data_AD, metadata = exchange.to_experts(row_map.gather(data), torch.cat(metadata, 1))
        expert_AK, weight_AK = each - metadata[:, :K].long(), metadata[:, K : 2 * K].contiguous().view(torch.float32)
        # kernels read scales of blocks with one block of all rows after the other
        inv_A = metadata[:, 2 * K :].t().contiguous().view(torch.float32).t()
        ctx.save_for_backward(*row_map[:4])
        ctx.rest, ctx.exchange, ctx.dtype = row_map[4:], exchange, carrier.dtype
        if data.dtype == carrier.dtype:
            x_AD, data_AD = data_AD, data_AD.new_empty(0)
        else:
            x_AD = carrier.new_zeros(()).expand(data_AD.shape)
        ctx.mark_non_differentiable(expert_AK, data_AD, inv_A)
        return x_AD, expert_AK, weight_AK, data_AD, inv_A

    @staticmethod
    def backward(ctx, *grads: Tensor):
        row_map = RowMap(*ctx.saved_tensors, *ctx.rest)
        dx_RD, dweight_RK = ctx.exchange.to_tokens(grads[0], grads[2])
        dx_TD = row_map.sum(dx_RD, None, torch.float32).to(ctx.dtype)
        owner = row_map.owner.clamp(max=row_map.position.shape[1] - 1) if row_map.partial else row_map.owner
        row_TK = row_map.position.gather(1, owner).long()
        choice = torch.arange(row_TK.shape[1], device=row_TK.device)
        dweight_TK = dweight_RK[row_TK, choice]
        if row_map.partial:
            dweight_TK = dweight_TK.masked_fill(row_map.owner != owner, 0)
        if row_map.slots:  # a token that got none reads the last one, which may hold anything
            dweight_TK = dweight_TK.masked_fill(row_TK < 0, 0)
        return dx_TD, None, dweight_TK, *(None,) * 4


class _ReturnToTokens(torch.autograd.Function):
    """Autograd function of `return_to_tokens`: add + the sum over each token's rows."""

    @staticmethod
    def forward(
        ctx,
        y_AD: Tensor,
        add_TD: Tensor | None,
        row_map: RowMap,
        exchange: Exchange,
        grad: GradFormat | None,
        accumulate: torch.dtype,
    ) -> Tensor:
        (y_RD,) = exchange.to_tokens(y_AD)
        ctx.save_for_backward(*row_map[:4])
        ctx.rest, ctx.exchange, ctx.grad, ctx.dtype = row_map[4:], exchange, grad, y_AD.dtype
        ctx.adds = add_TD is not None
        return row_map.sum(y_RD, add_TD, accumulate).to(y_AD.dtype if add_TD is None else add_TD.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        row_map, exchange, dy = RowMap(*ctx.saved_tensors, *ctx.rest), ctx.exchange, grads[0]
        dadd = dy if ctx.adds else None
        if ctx.grad is None:
            return *exchange.to_experts(row_map.gather(dy.to(ctx.dtype))), dadd, *(None,) * 4
        data, inv = ctx.grad.quantize(dy.to(ctx.dtype), exchange)
        if inv.dim():
            data_AD, inv = exchange.to_experts(row_map.gather(data), row_map.of_tokens(inv))
        else:
            (data_AD,) = exchange.to_experts(row_map.gather(data))
        return read_back(data_AD, inv, ctx.dtype, row_map.kernels), dadd, *(None,) * 4


def read_back(data: Tensor, inv: Tensor, dtype: torch.dtype, kernels: bool) -> Tensor:
    """Return the values of FP8 data [A, D] with inverse scales [], [A, 1] or [A, ceil(D / 128)]. kernels: by the
    `cuda` backend's, where dtype is BF16."""
    if kernels and dtype == torch.bfloat16:
        from precision.kernels.read_back import read_back_bf16

        return read_back_bf16(data, inv)
    return formats.read_back(data, inv).to(dtype)


def _cast_under_group_scale(
    x: Tensor, own: Tensor, exchange: Exchange, fmt: Format, recipe: GemmRecipe
) -> tuple[Tensor, Tensor]:
    """Return FP8 data and inverse scale (0-d) of x, under one scale for the whole group. own: amax of x."""
    scaling = recipe.scaling
    scale = scale_from_amax(exchange.largest(own), fmt.max, scaling.margin, scaling.power_of_two)
    return saturating_cast(x, scale, fmt), scale.reciprocal()
