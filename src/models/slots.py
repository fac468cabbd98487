"""Expert parallelism without host synchronisation: tokens travel in fixed slots.

`dispatch.AllToAllDispatcher` sends exactly the rows that are needed, so the host must learn their number. Here each
pair of processes has C slots, more than it usually needs, and the experts of a process have room for N choices:

    C = f x T x (1 - (1 - 1/P)^K), T at most         N = f x T x K, P x C x min(K, E/P) at most

So every shape is known in advance, and the number of used slots stays on the device. Unused slots belong to no expert
(`expert = E/P`), and kernels skip them. The results equal the AllToAllDispatcher's bit for bit: rows come in the same
order, and experts' kernels end where the last expert's rows do.

*Overflow.* `Slots.fill` is the largest used share of any room since the step began, on the device (counting only room
that may be too small: C below T, or N below its maximum). Above 1, rows or choices were left out: the step is skipped
on all ranks (`trainer.step.guard`), and f grows when the host reads the verdict. f is `parallel.dispatch_capacity`;
memory grows with it. A run begins without slots, and leaves them after an overflow: tokens travel by the
AllToAllDispatcher, and `fill` is the share that slots would have needed. Each review fits f to it, and slots are used
when `fill` stayed below 90 % in two in a row. So the router's choices have settled before an overflow costs a step.

*Overlap with the shared experts.* Rows are sent and received on a separate stream, from `begin` to `finish`. So is the
backward pass of that part, because autograd runs it on the forward stream: gradients of tokens return during the shared
experts' backward pass. The return of results, and of their gradients, does not overlap.

Without gradients (evaluation), too, the AllToAllDispatcher is used, which needs no extra room.

With delayed scales the host reads once whether the arena has them; after that it does not wait. A scale that was lost
again makes `fill` infinite: the step is skipped, and the host checks again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.dispatch import AllToAllDispatcher, RoutedExperts, keep_untraced, largest, moves_in_kernels, scale_of
from models.transport import Transport
from precision import Operand
from precision.wire import GradFormat, RowMap, return_to_tokens, send

NEARLY_FULL, SPARE, OBSERVED = 0.9, 1.25, 2
UNIT = 16  # slots: blocks of rows of whole words then begin at multiples of 16 bytes


@dataclass
class Slots:
    """State shared by a model's dispatchers. capacity: f; fill: see the module docstring, 0-d FP32."""

    transport: Transport
    capacity: float
    fill: Tensor
    observing: int = 0
    """Reviews with room to spare that are missing before slots are used."""
    known: set[int] = field(default_factory=set)
    """Dispatchers (by id) that have their scales in the arena."""

    def __post_init__(self) -> None:
        self._least = self.capacity
        self.stream = torch.cuda.Stream(self.fill.device, priority=-1) if self.fill.is_cuda else None

    def fit(self, fill: float) -> None:
        """Review the largest share of some steps. Enlarge the room if it may not suffice, and observe if it did not;
        while observing, fit it to the last steps. Infinite: a scale was missing; check again."""
        if fill == torch.inf:
            self.known.clear()
            return
        calm = fill <= NEARLY_FULL
        if not calm or (self.observing and fill > 0):
            self.capacity = max(self._least, self.capacity * fill * SPARE)
        if calm:
            self.observing = max(0, self.observing - 1)
        elif self.observing or fill > 1:
            self.observing = OBSERVED

    def state_dict(self) -> dict[str, Any]:
        """Return what reviews have learned, and for which processes and least capacity, for the checkpoint."""
        return {"capacity": self.capacity, "observing": self.observing, "valid_for": self._valid_for}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what reviews had learned, if it holds here; else the run observes again."""
        if state["valid_for"] == self._valid_for:
            self.capacity, self.observing = state["capacity"], state["observing"]

    @property
    def _valid_for(self) -> list[float]:
        return [dist.get_world_size(self.transport.group), self._least]

    def sizes(self, tokens: int, chosen: int, each: int) -> tuple[int, int]:
        """Return C and N for T tokens of K choices, with `each` experts per process."""
        P = dist.get_world_size(self.transport.group)
        return room(self.capacity, tokens, chosen, P, each)

    def record_need(self, share: Tensor) -> None:
        """Record the needed share of some room, 0-d."""
        torch.maximum(self.fill, share.float(), out=self.fill)

    def record_rows(self, rows: Tensor, choices: Tensor, tokens: int, chosen: int, each: int) -> None:
        """Record the share that is needed of C, for rows [P] to each process, and of N, for the choices [P] that come
        from each."""
        slots, room = self.sizes(tokens, chosen, each)
        if slots < tokens:  # else there can be no more
            self.record_need(rows.max() / slots)
        if room < len(rows) * slots * min(chosen, each):
            self.record_need(choices.sum() / room)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Run the code inside on a separate stream, after everything launched before; it is in use until `join`."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for that one."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


def room(capacity: float, tokens: int, chosen: int, processes: int, each: int) -> tuple[int, int]:
    """Return C and N of the module docstring: slots per pair of processes, and choices for the experts of one
    process."""
    share = 1 - (1 - 1 / processes) ** chosen
    slots = -(-min(tokens, int(capacity * tokens * share) + 1) // UNIT) * UNIT
    return slots, min(int(capacity * tokens * chosen) + 1, processes * slots * min(chosen, each))


@dataclass
class _Exchange:
    """`precision.wire.Exchange` by slots. sent, received [P] int64: slots in use."""

    transport: Transport
    sent: Tensor
    received: Tensor

    def to_experts(self, *rows: Tensor) -> list[Tensor]:
        """Send [P C, ...]; return the same shape."""
        return self.transport.exchange(_contiguous(rows), self.sent, self.received, keep=True)

    def to_tokens(self, *rows: Tensor) -> list[Tensor]:
        """Return [P C, ...] to the senders; same shape."""
        return self.transport.exchange(_contiguous(rows), self.received, self.sent, keep=False)

    def largest(self, x: Tensor) -> Tensor:
        """Return the group's maximum, 0-d."""
        return largest(x, self.transport.group)


