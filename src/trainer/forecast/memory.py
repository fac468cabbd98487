"""Memory forecast: bytes of GPU or host memory that one rank holds, by purpose.

    parameters        FP32 masters, this rank's part
    gradients         FP32, this rank's part; plus whole gradients of all blocks if microbatches are added up before the
                      reduction, else of the block whose backward pass runs
    optimizer         AdamW's two moments, FP32 or BF16, this rank's part; one momentum for Muon's parameters
    compute weights   BF16 or FP8 copies of the masters that GEMMs read (FP8: up to two, see `_weight_bytes`). Of all
                      blocks in one process, for experts held by no other rank, and if sharing ranks keep what they
                      gather; else only of the blocks gathered at a time
    activations       what a microbatch saves for its backward pass; with recompute=full the blocks' inputs and one
                      block, with selective all but attention's interior, and that of one block
    head              gradients of the head's weight, one per use, that wait for the backward pass
    communication     buffers for weights and gradients, tokens on their way to experts, keys and values between the
                      heads of a context group; latents and the output of o of a tensor group; messages between
                      stages
    BF16 shadow       with health.shadow_every: BF16 copies of the FP8 weights, beside these, while it runs

In a step of one microbatch, activations are freed as gradients are made, block by block: both are given at the peak of
their sum. (With more microbatches, the gradients of the first exist while the second keeps its activations. Recorded
CUDA graphs keep both allocated.)

Not included: temporaries of ops (docs/benchmarks.md has those of the experts' backward pass), fragmentation, the
libraries' workspaces, the interpreter.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch

from models.config import ModelConfig
from models.flops import count_parameters, head_gradient_bytes, kept_bytes_per_token
from precision import Plan
from precision.config import Granularity
from precision.rows import GemmRecipe, GemmRow
from trainer.config import Config, Recompute, Switch
from trainer.forecast.expert_messages import buffer_bytes, capacity_of
from trainer.forecast.muon import muon_size
from trainer.forecast.plan_cache import cached_per_plan
from trainer.forecast.stages import in_a_v, operand_bytes, stage_models
from trainer.forecast.tensor import cut_parameters, gathered_bytes, kept_bytes, parts
from trainer.parallel.mesh import ONE_PROCESS, Degrees, FsdpPolicy, is_large

GIB = 2**30
ROOM = 0.8  # of a GPU's memory: the limit of the forecast for settings that save messages

Held = Callable[[FsdpPolicy], dict[str, float]]
"""A rank's memory by category, for an FSDP policy."""


def pick_fsdp_policy(config: Config, plan: Plan, degrees: Degrees, total: float | None) -> FsdpPolicy:
    """Return the FSDP policy of `parallel.reduce_each_microbatch` and `parallel.reshard_after_forward`. auto: the
    fewest messages that fit into `total` bytes of GPU memory; on a CPU (None) reduce once a step, and free."""
    return _pick(config, list(_ranks_differing(config, plan, degrees)), total)


def _pick(config: Config, ranks: list[Held], total: float | None) -> FsdpPolicy:
    ways = _ways(config)
    if total is None:
        return FsdpPolicy(ways[0].reduce_each_microbatch, ways[-1].keep_gathered)
    return next((way for way in ways if sum(_most(ranks, way).values()) <= ROOM * total), ways[-1])


def _ways(config: Config) -> list[FsdpPolicy]:
    """Return the policies that the config leaves open: the fewest messages first, the least memory last."""
    reduce, reshard = config.parallel.reduce_each_microbatch, config.parallel.reshard_after_forward
    each = (False, True) if reduce is Switch.auto else (reduce is Switch.true,)
    if in_a_v(config.parallel):
        each = (False,)
    keeps = (True, False) if reshard is Switch.auto else (reshard is Switch.false,)
    return [FsdpPolicy(e, k) for e in each for k in keeps]


