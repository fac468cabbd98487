"""Gradients of large weights, reduced from the memory in which they were made.

FSDP2 copies all gradients of a block into one message before it reduces them: each number read and written once more,
which is what sharing costs most beside the messages themselves. Of a weight whose first dimension is cut evenly (a
stack [E, N, K] of experts, a head [V, D]) the parts lie one after the other already, as the message has them. So each
large one is a message of its own, sent as soon as its gradient is there; that of the head, which FSDP reduces together
with the embedding's at the very end, is the first one. The small ones (3 % of a block of Moonlight) stay with FSDP.
"""

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from models import DeepSeek

LARGE = 2**24  # numbers: a message of 64 MiB, which is worth being one of its own
PENDING = 2  # gradients that may wait for their messages: those of a block's experts


def groups(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """FSDP's modules, and what each gathers and reduces together."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
            yield module, group


class LargeGradients:
    """Takes over the gradients of large weights that are cut evenly, in backward passes that reduce."""

    def __init__(self, model: DeepSeek):
        self._pending: deque[tuple[Tensor, Any]] = deque()
        for module, group in groups(model):
            large = [p for p in group.fsdp_params if _cut_evenly(p)]
            if large:
                # what autograd sees of a weight exists once FSDP has gathered it
                handles: list[Any] = []
                handles.append(module.register_forward_pre_hook(partial(self._attach, handles, group, large)))

    def _attach(self, handles: list[Any], group: Any, large: list[Any], module: nn.Module, args: tuple) -> None:
        handles.pop().remove()
        for shared in large:
            shared._unsharded_param.register_post_accumulate_grad_hook(partial(self._reduce, group, shared))

    @torch.no_grad()
    def _reduce(self, group: Any, shared: Any, whole: Tensor) -> None:
        """Send the gradient of `whole` and add what arrives to that of its part."""
        if not group.reduce_grads:
            return  # later microbatches add to it
        gradient, whole.grad = cast(Tensor, whole.grad), None
        here, stream = group.device_handle.current_stream(), group.comm_ctx.reduce_scatter_stream
        while len(self._pending) >= PENDING:
            here.wait_event(self._pending.popleft()[1])
        stream.wait_stream(here)
        comm, ranks = group._reduce_scatter_comm, group._reduce_scatter_process_group
        with group.device_handle.stream(stream):
            part = comm.allocate((gradient.numel() // ranks.size(),), dtype=gradient.dtype, device=gradient.device)
            comm(output_tensor=part, input_tensor=gradient.reshape(-1), group=ranks, op=dist.ReduceOp.SUM)
            if group.mesh_info.replicate_mesh_dim is not None:
                dist.all_reduce(part, group=group._all_reduce_process_group)
            part = part.view(shared.sharded_size)
            if shared.sharded_param.grad is None:
                shared.sharded_param.grad = shared.to_sharded_dtensor(part)
            else:
                shared.sharded_param.grad._local_tensor.add_(part)
            self._pending.append((gradient, stream.record_event()))

    def finish(self, device: torch.device) -> None:
        """After a backward pass: what is launched next finds all parts there."""
        while self._pending:
            torch.get_device_module(device).current_stream().wait_event(self._pending.popleft()[1])


def _cut_evenly(shared: Any) -> bool:
    """Whether a parameter of FSDP's is large, and as much of it on each rank."""
    shape, ranks = shared._orig_size, shared.mesh_info.shard_mesh_size
    return shape.numel() >= LARGE and ranks > 1 and shape[0] % ranks == 0
