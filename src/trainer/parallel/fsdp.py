"""Weights shared by ranks (FSDP2; with replicas of the whole: HSDP).

Each rank holds a part of every master, gradient and moment in FP32: rows, with dimension 0 cut evenly. PyTorch's
`fully_shard` gathers a block's weights before its forward and its backward pass, while the previous block computes,
frees them afterwards, and reduces the gradients into their parts. This module adds the format of the messages. The
precision plan, not an FSDP policy, decides it for each weight:

    weight of a GEMM      its compute weight: BF16(master), or FP32. An FP8 layer quantises it on arrival, to the same
                          numbers as in one process, and frees the BF16; or each rank quantises its part, and FP8
                          travels (`parallel.fp8_all_gather`)
    embedding             the same, in the plan's format
    gain of a norm        FP32
    gradients             FP32 sums. Each rank's loss is divided by the number of all microbatches, so gradients and
                          their scales are those of a single process

It uses FSDP2's extension, two functions on a shard: the first returns what to send, the second makes the parameter that
autograd sees from what arrived (`gather`). Large weights and their gradients travel without FSDP's copies (`large`).

With expert parallelism each rank first takes its share of the experts, and shares those with fewer ranks. FSDP does not
handle experts that no other rank has. They behave like weights of a single process: compute weights stay, made once a
step, and autograd accumulates their gradients in place, from tokens of all ranks.

The parts of the model (embedding, each block, norm, head) are created one after the other, whole, with the weights of a
single process, and are sharded at once: the model never has to fit into one rank.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from models import DeepSeek
from models.block import Block, MoEBlock
from models.context import ContextSplit
from models.slots import Slots
from models.tensor import TensorSplit
from models.two_hops import Hops
from precision import GroupedLinear, Linear
from trainer.parallel.fsdp_internals import groups, let_dynamo_guard
from trainer.parallel.gather import Fp8GatherFormat, Receiver, WeightAmaxSync, gather_format
from trainer.parallel.large import LargeWeights, Sending
from trainer.parallel.mesh import Mesh


def materialise(
    model: DeepSeek,
    mesh: Mesh,
    device: torch.device,
    seed: int,
    keeps: bool = False,
    fp8: bool = False,
    by: Slots | Hops | None = None,
) -> None:
    """Initialise the weights of a model on the meta device as `DeepSeek.init_weights` would, each rank its own part.

    keeps: blocks keep their gathered weights between forward and backward pass; else only the last block does, which
    needs them again at once. fp8: FP8 weights travel in FP8 if their parts can be quantised separately. by: how tokens
    travel to experts on other ranks, as for `MoE.spread`.
    """
    tensor = None if mesh.tensor is None else TensorSplit(mesh.tensor.get_group())
    if mesh.sequence is not None:
        context = None if mesh.context is None else ContextSplit(mesh.context.get_group())
        model.split_sequences(ContextSplit(mesh.sequence.get_group()), context)
    ranks = None if mesh.stage is None else mesh.stage.get_group()
    sync, sending = WeightAmaxSync(fp8, ranks) if fp8 or tensor is not None else None, Sending()
    model.weight_amax_sync = sync  # type: ignore[assignment]
    model.slots = by if isinstance(by, Slots) else None
    generator = torch.Generator(device=device).manual_seed(seed)
    if model.pipeline is None:
        stages = [[cast(Block, block) for _, block in model.iter_blocks()]]
    else:
        stages = [[cast(Block, block) for block in model.blocks_of(stage)] for stage in model.pipeline.stages]
    own = [block for blocks in stages for block in blocks]
    for part in model.parts():
        part.to_empty(device=device)
        model.init_part(part, generator)
        if not model.here(part):
            _drop_other_stages(part)
        elif tensor is not None:
            model.split_weights(part, tensor)
            if sync is not None:
                sync.split.update(layer for layer, _ in tensor.cut)
        if model.here(part) and isinstance(part, Block):
            frees = not keeps and part is not own[-1]
            if mesh.expert is not None and isinstance(part, MoEBlock):
                part.moe.spread(mesh.expert.get_group(), by)
                if mesh.degrees.shares_experts:
                    _shard(part.moe.experts, mesh.experts, frees, sync, sending)
                for parameter in part.moe.experts.parameters():
                    parameter.spread = mesh.expert  # type: ignore[attr-defined]
            _shard(part, mesh.weights, frees, sync, sending)
    _shard(model, mesh.weights, False, sync, sending)
    if tensor is not None and mesh.tensor is not None:
        _mark(model, tensor, mesh.tensor)
    for blocks in stages:
        _prefetch(blocks)
    for method in ("hidden", "logits", "forward_stage"):
        register_fsdp_forward_method(model, method)


def _mark(model: DeepSeek, tensor: TensorSplit, mesh: DeviceMesh) -> None:
    """Mark each parameter as split or replicated over the tensor group (`shard_views`)."""
    for layer, dim in tensor.cut:
        layer.weight.spread, layer.weight.spread_dim = mesh, dim  # type: ignore[union-attr]
    for parameter in model.parameters():
        if not (hasattr(parameter, "spread") or parameter.is_meta):
            parameter.alike = mesh  # type: ignore[attr-defined]


def _drop_other_stages(part: nn.Module) -> None:
    """Drop the weights of other pipeline stages. Names, shapes, arena rows and router biases stay, as on all ranks."""
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().to("meta")))
        if isinstance(module, Linear | GroupedLinear):
            module.is_sharded = True  # its operand is not made here


def _prefetch(blocks: list[Block]) -> None:
    """Gather each block's weights while the previous one computes, in both directions.

    FSDP prefetches without help as long as the host is ahead of the device. With tokens on their way to experts, it is
    not.
    """

    def shared(block: Block) -> list[FSDPModule]:
        return [m for m in block.modules() if isinstance(m, FSDPModule)]

    for i, block in enumerate(blocks):
        after = shared(blocks[i + 1]) if i + 1 < len(blocks) else []
        before = shared(blocks[i - 1]) if i else []
        itself, *inner = shared(block)
        itself.set_modules_to_forward_prefetch([*inner, *after])
        # not `inner`: FSDP asks at each of the block's outputs, maybe after its experts ran and were freed
        itself.set_modules_to_backward_prefetch(before)


def _shard(module: nn.Module, mesh: DeviceMesh, reshard: bool, sync: WeightAmaxSync | None, sending: Sending) -> None:
    """Shard the parameters below `module` that are still whole, except spread ones and those of other stages."""
    spread = {p for p in module.parameters() if hasattr(p, "spread") or p.is_meta}
    whole = {p for p in module.parameters() if not isinstance(p, DTensor)} - spread
    own = [m for m in module.modules() if any(p in whole for p in m.parameters(recurse=False))]
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, ignored_params=spread)
    shared = cast(FSDPModule, module)
    shared.set_gradient_divide_factor(1.0)
    shared.set_force_sum_reduction_for_comms(True)
    let_dynamo_guard(module)
    wires = [gather_format(cast(Receiver, m), mesh, sync, reshard) for m in own if hasattr(m, "receive")]
    for way in wires:
        way.attach()
    if wholes := [way.whole for way in wires if way.whole is not None]:
        group = next(group for owner, group in groups(module) if owner is module)
        shared.set_custom_all_gather(LargeWeights(group.all_gather, wholes, sending, group.device))


@contextmanager
def unquantised(model: DeepSeek) -> Iterator[None]:
    """Let weights that travel in FP8 travel in BF16 inside, for `precision.plain.in_bf16`. At its beginning and end no
    weight may be gathered, and all must have been gathered once before.

    FSDP allocates the buffer of a gathered weight once, in the dtype of the first time. The buffers are put aside, and
    those made inside are dropped.
    """
    with ExitStack() as after:
        for _, group in groups(model):
            for shard in group.shards:
                send = getattr(shard.local, "fsdp_pre_all_gather", None)
                if isinstance(getattr(send, "__self__", None), Fp8GatherFormat):
                    after.callback(setattr, shard, "gathered", shard.gathered)
                    shard.gathered = []
        yield