def total_memory(device: torch.device) -> float | None:
    """Return the bytes of a GPU, or None for a CPU."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def forecast_memory(
    config: Config, plan: Plan, degrees: Degrees = ONE_PROCESS, policy: FsdpPolicy | None = None, graphs: bool = False
) -> dict[str, float]:
    """Return the bytes that a rank holds, by category (see the module docstring); of the largest pipeline stage.

    plan: of the model. policy: from `pick_fsdp_policy`; None: as on a CPU. graphs: whether CUDA graphs are recorded.
    """
    policy = policy or pick_fsdp_policy(config, plan, degrees, None)
    return _most(_ranks_differing(config, plan, degrees, graphs), policy)


def exceeds(config: Config, plan: Plan, degrees: Degrees, room: float) -> bool:
    """Return whether a rank needs more bytes than `room` under every FSDP policy. Cheaper than a whole forecast."""
    way = _ways(config)[-1]
    return any(sum(held(way).values()) > room for held in _ranks_differing(config, plan, degrees))


def _most(ranks: Iterable[Held], policy: FsdpPolicy) -> dict[str, float]:
    """Return the memory of the rank that holds most."""
    return max((held(policy) for held in ranks), key=lambda memory: sum(memory.values()))


def _ranks_differing(config: Config, plan: Plan, degrees: Degrees, graphs: bool = False) -> Iterator[Held]:
    """Yield one function for each kind of rank: ranks differ by their stages."""
    for own, rows, kept in stage_models(config, plan, degrees):
        between = _between_stages(config, plan, kept) if degrees.pipeline > 1 else 0.0
        yield _of_a_rank(own, rows, degrees, graphs and degrees.pipeline == 1, kept, between)


def _of_a_rank(config: Config, plan: Plan, degrees: Degrees, graphs: bool, microbatches: float, between: float) -> Held:
    """microbatches: number with activations in memory. between: bytes per token for messages between stages."""
    model, t = config.model, config.trainer
    tokens = t.microbatch_size * t.sequence_length // degrees.sequence
    shared, experts = parameters(plan, config=config.model)
    cut = cut_parameters(plan, model) if degrees.tensor > 1 else 0.0
    owned = (shared - cut + cut / degrees.tensor) / degrees.cut + experts / (degrees.expert * degrees.expert_shard)
    transposed = keeps_transposed(config, degrees)
    masters, moment = 4.0 * owned, plan.tensors["optim.moments"].format.bytes
    memory = {
        "parameters": masters,
        "gradients": masters,
        "optimizer": moment * (2 * owned - muon_size(config, plan, degrees).elements),
        "compute weights": sum(_copies(plan, degrees, transposed, transposed).values()),
        "activations": _in_flight(config, plan, degrees, microbatches) * tokens,
        "head": head_gradient_bytes(plan) / degrees.tensor,
    }
    one_microbatch = t.global_batch_size <= t.microbatch_size * degrees.data
    if one_microbatch and not graphs:
        memory |= _at_peak(plan, degrees, memory["activations"], masters)
    gathered_weights, largest, communication = {}, 0.0, 0.0  # bytes in FP32 of what a rank gathers, by part
    if degrees.world > 1:
        gathered_weights = _gathered_weights(plan, degrees, config=config.model)
        largest = max(size for name, size in gathered_weights.items() if name)
        communication = _communication(config, plan, degrees, tokens) + largest + tokens * between

    def held(policy: FsdpPolicy) -> dict[str, float]:
        found = dict(memory)
        if config.health.shadow_every:
            found["BF16 shadow"] = _shadow(plan, degrees, policy.keep_gathered)
        if degrees.world > 1:
            found["compute weights"] = _gathered(config, plan, degrees, policy.keep_gathered)
            once = not policy.reduce_each_microbatch and not one_microbatch
            found["gradients"] += sum(gathered_weights.values()) if once else largest
            found["communication"] = communication
        return found

    return held


def _communication(config: Config, plan: Plan, degrees: Degrees, tokens: int) -> float:
    """Return the bytes of message buffers, without a block's gradients. tokens: of a rank and microbatch."""
    model = config.model
    # two buffers for weights: a block's and the next one's
    size = 2 * max(_buffered(plan, degrees, config.parallel.fp8_all_gather).values(), default=0.0)
    size += buffer_bytes(config, plan, degrees, tokens)
    if degrees.context > 1:
        size += 2 * tokens * _exchanged(plan)
    if degrees.tensor > 1:  # gathered, and its gradient in FP32
        size += tokens * gathered_bytes(plan, degrees, model.hidden_size)
    return size


