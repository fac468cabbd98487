"""Pipeline stages before a run: their blocks, what they do not support, and how long they idle."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from models.config import ModelConfig
from models.stage import Pipeline, Stage, block_flops, divide, divide_among
from precision import Plan
from precision.errors import counted, refuse
from precision.rows import CoreRow, GemmRecipe, GemmRow, TensorRow
from trainer.config import Config, ParallelConfig, PipelineSchedule, Switch
from trainer.forecast.plan_cache import cached_per_plan
from trainer.parallel.mesh import Degrees, divisor_near

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


EAGER = "parallel.schedule=zbv: blocks are not compiled, which the forecast of time leaves out; compare tokens/s"


def blocks_of_stages(config: Config, plan: Plan, ranks: int) -> list[int]:
    """Return the number of blocks of each stage for `ranks` ranks: `parallel.stages`, or equal FLOPs."""
    p, t = config.parallel, config.trainer
    return p.stages or _alike(plan, t.sequence_length, owners(ranks, p.stages_per_rank, in_a_v(p)))


@cached_per_plan
def _alike(plan: Plan, sequence_length: int, ranks: tuple[int, ...]) -> list[int]:
    flops = block_flops(plan, sequence_length)
    return divide(*flops, len(ranks)) if len(set(ranks)) == len(ranks) else divide_among(ranks, *flops)


def owners(ranks: int, per_rank: int, v: bool = False) -> tuple[int, ...]:
    """Return the rank of each stage: in turn, or in a V."""
    in_turn = tuple(range(ranks))
    return in_turn + in_turn[::-1] if v else in_turn * per_rank


def in_a_v(parallel: ParallelConfig) -> bool:
    """Return whether the schedule assigns stages in a V and computes gradients of weights separately."""
    return parallel.schedule is PipelineSchedule.zbv


def pipeline_of(config: Config, plan: Plan, group: "ProcessGroup") -> Pipeline:
    """Return this process's stages. group: the ranks of the pipeline."""
    v = in_a_v(config.parallel)
    ranks = owners(group.size(), config.parallel.stages_per_rank, v)
    ends = list(accumulate(blocks_of_stages(config, plan, group.size())))
    stages = (Stage(i, len(ends), begin, end) for i, (begin, end) in enumerate(pairwise([0, *ends])))
    own = tuple(stage for stage in stages if ranks[stage.index] == group.rank())
    return Pipeline(own, ranks, group, zero_bubble=v)


def microbatches_of(config: Config, degrees: Degrees) -> int:
    """Return the number of microbatches of a rank and step."""
    t = config.trainer
    return t.global_batch_size // (t.microbatch_size * degrees.data)


def stage_models(config: Config, plan: Plan, degrees: Degrees) -> Iterator[tuple[Config, Plan, float]]:
    """Yield, for each rank of a pipeline, config and plan of a model of its stages alone, and the number of
    microbatches whose activations it keeps. Of equal ranks only the first, which keeps most.

    The first stage has the embedding (`vocab_size` is 0 in the others), the last stage the head (its row has no width
    in the others).
    """
    if degrees.pipeline == 1:
        yield config, plan, 1
        return
    p, v, m = degrees.pipeline, config.parallel.stages_per_rank, microbatches_of(config, degrees)
    counts, separate = tuple(blocks_of_stages(config, plan, p)), in_a_v(config.parallel)
    for model, rows, rank in _distinct(plan, counts, owners(p, v, separate), config=config.model):
        yield replace(config, model=model), rows, p if separate else kept(rank, p, v, m)


