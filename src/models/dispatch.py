"""Dispatchers: they move tokens to their experts and results back to the tokens.

    LocalDispatcher      all experts are in this process: tokens are permuted within the experts' layer
    AllToAllDispatcher   the E experts are spread over the P processes of a group; process r holds experts r E/P to
                         (r + 1) E/P - 1. A token travels to the processes of its K experts, their results travel back
                         (expert parallelism; DeepSeek-V3, arXiv 2412.19437, section 3.2)
    TwoHopDispatcher     the same over several nodes: a token travels once to each node that it needs, and from there to
                         the node's processes

`precision.wire` defines the message format; this module decides how many rows each pair of processes exchanges. Each
process counts its rows for every other one and sends the counts. The collectives need them on the host: one copy from
the device per layer and forward pass, which the backward pass reuses. The shared experts run between the copy's start
and its use, so that the device has work while the host waits. Everything else stays on the device.

All processes of a group make the same forward and backward passes, evaluation and recomputation included: each is a
collective. It cannot be traced or recorded, so it runs outside compiled graphs (`torch.compiler.disable`) and excludes
cuda_graph. Compilation loses nothing where the experts are one operator.

*Gradients.* An expert's weights receive tokens from P processes, so their gradient is a sum over P processes. Therefore
each process's loss must be its share of the whole run's mean (divided by the number of all microbatches of all
processes), and gradients are summed, not averaged, over the processes that hold the same experts, as `trainer.parallel`
does with all weights. Experts then need no extra factor.

Legend: T tokens, D hidden, E experts, K chosen of a token, P processes, R rows sent, A rows arrived.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from precision import GradRows, GroupedLinear, Operand
from precision.errors import UserError, counted
from precision.ffn import has_row_kernels
from precision.wire import GradFormat, RowMap, return_to_tokens, send


class RoutedExperts(Protocol):
    """The experts of a layer in this process, as a dispatcher sees them."""

    down: GroupedLinear
    combine: torch.dtype
    accumulate: torch.dtype

    @property
    def first(self) -> GroupedLinear:
        """The first GEMM."""
        ...

    @property
    def is_gated(self) -> bool:
        """Whether SwiGLU follows it."""
        ...

    def __call__(
        self,
        x: Operand | Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        add_TD: Tensor | None,
        grad: GradRows | None = None,
        choices: int = -1,
    ) -> Tensor:
        """Apply the experts of this process to x [T, D] and add `add`; return [T, D].

        expert_TK: counted from this process's first expert. weight_TK: their weights. choices: how many of the T K
        choices are here; the others are one past the last expert; -1: all.
        """
        ...


class Dispatcher(Protocol):
    """Two calls per forward pass: code between them runs while the rows of the first call are in transit.

    traceable: whether compiled graphs may contain them.
    """

    traceable: bool

    def begin(self, x: Operand | Tensor, expert_TK: Tensor, weight_TK: Tensor, experts: RoutedExperts) -> Any:
        """Start the dispatch and return the state for `finish`. x [T, D]; expert [T, K] int64 and weight [T, K] FP32:
        the router's choice."""
        ...

    def finish(self, pending: Any, add_TD: Tensor, experts: RoutedExperts) -> Tensor:
        """Return add [T, D] + the weighted sum over each token's experts, [T, D] in add's dtype."""
        ...


class LocalDispatcher:
    """Dispatcher for experts that are all in this process."""

    traceable = True

    def begin(
        self, x: Operand | Tensor, expert_TK: Tensor, weight_TK: Tensor, experts: RoutedExperts
    ) -> tuple[Operand | Tensor, Tensor, Tensor]:
        return x, expert_TK, weight_TK

    def finish(
        self, pending: tuple[Operand | Tensor, Tensor, Tensor], add_TD: Tensor, experts: RoutedExperts
    ) -> Tensor:
        return experts(*pending, add_TD)


class _OnHost:
    """A tensor [N] on its way to the host."""

    def __init__(self, x: Tensor):
        self._x, self._ready = x, None
        if x.is_cuda:
            self._x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> list[int]:
        """Wait for it; return its values."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._x.tolist()


class Counts(NamedTuple):
    """sent, received [P, 2] int64: rows and choices to and from each process. summary: what `finish` needs of these,
    and whether scales are known."""

    sent: Tensor
    received: Tensor
    summary: _OnHost


@dataclass
class Pending:
    """State between the two calls. expert, weight: the router's."""

    x: Operand | Tensor
    row_map: RowMap
    expert: Tensor
    weight: Tensor
    counts: Counts