def _between_stages(config: Config, plan: Plan, microbatches: float) -> float:
    """Return the bytes per token for messages between stages: the output of a stage and, with MTP, the embedded
    tokens, for each microbatch with activations in memory; and two messages in flight."""
    streams, stages = 2 if config.model.num_mtp_layers else 1, config.parallel.stages_per_rank
    return streams * (microbatches * stages + 2) * config.model.hidden_size * plan.tensors["residual"].format.bytes


def _exchanged(plan: Plan) -> float:
    """Return the bytes of a token's largest message between a context group's heads: keys and values."""
    row = next(row for row in plan.gemms.values() if row.op == "attn.kv_b")
    return float(row.out_features * row.recipe.output.bytes)


def records_graphs(config: Config, plan: Plan, degrees: Degrees, total: float | None) -> bool:
    """Return `cuda_graph`. auto: true on a single GPU, if no pass synchronises (a grouped GEMM of the reference may)
    and at most half of the memory is forecast to be used: a graph keeps its memory.

    total: bytes of a GPU; None: a CPU.
    """
    if config.cuda_graph is not Switch.auto:
        return config.cuda_graph is Switch.true
    if total is None or degrees.world > 1 or config.debug.inject is not None:
        return False
    if any(row.op == "moe.experts" and row.recipe.backend != "cuda" for row in plan.gemms.values()):
        return False
    if plan.served_by("transformer_engine"):
        return False
    return sum(forecast_memory(config, plan, degrees).values()) <= 0.5 * total


def forecast(config: Config, plan: Plan, degrees: Degrees, total: float | None) -> tuple[dict[str, float], FsdpPolicy]:
    """Return `forecast_memory` with automatic settings resolved, and the FSDP policy. total: bytes of a GPU; None:
    CPU."""
    ranks = list(_ranks_differing(config, plan, degrees))
    policy = _pick(config, ranks, total)
    if total is not None and records_graphs(config, plan, degrees, total):
        ranks = list(_ranks_differing(config, plan, degrees, graphs=True))
    return _most(ranks, policy), policy


@cached_per_plan
def parameters(plan: Plan, config: ModelConfig) -> tuple[float, float]:
    """Return the parameters outside the routed experts, and in them; of a pipeline stage its own."""
    m = config
    experts = sum(row.num_weights for row in plan.gemms.values() if row.op == "moe.experts")
    head = plan.gemms["lm_head"]
    others = count_parameters(m).total - experts - m.vocab_size * m.hidden_size  # embedding and head count once
    return others + head.in_features * head.out_features, experts


def _ranks(row: GemmRow, degrees: Degrees) -> int:
    """Return the number of ranks that hold a weight together."""
    return parts(row, degrees) * (degrees.expert_shard if row.op == "moe.experts" else degrees.cut)


@cache
def _block_of(name: str) -> str:
    """layers.3.attn.q -> layers.3; "" for weights outside the blocks."""
    kind, _, rest = name.partition(".")
    return f"{kind}.{rest.partition('.')[0]}" if kind in ("layers", "mtp") else ""


def _at_peak(plan: Plan, degrees: Degrees, activations: float, gradients: float) -> dict[str, float]:
    """Return activations and gradients of one microbatch at the peak of their sum: in the backward pass of a block, or
    after all gradients are made. Assumes that all blocks save the same amount."""
    sizes: dict[str, float] = defaultdict(float)
    for name, row in plan.gemms.items():
        sizes[_block_of(name)] += 4.0 * row.num_weights / _ranks(row, degrees)
    sizes.pop("", None)  # outside the blocks: the head's is counted separately, the embedding's comes last
    kept, made, peak = activations, 0.0, (0.0, gradients)
    for size in reversed(sizes.values()):
        made += size
        peak = max(peak, (kept, made), key=sum)
        kept -= activations / len(sizes)
    return {"gradients": peak[1], "activations": peak[0]}


