"""Weights shared by ranks (FSDP2; with replicas of the whole: HSDP).

Each rank holds a part of every master, gradient and moment, in FP32: rows of it, dimension 0 cut evenly. PyTorch's
`fully_shard` gathers a block's weights before its forward and its backward pass, the next block's while this one
computes, frees them afterwards, and reduces its gradients into their parts. What this module adds is what travels.
That is not a policy of FSDP's, but what the precision plan says of each weight:

    weight of a GEMM      its compute weight: BF16(master), or FP32. A layer in FP8 quantises it on arrival, which gives
                          each rank the numbers that one process computes with, and frees the BF16
    embedding             the same, in the plan's format
    gain of a norm        FP32
    gradients             FP32; they are added up, for each rank's loss is divided by the number of all microbatches,
                          so that gradients and their scales are those of a single process

It uses FSDP2's extension: a shard with two functions, of which the first says what to send, the second makes of what
arrived the parameter that autograd sees. Ours is an edge only: it has the master's shape and dtype, so that FP32
gradients flow into it, and owns no memory. What computes is the layer's operand (`precision.linear`).

With expert parallelism each rank keeps its share of the experts first, and shares those with fewer ranks, or none.

The parts of the model (embedding, each block, norm, head) come into being one after the other, whole, with the weights
that a single process draws, and are cut at once: the model never has to fit into one rank.
"""

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from models import DeepSeek, Losses
from models.block import Block, MoEBlock
from trainer.parallel.mesh import Mesh
from trainer.parallel.microbatch import Microbatch
from trainer.parallel.shards import local


class Receiver(Protocol):
    """A layer whose compute weight is gathered."""

    weight: nn.Parameter
    is_sharded: bool

    @property
    def wire_dtype(self) -> torch.dtype:
        """What its weight travels in."""
        ...

    def receive(self, weight: Tensor) -> list[Tensor]:
        """Take over the whole weight; returns what was made of it and may be freed, nothing if it is used as it is."""
        ...


def materialise(model: DeepSeek, mesh: Mesh, device: torch.device, seed: int, reshard: bool | None = None) -> None:
    """Give a model on the meta device its weights, as `DeepSeek.init_weights` would, each rank its part of them.

    reshard: whether blocks free their gathered weights between forward and backward pass; None: all but the last one,
    which is needed again at once.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    blocks = [block for _, block in model.iter_blocks()]
    for part in model.parts():
        part.to_empty(device=device)
        model.init_part(part, generator)
        if part in blocks:
            frees = part is not blocks[-1] if reshard is None else reshard
            if mesh.expert is not None and isinstance(part, MoEBlock):
                part.moe.spread(mesh.expert.get_group())
                _shard(part.moe.experts, mesh.experts, frees)
                for parameter in part.moe.experts.parameters():
                    parameter.spread = mesh.expert  # type: ignore[attr-defined]
            _shard(part, mesh.weights, frees)
    _shard(model, mesh.weights, False)
    _prefetch(blocks)
    for method in ("hidden", "logits"):
        register_fsdp_forward_method(model, method)


def _prefetch(blocks: list[Block]) -> None:
    """Have each block's weights gathered while the one before it computes, in both directions.

    FSDP does so by itself as long as the host is ahead of the device. Where tokens travel to experts, it is not.
    """

    def shared(block: Block) -> list[FSDPModule]:
        return [m for m in block.modules() if isinstance(m, FSDPModule)]

    for i, block in enumerate(blocks):
        after = shared(blocks[i + 1]) if i + 1 < len(blocks) else []
        before = shared(blocks[i - 1]) if i else []
        itself, *inner = shared(block)
        itself.set_modules_to_forward_prefetch([*inner, *after])
        itself.set_modules_to_backward_prefetch([*inner, *before])


def _shard(module: nn.Module, mesh: DeviceMesh, reshard: bool) -> None:
    """Cut the parameters below `module` that are whole yet."""
    own = [m for m in module.modules() if any(not isinstance(p, DTensor) for p in m.parameters(recurse=False))]
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    shared = cast(FSDPModule, module)
    shared.set_gradient_divide_factor(1.0)
    shared.set_force_sum_reduction_for_comms(True)
    for m in module.modules():
        # Dynamo would skip guards of "FSDP-managed" modules, by which it tells a block in FP8 from one in BF16
        m._is_fsdp_managed_module = False  # type: ignore[assignment]
    for m in own:
        if hasattr(m, "receive"):
            _Wire(cast(Receiver, m)).attach()


class _Wire:
    """What FSDP asks a shard: what to send, and what the gathered whole becomes."""

    def __init__(self, layer: Receiver):
        self._layer, self._shape = layer, layer.weight.shape

    def attach(self) -> None:
        """Let FSDP find its two functions at the layer's shard."""
        self._layer.is_sharded = True
        shard = local(self._layer.weight)
        shard.fsdp_pre_all_gather = self._send  # type: ignore[attr-defined]
        shard.fsdp_post_all_gather = self._arrive  # type: ignore[attr-defined]

    @torch.no_grad()
    def _send(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, policy: object
    ) -> tuple[tuple[Tensor, ...], None]:
        shard = local(self._layer.weight)
        rows = -(-outer_size[0] // mesh.size())
        sent = shard.new_empty((rows, *outer_size[1:]), dtype=self._layer.wire_dtype)
        sent[: shard.shape[0]].copy_(shard)  # what is left of an uneven cut is never read
        return (sent,), None

    @torch.no_grad()
    def _arrive(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        made = self._layer.receive(gathered[0][: self._shape[0]])
        if made:
            gathered[0].untyped_storage().resize_(0)
        return (_Edge.of(self._shape, dtype, gathered[0].device), made) if out is None else None


class _Edge(Tensor):
    """Answers FSDP's `torch.as_strided` with a tensor of that shape without memory: what autograd sees of a weight."""

    whole: Tensor

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "_Edge":
        edge = torch.empty(0, device=device).as_subclass(cls)
        edge.whole = torch.zeros((), dtype=dtype, device=device).expand(shape)
        return edge

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Tensor:
        if func is torch.as_strided:
            return args[0].whole
        return super().__torch_function__(func, types, args, kwargs)


class Shared:
    """Microbatches of a model that ranks share. When gradients are reduced, and gathered weights freed.

    each: reduce after every microbatch, so that no rank holds a whole gradient for longer than a block takes backward;
    else after the last one of a step, and until then they are added up where they were made.
    """

    def __init__(self, model: DeepSeek, run: Microbatch, world_size: int, each: bool):
        self._model, self._run, self._world_size, self._each = model, run, world_size, each

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """See `Microbatch`; index and count are of this rank's own."""
        if not self._each and count > 1:
            last = index == count - 1
            shared = cast(FSDPModule, self._model)
            shared.set_requires_gradient_sync(last)
            shared.set_is_last_backward(last)
        return self._run(tokens, index, count * self._world_size)

    def release(self) -> None:
        """Free gathered weights: an evaluation has no backward pass that would."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