def _contiguous(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one.contiguous() for one in rows)


@dataclass
class _Pending:
    """State between the two calls. arrived: the result of `send`. x, held: kept alive until the other stream has read
    them."""

    x: Operand | Tensor
    held: tuple[Tensor, Tensor]
    row_map: RowMap
    exchange: _Exchange
    arrived: tuple[Operand | Tensor, Tensor, Tensor]
    room: int
    dy_known: bool


class SlotDispatcher:
    """Dispatcher with fixed slots; see the module docstring. experts: the global ones that are here. UserError if they
    cannot be spread evenly."""

    traceable = False

    def __init__(self, slots: Slots, num_experts: int):
        self.slots, self._whole = slots, AllToAllDispatcher(slots.transport.group, num_experts)
        self.experts = self._whole.experts
        keep_untraced(self)

    def begin(self, x: Operand | Tensor, expert_TK: Tensor, weight_TK: Tensor, experts: RoutedExperts) -> Any:
        """See `dispatch.Dispatcher`: sends the tokens."""
        if not torch.is_grad_enabled():
            return self._whole.begin(x, expert_TK, weight_TK, experts)
        if self.slots.observing:
            pending = self._whole.begin(x, expert_TK, weight_TK, experts)
            (T, K), each = expert_TK.shape, len(self.experts)
            sent, received, _ = pending.counts
            self.slots.record_rows(sent[:, 0], received[:, 1], T, K, each)
            return pending
        x_known, dy_known = self._known(experts)
        with self.slots.side_stream():
            return self._send(x, expert_TK, weight_TK, experts, x_known, dy_known)

    def finish(self, pending: Any, add_TD: Tensor, experts: RoutedExperts) -> Tensor:
        if not isinstance(pending, _Pending):
            return self._whole.finish(pending, add_TD, experts)
        self.slots.join()
        down, is_operand = experts.down, isinstance(pending.x, Operand)
        grad = GradFormat.of(down, pending.dy_known) if is_operand else None
        x, expert_AK, weight_AK = pending.arrived
        choices = pending.room
        if not pending.row_map.kernels:  # plain ops need exact shapes, of one row at least
            choices = int((expert_AK < len(self.experts)).sum())
            if not choices:  # a row of zeros, as the AllToAllDispatcher's
                expert_AK = torch.cat([torch.zeros_like(expert_AK[:1]), expert_AK[1:]])
                choices = expert_AK.shape[1]
        y_AD = experts(x, expert_AK, weight_AK, None, None if grad is None else grad.rows, choices)
        return return_to_tokens(y_AD, add_TD, pending.row_map, pending.exchange, grad, experts.accumulate)

    def _send(
        self,
        x: Operand | Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        experts: RoutedExperts,
        x_known: bool,
        dy_known: bool,
    ) -> _Pending:
        (T, K), P, each = expert_TK.shape, self._whole.size, len(self.experts)
        slots, room = self.slots.sizes(T, K, each)
        row_map, wanted = RowMap.in_slots(expert_TK, P, each, moves_in_kernels(experts), slots)
        sent = wanted.clamp(max=slots)
        choices = torch.zeros_like(sent).scatter_add_(
            0, row_map.owner.flatten(), torch.ones_like(row_map.owner).flatten()
        )
        (received,) = self.slots.transport.exchange(
            (torch.stack([sent, choices], 1),), torch.ones_like(sent), None, keep=True
        )
        self.slots.record_rows(wanted, received[:, 1], T, K, each)
        for slot, known in ((experts.first.input_slot, x_known), (experts.down.grad_slot, dy_known)):
            if known:
                self.slots.record_need(torch.where(scale_of(slot, sent) > 0, 0.0, torch.inf))
        exchange = _Exchange(self.slots.transport, sent, received[:, 0].contiguous())
        x_AD, expert_AK, weight_AK = send(x, expert_TK, weight_TK.float(), row_map, exchange, experts.first, x_known)
        if room < expert_AK.numel():
            here = expert_AK < each
            fits = here.flatten().cumsum(0).view_as(here) <= room
            expert_AK = torch.where(here & fits, expert_AK, each)
        return _Pending(x, (expert_TK, weight_TK), row_map, exchange, (x_AD, expert_AK, weight_AK), room, dy_known)

    def _known(self, experts: RoutedExperts) -> tuple[bool, bool]:
        """Return whether the arena has scales of x and of dy: with delayed scales, from the first history on."""
        first, down = experts.first, experts.down
        read = [
            slot if layer.recipe.delayed else None
            for layer, slot in ((first, first.input_slot), (down, down.grad_slot))
        ]
        has = [slot is not None for slot in read]
        if id(self) not in self.slots.known and any(has):
            has = (torch.stack([scale_of(slot, self.slots.fill) for slot in read]) > 0).tolist()
        if all(one or slot is None for one, slot in zip(has, read, strict=True)):
            self.slots.known.add(id(self))
        return has[0], has[1]