def _gathered_with(name: str, row: GemmRow, degrees: Degrees) -> str:
    """Return the block that a compute weight is gathered and freed with; "" for one that stays: outside the blocks, or
    of experts that no other rank has."""
    return _block_of(name) if row.op != "moe.experts" or degrees.shares_experts else ""


@cached_per_plan
def _copies(plan: Plan, degrees: Degrees, stay: bool, gathered: bool) -> dict[str, float]:
    """Return the bytes of compute weights by block ("": they stay); for experts, those of one rank. stay, gathered:
    `keeps_transposed` for those that stay, and for those that are gathered."""
    sizes: dict[str, float] = defaultdict(float)
    for name, row in plan.gemms.items():
        where = _gathered_with(name, row, degrees)
        width = _weight_bytes(row.recipe, (gathered if where else stay) or not _block_of(name))
        sizes[where] += row.num_weights / parts(row, degrees) * width
    return sizes


@cached_per_plan
def _gathered_weights(plan: Plan, degrees: Degrees, config: ModelConfig) -> dict[str, float]:
    """Return the FP32 bytes of the parameters that a rank gathers, by block."""
    sizes: dict[str, float] = defaultdict(float)
    sizes[""] = 4.0 * config.vocab_size * config.hidden_size / degrees.tensor  # the embedding
    for name, row in plan.gemms.items():
        if row.op != "moe.experts" or degrees.shares_experts:
            sizes[_block_of(name)] += 4.0 * row.num_weights / parts(row, degrees)
    return sizes


