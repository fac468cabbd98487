"""Pipeline stages before a run: their blocks, what they do not support, and how long they idle."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from models.config import ModelConfig
from models.stage import Pipeline, Stage, block_flops, divide, divide_in_turn
from precision import Plan
from precision.errors import refuse
from precision.rows import CoreRow, GemmRecipe, GemmRow, TensorRow
from trainer.config import Config, Switch
from trainer.forecast.plan_cache import cached_per_plan
from trainer.parallel.mesh import Degrees

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def blocks_of_stages(config: Config, plan: Plan, ranks: int) -> list[int]:
    """Return the number of blocks of each stage for `ranks` ranks: `parallel.stages`, or equal FLOPs."""
    p, t = config.parallel, config.trainer
    return p.stages or _alike(plan, t.sequence_length, ranks, p.stages_per_rank)


@cached_per_plan
def _alike(plan: Plan, sequence_length: int, ranks: int, per_rank: int) -> list[int]:
    flops = block_flops(plan, sequence_length)
    return divide(*flops, ranks) if per_rank == 1 else divide_in_turn(*flops, ranks, per_rank)


def owners(ranks: int, per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage."""
    return tuple(range(ranks)) * per_rank


def pipeline_of(config: Config, plan: Plan, group: "ProcessGroup") -> Pipeline:
    """Return this process's stages. group: the ranks of the pipeline."""
    ranks = owners(group.size(), config.parallel.stages_per_rank)
    ends = list(accumulate(blocks_of_stages(config, plan, group.size())))
    stages = (Stage(i, len(ends), begin, end) for i, (begin, end) in enumerate(pairwise([0, *ends])))
    own = tuple(stage for stage in stages if ranks[stage.index] == group.rank())
    return Pipeline(own, ranks, group)


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
    counts = tuple(blocks_of_stages(config, plan, p))
    for model, rows, rank in _distinct(plan, counts, owners(p, v), config=config.model):
        yield replace(config, model=model), rows, kept(rank, p, v, m)


def kept(rank: int, p: int, v: int, m: int) -> float:
    """Return how many microbatches' activations a rank keeps: the forward passes ahead of the backward pass."""
    if v == 1:
        return p - rank
    ahead = (v - 1) * (m // _rounds(m, p)) + 2 * (p - 1 - rank)
    return min(ahead + 1, m * v) / v


def _rounds(m: int, p: int) -> int:
    """Number of rounds in which m microbatches go through a rank's stages."""
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
    """Return a key that is equal for rows of equal layers, whose recipes are one object."""
    values = {**vars(row), "name": row.name.rpartition(".")[2], "decided_by": ""}
    return tuple(id(value) if isinstance(value, GemmRecipe) else value for value in values.values())


def idle_share(config: Config, plan: Plan, degrees: Degrees) -> float:
    """Return the share of a step's arithmetic in which ranks wait for others (the bubble)."""
    p, v = degrees.pipeline, config.parallel.stages_per_rank
    times = _times(plan, config.trainer.sequence_length, tuple(blocks_of_stages(config, plan, p)))
    return bubble(times, owners(p, v), microbatches_of(config, degrees))


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


@cached_per_plan
def _times(plan: Plan, sequence_length: int, counts: tuple[int, ...]) -> list[float]:
    """Return the FLOPs of a token in each stage."""
    blocks, last = block_flops(plan, sequence_length)
    ends = list(accumulate(counts))
    times = [sum(blocks[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    times[-1] += last
    return times


def stages_line(config: Config, plan: Plan, degrees: Degrees) -> str:
    """Return a line with the blocks of the stages and the bubble."""
    blocks = " + ".join(map(str, blocks_of_stages(config, plan, degrees.pipeline)))
    share = idle_share(config, plan, degrees)
    v = config.parallel.stages_per_rank
    each = f", {v} a rank" if v > 1 else ""
    return f"stages of {blocks} blocks{each}; ranks wait {share:.1%} of a step; memory of the rank that holds most"


def check_stages(config: Config, degrees: Degrees) -> None:
    """Raise UserError, naming key, value and fix, if the config does not support `degrees.pipeline` stages."""
    p, t, m = degrees.pipeline, config.trainer, config.model
    if p == 1:
        return
    off = "set parallel.pipeline=1"
    stages, v = config.parallel.stages, config.parallel.stages_per_rank
    if v < 1:
        refuse("parallel.stages_per_rank", v, "out of range", "set 1 or more")
    if p > m.num_layers:
        refuse("parallel.pipeline", p, f"there are model.num_layers={m.num_layers} blocks", f"set {m.num_layers}")
    if v > 1 and p * v > m.num_layers + 1:
        why = f"parallel.pipeline={p} ranks have model.num_layers={m.num_layers} blocks"
        refuse("parallel.stages_per_rank", v, why, f"set at most {(m.num_layers + 1) // p}")
    least_blocks = [1] * (p * v - 1) + [int(v == 1)]
    if stages is not None and (
        len(stages) != p * v or sum(stages) != m.num_layers or any(map(int.__lt__, stages, least_blocks))
    ):
        each, but = (f" of {v} stages", ", but the last") if v > 1 else (" stages", "")
        why = f"parallel.pipeline={p}{each} have model.num_layers={m.num_layers} blocks, each one at least{but}"
        refuse("parallel.stages", stages, why, "set one number a stage with this sum, or null")
    least = p * t.microbatch_size * degrees.data
    if t.global_batch_size < least:
        why = f"parallel.pipeline={p} stages need as many microbatches a step"
        refuse("trainer.global_batch_size", t.global_batch_size, why, f"set {least} or more, or a smaller microbatch")
    count = microbatches_of(config, degrees)
    if v > 1 and not forms_whole_rounds(count, p):
        rounds = _rounds(count, p)
        why = f"with parallel.stages_per_rank={v} a rank's {count} microbatches form {rounds} rounds"
        refuse(
            "trainer.global_batch_size",
            t.global_batch_size,
            why,
            f"set {rounds * least}, or another multiple of {least}",
        )
    if config.parallel.fp8_all_gather is Switch.true:
        why = f"with parallel.pipeline={p} weights are gathered in BF16"
        refuse("parallel.fp8_all_gather", "true", why, f"set parallel.fp8_all_gather=auto, or {off}")
    if config.debug.inject is not None:
        refuse("parallel.pipeline", p, "debug.inject needs its block on every rank", f"{off}, or no debug.inject")
    if config.health.shadow_every:
        why = f"it does not support parallel.pipeline={p}"
        refuse("health.shadow_every", config.health.shadow_every, why, f"set health.shadow_every=0, or {off}")
    if t.document_masking and m.num_mtp_layers > 1:
        why = "its deeper depths need the embedding, which only the first stage has"
        refuse("model.num_mtp_layers", m.num_mtp_layers, why, f"set 1, trainer.document_masking=false, or {off}")
