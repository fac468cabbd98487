"""Pipeline stages ahead of a run: which blocks each one has, what does not go with them, and how long they idle."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, NoReturn

from models.config import ModelConfig
from models.stage import Stage, block_flops, divide
from precision import Plan
from precision.errors import UserError
from precision.rows import CoreRow, GemmRecipe, GemmRow, TensorRow
from trainer.config import Config, OptimizerName, Switch
from trainer.forecast.once import once
from trainer.parallel.mesh import Degrees

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def blocks_of_stages(config: Config, plan: Plan, stages: int) -> list[int]:
    """Numbers of blocks: `parallel.stages`, or alike in FLOPs."""
    return config.parallel.stages or _alike(plan, config.trainer.sequence_length, stages)


@once
def _alike(plan: Plan, sequence_length: int, stages: int) -> list[int]:
    return divide(*block_flops(plan, sequence_length), stages)


def stage_of(config: Config, plan: Plan, group: "ProcessGroup") -> Stage:
    """This rank's stage. group: a rank of each one."""
    counts, index = blocks_of_stages(config, plan, group.size()), group.rank()
    begin = [0, *accumulate(counts)][index]
    return Stage(index, len(counts), begin, begin + counts[index], group)


def stage_models(config: Config, plan: Plan, degrees: Degrees) -> Iterator[tuple[Config, Plan, int]]:
    """Config and plan of each stage as of a model of its blocks alone, and microbatches that it keeps activations of.
    Of stages that are alike the first one, which keeps most.

    The embedding is the first one's (`vocab_size` of the others is 0), the head the last one's (its row has no width
    elsewhere).
    """
    if degrees.pipeline == 1:
        yield config, plan, 1
        return
    counts = tuple(blocks_of_stages(config, plan, degrees.pipeline))
    for model, rows, kept in _distinct(plan, counts, config=config.model):
        yield replace(config, model=model), rows, kept


@once
def _distinct(plan: Plan, counts: tuple[int, ...], config: ModelConfig) -> list[tuple[ModelConfig, Plan, int]]:
    found, seen, begin = [], set(), 0
    for i, count in enumerate(counts):
        end, last = begin + count, i == len(counts) - 1
        own = replace(
            config,
            num_layers=count,
            num_dense_layers=min(max(config.num_dense_layers - begin, 0), count),
            num_mtp_layers=config.num_mtp_layers if last else 0,
            vocab_size=0 if i else config.vocab_size,
        )
        rows = plan.of_blocks(range(begin, end), last)
        alike = i == 0, *(_look(row) for kind in (rows.gemms, rows.tensors, rows.cores) for row in kind.values())
        if alike not in seen:
            seen.add(alike)
            found.append((own, rows, len(counts) - i))
        begin = end
    return found


def _look(row: GemmRow | TensorRow | CoreRow) -> tuple[object, ...]:
    """What is the same for rows of equal layers, whose recipes are one object."""
    values = {**vars(row), "name": row.name.rpartition(".")[2], "decided_by": ""}
    return tuple(id(value) if isinstance(value, GemmRecipe) else value for value in values.values())


def idle_share(config: Config, plan: Plan, degrees: Degrees) -> float:
    """Share of a step's arithmetic that ranks wait for others (the bubble), as 1F1B takes its time from the slowest
    stage: sum of t_i + (m - 1) max t_i, for m microbatches whose forward and backward take t_i."""
    t = config.trainer
    m = t.global_batch_size // (t.microbatch_size * degrees.data)
    times = _times(plan, t.sequence_length, tuple(blocks_of_stages(config, plan, degrees.pipeline)))
    return 1 - m * sum(times) / len(times) / (sum(times) + (m - 1) * max(times))


@once
def _times(plan: Plan, sequence_length: int, counts: tuple[int, ...]) -> list[float]:
    """FLOPs of a token in each stage."""
    blocks, last = block_flops(plan, sequence_length)
    ends = list(accumulate(counts))
    times = [sum(blocks[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    times[-1] += last
    return times


def stages_line(config: Config, plan: Plan, degrees: Degrees) -> str:
    """Blocks of the stages, and the bubble: a line of text."""
    blocks = " + ".join(map(str, blocks_of_stages(config, plan, degrees.pipeline)))
    share = idle_share(config, plan, degrees)
    return f"stages of {blocks} blocks; ranks wait {share:.1%} of a step; memory of the largest stage"


def check_stages(config: Config, degrees: Degrees) -> None:
    """UserError, naming key, value and fix, for what does not go with `degrees.pipeline` stages."""
    p, t, m = degrees.pipeline, config.trainer, config.model
    if p == 1:
        return
    off = "set parallel.pipeline=1"
    if p > m.num_layers:
        _refuse("parallel.pipeline", p, f"there are model.num_layers={m.num_layers} blocks", f"set {m.num_layers}")
    stages = config.parallel.stages
    if stages is not None and (len(stages) != p or sum(stages) != m.num_layers or min(stages) < 1):
        why = f"parallel.pipeline={p} stages have model.num_layers={m.num_layers} blocks, each one at least"
        _refuse("parallel.stages", stages, why, "set so many numbers with this sum, or null")
    least = p * t.microbatch_size * degrees.data
    if t.global_batch_size < least:
        why = f"parallel.pipeline={p} stages need as many microbatches a step"
        _refuse("trainer.global_batch_size", t.global_batch_size, why, f"set {least} or more, or a smaller microbatch")
    if config.optim.name is OptimizerName.muon:
        _refuse("parallel.pipeline", p, "optim.name=muon does not know stages", f"{off}, or optim=adamw_wsd")
    if config.parallel.fp8_all_gather is Switch.true:
        why = f"with parallel.pipeline={p} weights travel in BF16"
        _refuse("parallel.fp8_all_gather", "true", why, f"set parallel.fp8_all_gather=auto, or {off}")
    if config.debug.inject is not None:
        _refuse("parallel.pipeline", p, "debug.inject looks for its block on every rank", f"{off}, or no debug.inject")
    if config.health.shadow_every:
        why = f"its passes know no stages, parallel.pipeline={p}"
        _refuse("health.shadow_every", config.health.shadow_every, why, f"set health.shadow_every=0, or {off}")
    if t.document_masking and m.num_mtp_layers > 1:
        why = "its deeper depths need the embedding, which is the first stage's"
        _refuse("model.num_mtp_layers", m.num_mtp_layers, why, f"set 1, trainer.document_masking=false, or {off}")


def _refuse(key: str, value: object, why: str, fix: str) -> NoReturn:
    raise UserError(f"{key}={value}: {why}; {fix}")
