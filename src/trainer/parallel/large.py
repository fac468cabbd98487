"""Large weights travel straight: gathered into the memory that is computed with, gradients reduced from where they
were made.

FSDP2 makes one message of all weights of a block, and copies each out of it; and one of all gradients, into which it
copies them. That is each number read and written again, which is what sharing costs most beside the messages
themselves. Of a weight whose first dimension is cut evenly (a stack [E, N, K] of experts, a head [V, D]) the parts lie
one after the other already, as a message has them. So each large one is a message of its own. Its gradient is sent as
soon as it is there; that of the head, which FSDP reduces together with the embedding's at the very end, is the first
one. The small ones (3 % of a block of Moonlight) stay with FSDP.
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
SENDING = 2  # groups whose parts may wait for theirs: as far as FSDP gathers ahead


class GatherBuffer:
    """A large weight of `shape`: its memory on this rank, which FSDP frees with its own, and this rank's part while it
    waits to be sent."""

    def __init__(self, shape: torch.Size):
        self._shape = shape
        self.numbers = torch.empty(0)
        self.part: Tensor | None = None

    def allocate(self) -> None:
        """Make room for what `part` is a part of, in its dtype, if there is none; on the current stream."""
        if self.part is None:
            return
        if not self.numbers.numel():
            self.numbers = self.part.new_empty(self._shape)
        memory, size = self.numbers.untyped_storage(), self.numbers.numel() * self.numbers.itemsize
        if memory.size() != size:
            memory.resize_(size)

    def gather(self, comm: AllGather, ranks: dist.ProcessGroup) -> Tensor | None:
        """Send the part, and have those of all ranks in `numbers` once the current stream has come so far. Returns the
        part, which must live until then."""
        if self.part is None:
            return None
        part, self.part = self.part, None
        # `data`: what a backward pass waits for comes again, the same numbers; that is no change to it
        comm(output_tensor=self.numbers.data.view(-1), input_tensor=part.view(-1), group=ranks)
        return part


Sending = deque[tuple[list[Tensor | None], Any, Any]]


class LargeWeights(AllGather):
    """What FSDP gathers a group's weights by: one message of its own, and those of the large ones.

    Steps run on the stream that is current now. The memory of whole weights belongs to it: there they are computed
    with, and freed. comm: sends a message; sending: parts on their way, of all groups, the stream that made them, and
    the event of their arrival.
    """

    def __init__(self, comm: AllGather, wholes: list[GatherBuffer], sending: Sending, device: torch.device):
        self.comm = comm
        self._wholes, self._sending, self._device = wholes, sending, torch.get_device_module(device)
        self._steps = self._made = self._device.current_stream()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of FSDP's message, on the current stream: that on which parts were made, just now."""
        self._made = self._device.current_stream()
        while len(self._sending) >= SENDING:  # the host may be far ahead, and would have parts of the whole model wait
            _parts, made, arrival = self._sending.popleft()
            made.wait_event(arrival)  # who gets their memory next
        return self.comm.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """On the current stream, which is that of messages."""
        work = self.comm(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        with self._device.stream(self._steps):
            for whole in self._wholes:
                whole.allocate()
        self._device.current_stream().wait_stream(self._steps)  # who had the memory before may still be at work
        parts = [whole.gather(self.comm, group) for whole in self._wholes]
        self._sending.append((parts, self._made, self._device.current_stream().record_event()))
        return work


class LargeGradients:
    """Takes over the gradients of large weights that are cut evenly, in backward passes that reduce."""

    def __init__(self, model: DeepSeek):
        self._pending: deque[tuple[Tensor, Tensor, Any]] = deque()
        for module, group in groups(model):
            large = [shard for shard in group.shards if is_large(shard.size, shard.num_ranks)]
            if large:
                # what autograd sees of a weight exists once FSDP has gathered it
                handles: list[Any] = []
                handles.append(module.register_forward_pre_hook(partial(self._attach, handles, group, large)))

    def _attach(self, handles: list[Any], group: Group, large: list[Shard], module: nn.Module, args: tuple) -> None:
        handles.pop().remove()
        for shard in large:
            shard.whole.register_post_accumulate_grad_hook(partial(self._reduce, group, shard))

    @torch.no_grad()
    def _reduce(self, group: Group, shard: Shard, whole: Tensor) -> None:
        """Send the gradient of `whole` and add what arrives to that of its part."""
        if not group.reduces:
            return  # later microbatches add to it
        gradient, whole.grad = cast(Tensor, whole.grad), None
        here, stream = group.device_module.current_stream(), group.reduce_stream
        while len(self._pending) >= PENDING:
            here.wait_event(self._pending.popleft()[-1])
        comm, ranks = group.reduce_scatter, group.reduce_ranks
        # memory of the steps' stream, where activations were: that of another stream would lie idle in forward passes
        part = comm.allocate((gradient.numel() // ranks.size(),), dtype=gradient.dtype, device=gradient.device)
        stream.wait_stream(here)
        with group.device_module.stream(stream):
            comm(output_tensor=part, input_tensor=gradient.reshape(-1), group=ranks, op=dist.ReduceOp.SUM)
            if group.replicas is not None:
                dist.all_reduce(part, group=group.replicas)
            shard.add_gradient(part)
            self._pending.append((gradient, part, stream.record_event()))

    def finish(self, device: torch.device) -> None:
        """After a backward pass: what is launched next finds all parts there."""
        while self._pending:
            torch.get_device_module(device).current_stream().wait_event(self._pending.popleft()[-1])