def kept(rank: int, p: int, v: int, m: int) -> float:
    """Return how many microbatches' activations a rank keeps: the forward passes ahead of the backward pass. In a V
    every rank keeps p."""
    if v == 1:
        return p - rank
    ahead = (v - 1) * (m // _rounds(m, p)) + 2 * (p - 1 - rank)
    return min(ahead + 1, m * v) / v


def _rounds(m: int, p: int) -> int:
    """Return the number of rounds in which m microbatches pass through a rank's stages."""
    return max(1, m // p)


def forms_whole_rounds(m: int, p: int) -> bool:
    """Return whether m microbatches form rounds of equal size."""
    return m % _rounds(m, p) == 0


@cached_per_plan
def _distinct(
    plan: Plan, counts: tuple[int, ...], ranks: tuple[int, ...], config: ModelConfig
) -> list[tuple[ModelConfig, Plan, int]]:
    found, seen, ends = [], set(), [0, *accumulate(counts)]
    for rank in range(max(ranks) + 1):
        own = [i for i, owner in enumerate(ranks) if owner == rank]
        blocks = [block for i in own for block in range(ends[i], ends[i + 1])]
        last = ranks[-1] == rank
        model = replace(
            config,
            num_layers=len(blocks),
            num_dense_layers=sum(block < config.num_dense_layers for block in blocks),
            num_mtp_layers=config.num_mtp_layers if last else 0,
            vocab_size=0 if rank else config.vocab_size,
        )
        rows = plan.of_blocks(blocks, last)
        alike = (
            rank == 0,
            *(_layer_key(row) for kind in (rows.gemms, rows.tensors, rows.cores) for row in kind.values()),
        )
        if alike not in seen:
            seen.add(alike)
            found.append((model, rows, rank))
    return found


def _layer_key(row: GemmRow | TensorRow | CoreRow) -> tuple[object, ...]:
    """Return a key of a row. Equal layers share their recipes, so their keys are equal."""
    values = {**vars(row), "name": row.name.rpartition(".")[2], "decided_by": ""}
    return tuple(id(value) if isinstance(value, GemmRecipe) else value for value in values.values())


def idle_share(config: Config, plan: Plan, degrees: Degrees) -> float:
    """Return the share of a step's arithmetic in which ranks wait for others (the bubble); 0 with one stage, whatever
    `parallel.stages` says."""
    p = degrees.pipeline
    if p == 1:
        return 0.0
    counts, m = tuple(blocks_of_stages(config, plan, p)), microbatches_of(config, degrees)
    times = _times(plan, config.trainer.sequence_length, counts)
    if in_a_v(config.parallel):
        return bubble_of_v(times, _times(plan, 0, counts), m)  # at length 0 without attention's core
    return bubble(times, owners(p, config.parallel.stages_per_rank), m)


def bubble(times: Sequence[float], ranks: Sequence[int], m: int) -> float:
    """Return the share of a step in which ranks wait. times: t_i of a microbatch in each stage; ranks: of the stages;
    m: microbatches.

    The slowest rank computes all microbatches; before and behind it ranks wait for the stages of one round. With v
    stages a rank: sum(t_i) / v + (m - 1 / v) x the largest sum of a rank's t_i. One a rank (1F1B): sum(t_i) + (m - 1)
    max(t_i).
    """
    of_ranks = [0.0] * (max(ranks) + 1)
    for rank, time in zip(ranks, times, strict=True):
        of_ranks[rank] += time
    v = len(times) // len(of_ranks)
    return 1 - m * sum(times) / len(of_ranks) / ((sum(times) + (m * v - 1) * max(of_ranks)) / v)


def bubble_of_v(times: Sequence[float], weights: Sequence[float], m: int) -> float:
    """As `bubble`, for two stages a rank in a V, with separate gradients of weights. times: of a forward pass in each
    stage; weights: of its weights' gradients.

    Forward passes take F, gradients of inputs I, of weights W; I + W = 2 F. Before and behind its passes, the slowest
    rank waits max(I, 2 (I - W)) for each other rank, and F for each microbatch that is missing to 2 p - 1. This is the
    time of torch's order where stages are equal and I >= W.
    """
    p = len(times) // 2
    pairs = [(2 * time - weight, weight) for time, weight in zip(times, weights, strict=True)]
    waits = sum(max(i, 2 * (i - w)) for i, w in pairs[: p - 1]) + max(2 * p - 1 - m, 0) * times[0]
    slowest = max(first + last for first, last in zip(times, reversed(times), strict=True))
    return 1 - 3 * m * sum(times) / p / (3 * m * slowest + waits)


@cached_per_plan
def _times(plan: Plan, sequence_length: int, counts: tuple[int, ...]) -> list[float]:
    """Return the FLOPs of a token in each stage."""
    blocks, last = block_flops(plan, sequence_length)
    ends = list(accumulate(counts))
    times = [sum(blocks[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    times[-1] += last
    return times


def operand_bytes(plan: Plan) -> tuple[float, float]:
    """Return the bytes per token of the operands that GEMMs of blocks keep for the gradients of their weights: inputs,
    and output gradients, of which FP8 has two copies."""
    inputs = gradients = 0.0
    for name, row in plan.gemms.items():
        if name != "lm_head":
            inputs += row.rows_per_token * row.in_features * row.recipe.input.bytes
            gradients += row.rows_per_token * row.out_features * max(row.recipe.grad.bytes, 2)
    return inputs, gradients


def stages_line(config: Config, plan: Plan, degrees: Degrees) -> str:
    """Return a line with the blocks of the stages and the bubble, and one on blocks that are not compiled."""
    blocks = " + ".join(map(str, blocks_of_stages(config, plan, degrees.pipeline)))
    share = idle_share(config, plan, degrees)
    v = config.parallel.stages_per_rank
    each = f", {v} a rank{' in a V' * in_a_v(config.parallel)}" if v > 1 else ""
    line = f"stages of {blocks} blocks{each}; ranks wait {share:.1%} of a step; memory of the rank that holds most"
    return f"{line}\n{EAGER}" if in_a_v(config.parallel) else line


def check_stages(config: Config, degrees: Degrees) -> None:
    """Raise UserError, naming key, value and fix, if the config does not support `degrees.pipeline` stages."""
    if degrees.pipeline > 1:
        _check_blocks(config, degrees)
        _check_microbatches(config, degrees)
        _check_others(config, degrees.pipeline)


def _check_blocks(config: Config, degrees: Degrees) -> None:
    """Raise UserError if the stages cannot share the blocks."""
    p, layers = degrees.pipeline, config.model.num_layers
    stages, v = config.parallel.stages, config.parallel.stages_per_rank
    if in_a_v(config.parallel) and v != 2:
        fix = "set parallel.stages_per_rank=2, or parallel.schedule=interleaved"
        refuse("parallel.stages_per_rank", v, "with parallel.schedule=zbv a rank has two stages", fix)
    if v < 1:
        refuse("parallel.stages_per_rank", v, "out of range", "set 1 or more")
    if p > layers:
        fix = f"set {divisor_near(layers, degrees.world)}"
        refuse("parallel.pipeline", p, f"there are model.num_layers={layers} blocks", fix)
    if v > 1 and p * v > layers + 1:
        why = f"parallel.pipeline={p} ranks have model.num_layers={layers} blocks"
        fix = "set 1, and parallel.schedule=interleaved" if in_a_v(config.parallel) else "set at most {}"
        refuse("parallel.stages_per_rank", v, why, fix.format((layers + 1) // p))
    least_blocks = [1] * (p * v - 1) + [int(v == 1)]
    if stages is not None and (
        len(stages) != p * v or sum(stages) != layers or any(map(int.__lt__, stages, least_blocks))
    ):
        each, but = (f" of {v} stages", ", but the last") if v > 1 else (" stages", "")
        why = f"parallel.pipeline={p}{each} have model.num_layers={layers} blocks, each one at least{but}"
        refuse("parallel.stages", stages, why, "set one number a stage with this sum, or null")


def _check_microbatches(config: Config, degrees: Degrees) -> None:
    """Raise UserError if a step has too few microbatches, or a number that the order of passes cannot take."""
    p, t, v = degrees.pipeline, config.trainer, config.parallel.stages_per_rank
    least = p * t.microbatch_size * degrees.data
    if t.global_batch_size < least:
        why = f"parallel.pipeline={p} stages need as many microbatches a step"
        refuse("trainer.global_batch_size", t.global_batch_size, why, f"set {least} or a multiple of it")
    count = microbatches_of(config, degrees)
    if v > 1 and not in_a_v(config.parallel) and not forms_whole_rounds(count, p):
        rounds = _rounds(count, p)
        why = f"with parallel.stages_per_rank={v} a rank's {count} microbatches form {counted(rounds, 'round')}"
        fix = f"set {rounds * least}, or another multiple of {least}"
        refuse("trainer.global_batch_size", t.global_batch_size, why, fix)


def _check_others(config: Config, p: int) -> None:
    """Raise UserError for settings that p stages do not support."""
    off = "set parallel.pipeline=1"
    if in_a_v(config.parallel):
        _check_v(config)
    if config.parallel.fp8_all_gather is Switch.true:
        why = f"with parallel.pipeline={p} weights are gathered in BF16"
        refuse("parallel.fp8_all_gather", "true", why, f"set parallel.fp8_all_gather=auto, or {off}")
    if config.debug.inject is not None:
        refuse("parallel.pipeline", p, "debug.inject needs its block on every rank", f"{off}, or debug.inject=null")
    if config.health.shadow_every:
        why = f"it does not support parallel.pipeline={p}"
        refuse("health.shadow_every", config.health.shadow_every, why, f"set health.shadow_every=0, or {off}")
    if config.trainer.document_masking and config.model.num_mtp_layers > 1:
        why = "its deeper depths need the embedding, which only the first stage has"
        fix = f"set 1, trainer.document_masking=false, or {off}"
        refuse("model.num_mtp_layers", config.model.num_mtp_layers, why, fix)


def _check_v(config: Config) -> None:
    """Raise UserError if the config does not support separate gradients of weights."""
    fix = "set {}=auto, or parallel.schedule=interleaved"
    if config.parallel.reduce_each_microbatch is Switch.true:
        why = "with parallel.schedule=zbv gradients of weights are complete after a stage's last microbatch only"
        refuse("parallel.reduce_each_microbatch", "true", why, fix.format("parallel.reduce_each_microbatch"))
    if config.compile.enabled is Switch.true:
        why = "with parallel.schedule=zbv blocks put gradients of weights aside, which compiled code cannot"
        refuse("compile.enabled", "true", why, fix.format("compile.enabled"))
