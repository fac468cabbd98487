"""Octet's only uses of private parts of FSDP2: a view of its groups and shards under public names.

FSDP2 has no public way to send one weight in a message of its own, or to free gathered weights early. If a release of
torch changes these parts, only this file changes.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["AllGather", "Group", "ReduceScatter", "Shard", "end_backward", "groups", "let_dynamo_guard"]


class Shard:
    """This rank's part of a parameter."""

    def __init__(self, raw: Any):
        self._raw = raw

    @property
    def size(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self._raw._orig_size

    @property
    def num_ranks(self) -> int:
        """Number of ranks that hold a part each."""
        return self._raw.mesh_info.shard_mesh_size

    @property
    def local(self) -> Tensor:
        """The part as a plain tensor; it carries FSDP's extension functions."""
        return self._raw._sharded_local_tensor

    @property
    def whole(self) -> Tensor:
        """The gathered parameter that autograd sees. It exists after FSDP's first gather."""
        return self._raw._unsharded_param

    @property
    def gathered(self) -> list[Tensor]:
        """The buffer that FSDP gathers the parameter into; an empty list makes it allocate again."""
        return self._raw.all_gather_outputs

    @gathered.setter
    def gathered(self, memory: list[Tensor]) -> None:
        self._raw.all_gather_outputs = memory

    def add_gradient(self, part: Tensor) -> None:
        """Add this rank's part of a gradient, and run the parameter's hooks as FSDP does."""
        parameter, part = self._raw.sharded_param, part.view(self._raw.sharded_size)
        if parameter.grad is None:
            parameter.grad = self._raw.to_sharded_dtensor(part)
        else:
            parameter.grad._local_tensor.add_(part)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)


class Group:
    """Parameters that FSDP gathers and reduces together: those of one call of `fully_shard`."""

    def __init__(self, raw: Any):
        self._raw = raw

    @property
    def shards(self) -> list[Shard]:
        return [Shard(raw) for raw in self._raw.fsdp_params]

    @property
    def device(self) -> torch.device:
        return self._raw.device

    @property
    def reduces(self) -> bool:
        """Whether the current backward pass reduces gradients."""
        return self._raw.reduce_grads

    @property
    def all_gather(self) -> AllGather:
        """The operation that sends gathered parts."""
        return self._raw._all_gather_comm

    @property
    def reduce_scatter(self) -> ReduceScatter:
        """The operation that sends gradients."""
        return self._raw._reduce_scatter_comm

    @property
    def reduce_ranks(self) -> dist.ProcessGroup:
        """The ranks that share the weights."""
        return self._raw._reduce_scatter_process_group

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part, or None without replicas."""
        return None if self._raw.mesh_info.replicate_mesh_dim is None else self._raw._all_reduce_process_group

    @property
    def reduce_stream(self) -> Any:
        """The stream of gradient messages."""
        return self._raw.comm_ctx.reduce_scatter_stream

    def reduce(self) -> None:
        """Reduce the gradients that gathered parameters have, outside of a backward pass; as FSDP does inside."""
        self._raw.post_backward()

    @property
    def device_module(self) -> Any:
        """torch.cuda, or its equivalent on another device."""
        return self._raw.device_handle


def groups(model: nn.Module) -> Iterator[tuple[Any, Group]]:
    """Yield FSDP's modules, each with its group."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and (raw := module._get_fsdp_state()._fsdp_param_group) is not None:
            yield module, Group(raw)


def end_backward(model: nn.Module) -> None:
    """Do what FSDP does at the end of a backward pass: reduce what is left, and wait for messages."""
    model._get_fsdp_state()._root_post_backward_final_callback()  # type: ignore[operator]


def let_dynamo_guard(module: nn.Module) -> None:
    """Let Dynamo guard on the modules below: for "FSDP-managed" ones it skips the guards that distinguish a block in
    FP8 from one in BF16."""
    for part in module.modules():
        part._is_fsdp_managed_module = False  # type: ignore[assignment]
