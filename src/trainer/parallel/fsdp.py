"""Weights shared by ranks (FSDP2; with replicas of the whole: HSDP).

Each rank holds a part of every master, gradient and moment, in FP32: rows of it, dimension 0 cut evenly. PyTorch's
`fully_shard` gathers a block's weights before its forward and its backward pass, the next block's while this one
computes, frees them afterwards, and reduces its gradients into their parts. What this module adds is what travels.
That is not a policy of FSDP's, but decided by the precision plan for each weight:

    weight of a GEMM      its compute weight: BF16(master), or FP32. A layer in FP8 quantises it on arrival, which gives
                          each rank the numbers that one process computes with, and frees the BF16; or each rank
                          quantises its part, and FP8 travels (`parallel.fp8_all_gather`)
    embedding             the same, in the plan's format
    gain of a norm        FP32
    gradients             FP32; they are added up, for each rank's loss is divided by the number of all microbatches,
                          so that gradients and their scales are those of a single process

It uses FSDP2's extension: a shard with two functions, of which the first returns what to send, the second makes of what
arrived the parameter that autograd sees: see `gather`. Large weights and their gradients travel without the copies that
FSDP makes of them: see `large`.

With expert parallelism each rank keeps its share of the experts first, and shares those with fewer ranks. Experts that
no other rank has are not FSDP's at all. They are what weights of a single process are: their compute weights stay, made
once a step, and autograd adds up their gradients where they are, which tokens of all ranks have made.

The parts of the model (embedding, each block, norm, head) come into being one after the other, whole, with the weights
that a single process draws, and are cut at once: the model never has to fit into one rank.
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
    slots: Slots | None = None,
) -> None:
    """Give a model on the meta device its weights, as `DeepSeek.init_weights` would, each rank its part of them.

    keeps: blocks keep their gathered weights between forward and backward pass; else only the last one does, which is
    needed again at once. fp8: weights that compute in FP8 travel in it, where their parts stand alone.
    """
    tensor = None if mesh.tensor is None else TensorSplit(mesh.tensor.get_group())
    if mesh.sequence is not None:
        context = None if mesh.context is None else ContextSplit(mesh.context.get_group())
        model.split_sequences(ContextSplit(mesh.sequence.get_group()), context)
    ranks = None if mesh.stage is None else mesh.stage.get_group()
    sync, sending = WeightAmaxSync(fp8, ranks) if fp8 or tensor is not None else None, Sending()
    model.weight_amax_sync = sync  # type: ignore[assignment]
    model.slots = slots
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
            _leave_to_others(part)
        elif tensor is not None:
            model.split_weights(part, tensor)
            if sync is not None:
                sync.split.update(layer for layer, _ in tensor.cut)
        if model.here(part) and isinstance(part, Block):
            frees = not keeps and part is not own[-1]
            if mesh.expert is not None and isinstance(part, MoEBlock):
                part.moe.spread(mesh.expert.get_group(), slots)
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
    """Note of each parameter whether ranks of the tensor group have parts of it, or the same (`shard_views`)."""
    for layer, dim in tensor.cut:
        layer.weight.spread, layer.weight.spread_dim = mesh, dim  # type: ignore[union-attr]
    for parameter in model.parameters():
        if not (hasattr(parameter, "spread") or parameter.is_meta):
            parameter.alike = mesh  # type: ignore[attr-defined]


def _leave_to_others(part: nn.Module) -> None:
    """Drop the weights of what another stage computes. Names, shapes, arena rows and router biases stay: they are the
    same on all ranks."""
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().to("meta")))
        if isinstance(module, Linear | GroupedLinear):
            module.is_sharded = True  # nothing here makes its operand


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
        # not `inner`: FSDP asks at each of the block's outputs, and may do so when its experts are through and freed
        itself.set_modules_to_backward_prefetch(before)


def _shard(module: nn.Module, mesh: DeviceMesh, reshard: bool, sync: WeightAmaxSync | None, sending: Sending) -> None:
    """Cut the parameters below `module` that are whole yet, but for spread ones, which have been seen to, and those of
    other stages."""
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
    """For `precision.plain.in_bf16`: inside, weights that travel in FP8 may travel in BF16. Nothing may be gathered at
    its beginning and end, and everything must have been gathered once before.

    FSDP makes the memory that it gathers a weight into once, in the format of the first time. That is put aside, and
    what is made meanwhile is dropped.
    """
    with ExitStack() as after:
        for _, group in groups(model):
            for shard in group.shards:
                send = getattr(shard.local, "fsdp_pre_all_gather", None)
                if isinstance(getattr(send, "__self__", None), Fp8GatherFormat):
                    after.callback(setattr, shard, "gathered", shard.gathered)
                    shard.gathered = []
        yield
