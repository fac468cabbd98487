"""Large weights travel without copies: gathered into the memory that GEMMs read, gradients reduced from where they were
made.

FSDP2 makes one message of all weights of a block, and copies each out of it; and one of all gradients, into which it
copies them. This reads and writes every number again, the largest cost of sharding after the messages themselves. If
the first dimension of a weight is cut evenly (a stack [E, N, K] of experts, a head [V, D]), its parts are contiguous
and already laid out as in a message. So each large one gets a message of its own. Its gradient is sent as soon as it
exists; the head's is the first, while FSDP would reduce it with the embedding's at the very end. The small ones (3 % of
a block of Moonlight) stay with FSDP.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import DeepSeek
from trainer.parallel.fsdp_internals import AllGather, Group, Shard, groups
from trainer.parallel.mesh import is_large

PENDING = 2  # gradients that may wait for their messages: those of a block's experts
SENDING = 2  # groups of parts in transit: as far as FSDP gathers ahead


class GatherBuffer:
    """Buffer of a large weight of `shape`: its memory on this rank, which FSDP frees with its own, and this rank's part
    while it waits to be sent."""

    def __init__(self, shape: torch.Size):
        self._shape = shape
        self.numbers = torch.empty(0)
        self.part: Tensor | None = None

    def allocate(self) -> None:
        """Allocate the whole of which `part` is a part, in its dtype, unless it exists; on the current stream."""
        if self.part is None:
            return
        if not self.numbers.numel():
            self.numbers = self.part.new_empty(self._shape)
        memory, size = self.numbers.untyped_storage(), self.numbers.numel() * self.numbers.itemsize
        if memory.size() != size:
            memory.resize_(size)

    def gather(self, comm: AllGather, ranks: dist.ProcessGroup) -> Tensor | None:
        """Send the part and receive all parts into `numbers`, complete when the current stream reaches this point.
        Return the part, which must live until then."""
        if self.part is None:
            return None
        part, self.part = self.part, None
        # `data`: the backward pass receives the same numbers again, which is no change to it
        comm(output_tensor=self.numbers.data.view(-1), input_tensor=part.view(-1), group=ranks)
        return part


Sending = deque[tuple[list[Tensor | None], Any, Any]]


class LargeWeights(AllGather):
    """FSDP's all-gather for a group: its own message, and those of the large weights.

    Steps run on the stream that is current at construction. The memory of whole weights belongs to that stream, which
    reads and frees it. comm: sends a message; sending: parts in flight, of all groups, with the stream that made them
    and the event of their arrival.
    """

    def __init__(self, comm: AllGather, buffers: list[GatherBuffer], sending: Sending, device: torch.device):
        self.comm = comm
        self._buffers, self._sending, self._device = buffers, sending, torch.get_device_module(device)
        self._steps = self._made = self._device.current_stream()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate FSDP's message on the current stream, on which the parts were just made."""
        self._made = self._device.current_stream()
        while len(self._sending) >= SENDING:  # else a host far ahead would queue parts of the whole model
            _parts, made, arrival = self._sending.popleft()
            made.wait_event(arrival)  # the next owner of their memory waits
        return self.comm.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Run on the current stream, which is that of messages."""
        work = self.comm(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        with self._device.stream(self._steps):
            for buffer in self._buffers:
                buffer.allocate()
        self._device.current_stream().wait_stream(self._steps)  # the memory's previous owner may still run
        parts = [buffer.gather(self.comm, group) for buffer in self._buffers]
        self._sending.append((parts, self._made, self._device.current_stream().record_event()))
        return work


class LargeGradients:
    """Takes over the gradients of large weights that are cut evenly, in backward passes that reduce."""

    def __init__(self, model: DeepSeek):
        self._pending: deque[tuple[Tensor, Tensor, Any]] = deque()
        for module, group in groups(model):
            large = [shard for shard in group.shards if is_large(shard.size, shard.num_ranks)]
            if large:
                # the gathered parameter exists after FSDP's first gather
                handles: list[Any] = []
                handles.append(module.register_forward_pre_hook(partial(self._attach, handles, group, large)))

    def _attach(self, handles: list[Any], group: Group, large: list[Shard], module: nn.Module, args: tuple) -> None:
        handles.pop().remove()
        for shard in large:
            shard.whole.register_post_accumulate_grad_hook(partial(self._reduce, group, shard))

    @torch.no_grad()
    def _reduce(self, group: Group, shard: Shard, whole: Tensor) -> None:
        """Send the gradient of `whole` and add the received part to that of its shard."""
        if not group.reduces:
            return  # later microbatches add to it
        gradient, whole.grad = cast(Tensor, whole.grad), None
        here, stream = group.device_module.current_stream(), group.reduce_stream
        while len(self._pending) >= PENDING:
            here.wait_event(self._pending.popleft()[-1])
        comm, ranks = group.reduce_scatter, group.reduce_ranks
        # memory of the steps' stream, reused from activations: another stream's would be idle in forward passes
        part = comm.allocate((gradient.numel() // ranks.size(),), dtype=gradient.dtype, device=gradient.device)
        stream.wait_stream(here)
        with group.device_module.stream(stream):
            comm(output_tensor=part, input_tensor=gradient.reshape(-1), group=ranks, op=dist.ReduceOp.SUM)
            if group.replicas is not None:
                dist.all_reduce(part, group=group.replicas)
            shard.add_gradient(part)
            self._pending.append((gradient, part, stream.record_event()))

    def finish(self, device: torch.device) -> None:
        """Wait for all parts after a backward pass: later launches find them complete."""
        while self._pending:
            torch.get_device_module(device).current_stream().wait_event(self._pending.popleft()[-1])