@cached_per_plan
def _buffered(plan: Plan, degrees: Degrees, in_fp8: Switch) -> dict[str, float]:
    """Return the bytes that a rank gathers into temporary buffers, by block: BF16, or FP8 for weights sent in it. Large
    weights arrive at their destination, or are quantised from it."""
    sizes: dict[str, float] = defaultdict(float)
    for name, row in plan.gemms.items():
        if not _block_of(name) or (row.op == "moe.experts" and not degrees.shares_experts):
            continue
        shape, ranks = [row.out_features // parts(row, degrees), row.in_features], degrees.cut
        if row.op == "moe.experts":
            shape, ranks = [row.groups // degrees.expert, row.out_features, row.in_features], degrees.expert_shard
        travels = is_gathered_in_fp8(in_fp8, row, degrees)
        stays = travels or not row.recipe.is_fp8
        if not (stays and is_large(shape, ranks)):
            sizes[_block_of(name)] += math.prod(shape) * (1.0 if travels else 2.0)
    return sizes


def is_gathered_in_fp8(choice: Switch, row: GemmRow, degrees: Degrees) -> bool:
    """Return whether ranks quantise their parts of this weight before the gather. choice: `parallel.fp8_all_gather`."""
    if degrees.pipeline > 1 or choice is Switch.false or (choice is Switch.auto and row.recipe.backend != "cuda"):
        return False
    if row.op == "moe.experts":
        ranks, rest, rows = degrees.expert_shard, row.groups // degrees.expert % degrees.expert_shard, None
    else:
        out = row.out_features if row.op == "attn.o" else row.out_features // parts(row, degrees)
        ranks, rest, rows = degrees.cut, out % degrees.cut, out // degrees.cut
    return ranks > 1 and row.recipe.can_quantize_parts(rows, even=rest == 0)


@cached_per_plan
def _sent(plan: Plan, degrees: Degrees, in_fp8: Switch) -> dict[str, float]:
    """Return the bytes of this rank's parts of the blocks' weights that are sent in FP8, by name."""
    return {
        name: row.num_weights / _ranks(row, degrees)
        for name, row in plan.gemms.items()
        if _block_of(name) and is_gathered_in_fp8(in_fp8, row, degrees)
    }


def _gathered(config: Config, plan: Plan, degrees: Degrees, keeps: bool) -> float:
    """Return the bytes of compute weights alive at a time: always those outside the blocks; of the blocks all, or the
    previous, the current and the next one, plus the parts of the others that are sent."""
    copies = _copies(plan, degrees, keeps_transposed(config, degrees), keeps_transposed(config, degrees, keeps))
    words = config.model.vocab_size // degrees.tensor
    embedding = words * config.model.hidden_size * plan.tensors["embed"].format.bytes
    beside = copies.pop("", 0.0) + embedding
    if keeps:
        return beside + sum(copies.values())
    sent = sum(_sent(plan, degrees, config.parallel.fp8_all_gather).values())
    return beside + sum(sorted(copies.values())[-3:]) + sent


def _shadow(plan: Plan, degrees: Degrees, keeps: bool) -> float:
    """Return the BF16 bytes of the FP8 weights alive at a time: see `_gathered`."""
    sizes: dict[str, float] = defaultdict(float)
    for name, row in plan.gemms.items():
        if row.recipe.is_fp8:
            sizes[_gathered_with(name, row, degrees)] += 2.0 * row.num_weights / parts(row, degrees)
    beside = sizes.pop("", 0.0)
    if degrees.world == 1 or keeps:
        return beside + sum(sizes.values())
    return beside + sum(sorted(sizes.values())[-3:])


@cached_per_plan
def _kept(
    plan: Plan, selective: bool, spread: int, tokens: int, capacity: float | None, config: ModelConfig
) -> dict[str, float]:
    return kept_bytes_per_token(config, plan, selective, spread, tokens, capacity)


def _activations(config: Config, plan: Plan, degrees: Degrees) -> float:
    """Return the bytes of activations per token."""
    tokens = config.trainer.microbatch_size * config.trainer.sequence_length // degrees.sequence
    spread = degrees.expert, tokens, capacity_of(config, degrees)
    kept = _kept(plan, False, *spread, config=config.model)
    head = kept.pop("head")
    blocks = sum(kept.values())
    num_blocks = config.model.num_layers + config.model.num_mtp_layers
    if config.recompute is Recompute.selective:
        selective = sum(_kept(plan, True, *spread, config=config.model).values()) - head
        blocks = selective + (blocks - selective) / num_blocks
    if config.recompute is Recompute.full:
        inputs = config.model.hidden_size * plan.tensors["residual"].format.bytes
        blocks = blocks / num_blocks + num_blocks * inputs
    return blocks + head + kept_bytes(config, plan, degrees)


def _in_flight(config: Config, plan: Plan, degrees: Degrees, microbatches: float) -> float:
    """Return the bytes of activations per token of this many microbatches. Where gradients of weights are computed
    separately, their operands stay after the rest: output gradients of one of two stages come on top."""
    each = _activations(config, plan, degrees)
    if degrees.pipeline == 1 or not in_a_v(config.parallel):
        return each * microbatches
    inputs, gradients = operand_bytes(plan)
    return max(each, inputs + gradients) * microbatches + gradients / 2


def keeps_transposed(config: Config, degrees: Degrees, stays: bool = True) -> bool:
    """Return whether an FP8 weight of a block keeps the transposed copy that the input gradient reads. With one
    microbatch a step, or where the weight does not stay between passes, each backward pass makes it."""
    t = config.trainer
    return stays and t.global_batch_size > t.microbatch_size * degrees.data


def _weight_bytes(recipe: GemmRecipe, transposed: bool) -> int:
    """Return the bytes per element of a compute weight: none in FP32, which reads the master. In FP8 there are two
    copies if scales go by row, and in cuda if the transposed one is kept; Transformer Engine has two and the BF16
    weight."""
    width = recipe.input.bytes
    if width != 1:
        return 0 if width == 4 else width
    if recipe.backend == "transformer_engine":
        return 4
    by_row = recipe.scaling.granularity is Granularity.row
    return 2 if by_row or (transposed and recipe.backend == "cuda") else 1
