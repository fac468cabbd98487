"""Gradients of stacks of experts, reduced from the memory in which they were made.

FSDP2 copies all gradients of a block into one message before it reduces them: each number read and written once more,
which is what sharing costs most beside the messages themselves. Of a stack [E, N, K] whose experts are cut evenly the
parts lie one after the other already, as the message has them. So each stack is a message of its own, sent as soon as
its gradient is there; all other weights (3 % of a block of Moonlight) stay with FSDP.
"""

from collections import deque
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from models import DeepSeek
from precision import GroupedLinear

PENDING = 2  # gradients that may wait for their messages: those of one block


class StackedGradients:
    """Takes over the gradients of all stacks of experts that are cut evenly, in backward passes that reduce."""

    def __init__(self, model: DeepSeek):
        self._pending: deque[tuple[Tensor, Any]] = deque()
        for module in model.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            stacks = [s for s in group.fsdp_params if _cut_evenly(s)] if group is not None else []
            if stacks:
                # what autograd sees of a weight exists once FSDP has gathered it
                handles: list[Any] = []
                handles.append(module.register_forward_pre_hook(partial(self._attach, handles, group, stacks)))

    def _attach(self, handles: list[Any], group: Any, stacks: list[Any], module: nn.Module, args: tuple) -> None:
        handles.pop().remove()
        for stack in stacks:
            stack._unsharded_param.register_post_accumulate_grad_hook(partial(self._reduce, group, stack))

    @torch.no_grad()
    def _reduce(self, group: Any, stack: Any, whole: Tensor) -> None:
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
            comm(output_tensor=part, input_tensor=gradient.view(-1), group=ranks, op=dist.ReduceOp.SUM)
            if group.mesh_info.replicate_mesh_dim is not None:
                dist.all_reduce(part, group=group._all_reduce_process_group)
            part = part.view(stack.sharded_size)
            if stack.sharded_param.grad is None:
                stack.sharded_param.grad = stack.to_sharded_dtensor(part)
            else:
                stack.sharded_param.grad._local_tensor.add_(part)
            self._pending.append((gradient, stream.record_event()))

    def finish(self, device: torch.device) -> None:
        """After a backward pass: what is launched next finds all parts there."""
        while self._pending:
            torch.get_device_module(device).current_stream().wait_event(self._pending.popleft()[1])


def _cut_evenly(shared: Any) -> bool:
    """Whether a parameter of FSDP's is a stack of experts, as many on each rank."""
    info, shape = shared._module_info, shared._orig_size
    ranks = shared.mesh_info.shard_mesh_size
    return isinstance(info.module, GroupedLinear) and ranks > 1 and shape[0] % ranks == 0