@dataclass
class _Exchange:
    """`precision.wire.Exchange` over a process group. sent, received: rows to and from each process. agree: the
    processes of `largest`.

    Where nothing arrives, one row of zeros does, so that the experts produce gradients (of zero).
    """

    group: Any
    sent: list[int]
    received: list[int]
    agree: Any

    def to_experts(self, *rows: Tensor) -> list[Tensor]:
        """Send rows [R, ...]; return [A, ...]."""
        arrived = [self._move(one, self.sent, self.received) for one in rows]
        return arrived if len(arrived[0]) else [one.new_zeros(1, *one.shape[1:]) for one in rows]

    def to_tokens(self, *rows: Tensor) -> list[Tensor]:
        """Return rows [A, ...] to their senders; the result is [R, ...]."""
        return [self._move(one[: sum(self.received)], self.received, self.sent) for one in rows]

    def largest(self, x: Tensor) -> Tensor:
        """Return the group's maximum, 0-d."""
        return largest(x, self.agree)

    def _move(self, rows: Tensor, sizes: list[int], into: list[int]) -> Tensor:
        rows = rows.contiguous()
        out = rows.new_empty(sum(into), *rows.shape[1:])
        # as bytes: the values do not matter, and not every backend supports every format
        dist.all_to_all_single(out.view(torch.uint8), rows.view(torch.uint8), into, sizes, group=self.group)
        return out


def largest(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the largest of a group's numbers >= 0, 0-d FP32; NaN if any is NaN."""
    bits = x.float().view(torch.int32).clone()  # numbers >= 0 sort like their bits; NaN is the largest
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


def check_even(num_experts: int, processes: int) -> None:
    """Raise a UserError if the experts cannot be spread evenly."""
    if num_experts % processes:
        raise UserError(
            f"parallel.expert={processes}: {counted(num_experts, 'expert')} cannot be spread evenly; set a divisor of "
            f"model.num_experts={num_experts}"
        )


def keep_untraced(dispatcher: Dispatcher) -> None:
    """Keep a dispatcher's calls out of compiled graphs. (Decorators would make every program import the compiler.)"""
    for name in ("begin", "finish"):
        setattr(dispatcher, name, torch.compiler.disable(getattr(dispatcher, name)))


def moves_in_kernels(experts: RoutedExperts) -> bool:
    """Return whether kernels gather and sum the rows of these experts."""
    return experts.is_gated and has_row_kernels(experts.first, experts.down, experts.combine, experts.accumulate)


class AllToAllDispatcher:
    """Dispatcher for experts spread over the processes of `group`; see the module docstring. experts: the global ones
    that are here. agree: the processes that share scales, if not the group. second_hop: rows are quantised already,
    and have some of their experts elsewhere (`models.two_hops`).

    UserError if they cannot be spread evenly.
    """

    traceable = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        agree: dist.ProcessGroup | None = None,
        second_hop: bool = False,
    ):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        check_even(num_experts, size)
        self.group, self.size, self._agree, self._second_hop = group, size, agree or group, second_hop
        each = num_experts // size
        self.experts = range(rank * each, (rank + 1) * each)
        keep_untraced(self)

    def begin(self, x: Operand | Tensor, expert_TK: Tensor, weight_TK: Tensor, experts: RoutedExperts) -> Pending:
        """See `Dispatcher`: computes the tokens' rows, counts them, and sends the counts to the other processes."""
        row_map = self.rows(expert_TK, experts)
        return Pending(x, row_map, expert_TK, weight_TK, self.count(row_map.counts(), experts))

    def rows(self, expert_TK: Tensor, experts: RoutedExperts) -> RowMap:
        """Return the rows that the tokens send."""
        return RowMap.packed(expert_TK, self.size, len(self.experts), moves_in_kernels(experts), self._second_hop)

    def count(self, sent: Tensor, experts: RoutedExperts) -> Counts:
        """Exchange the numbers of rows and choices [P, 2], and start their way to the host."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        scales = [scale_of(experts.first.input_slot, sent), scale_of(experts.down.grad_slot, sent)]
        summary = torch.cat([sent[:, 0], received[:, 0], received[:, 1].sum()[None], torch.stack(scales) > 0])
        return Counts(sent, received, _OnHost(summary))

    def finish(
        self, pending: Pending, add_TD: Tensor | None, experts: RoutedExperts, first: GradRows | None = None
    ) -> Tensor:
        """See `Dispatcher`. In a second hop nothing is added; first: scale and amax of dy in the first hop."""
        *sizes, choices, x_known, dy_known = pending.counts.summary.read()
        exchange = _Exchange(self.group, sizes[: self.size], sizes[self.size :], self._agree)
        x, first_gemm, down, row_map = pending.x, experts.first, experts.down, pending.row_map.cut(sum(exchange.sent))
        x_known, dy_known = x_known and first_gemm.recipe.delayed, dy_known and down.recipe.delayed
        grad = None
        if isinstance(x, Operand):
            grad = GradFormat.of(down, bool(dy_known)) if first is None else GradFormat.again(down, first)
        x_AD, expert_AK, weight_AK = send(
            x, pending.expert, pending.weight.float(), row_map, exchange, first_gemm, bool(x_known) or self._second_hop
        )
        if not any(exchange.received):  # the row of zeros needs an expert to yield a gradient
            expert_AK, choices = torch.zeros_like(expert_AK), expert_AK.shape[1]
        y_AD = experts(x_AD, expert_AK, weight_AK, None, None if grad is None else grad.rows, choices)
        return return_to_tokens(y_AD, add_TD, row_map, exchange, grad, experts.accumulate)


def scale_of(slot: Any, like: Tensor) -> Tensor:
    """Return the arena's scale of a tensor, 0-d; 0 where there is none."""
    if slot is None or slot.scale is None:
        return torch.zeros((), device=like.device)
    return slot.scale
