"""Sizes of Muon's part of a step: matrices, elements, FLOPs of the orthogonalisation, owners, messages."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np

from models.matrices import division
from models.tensor import CUT
from precision import Plan
from trainer.config import Config, OptimizerName
from trainer.forecast.plan_cache import cached_per_plan
from trainer.forecast.stages import blocks_of_stages, stage_models
from trainer.optim.build_optimizer import muon_layouts, muon_rows
from trainer.optim.exchange import fragment
from trainer.optim.orthogonalise import CARRIED, DTYPES, flops, polynomials
from trainer.optim.owners import Layout, Run, assign
from trainer.parallel.mesh import ONE_PROCESS, Degrees


@dataclass(frozen=True)
class MuonSize:
    """Number of whole matrices, their elements, and the FLOPs of a step; all zero with AdamW."""

    matrices: int
    elements: float
    flops: float


def muon_size(config: Config, plan: Plan, degrees: Degrees = ONE_PROCESS) -> MuonSize:
    """Return the number of all matrices, a rank's elements, and its FLOPs if all ranks, replicas too, share evenly.
    Elements are those of a rank that has all of the plan's blocks: with a pipeline, of a stage's plan."""
    muon, d = config.optim.muon, degrees
    if muon is None or config.optim.name is not OptimizerName.muon:
        return MuonSize(0, 0.0, 0.0)
    steps = len(polynomials(muon.coefficients, muon.steps))
    experts, cut, others = _sizes(plan, steps, muon.router, config=config)
    elements = experts.elements / (d.expert * d.expert_shard) + (cut.elements / d.tensor + others.elements) / d.cut
    matrices = experts.matrices + cut.matrices + others.matrices
    return MuonSize(matrices, elements, (experts.flops + cut.flops + others.flops) / d.world)


@cached_per_plan
def _sizes(plan: Plan, steps: int, router: bool, config: Config) -> list[MuonSize]:
    """Return the sizes of all ranks' experts, of the weights that a tensor group cuts, and of the others. steps: of the
    iteration; router: whether routers count."""
    sizes = [MuonSize(0, 0.0, 0.0)] * 3
    for row in muon_rows(config, plan).values():
        kind = 0 if row.op == "moe.experts" else 1 if row.op in CUT else 2
        shapes = division(config.model, row).shapes((row.out_features, row.in_features))
        matrices, elements, work = astuple(sizes[kind])
        matrices += row.groups * sum(count for count, _, _ in shapes)
        elements += row.num_weights
        work += row.groups * sum(count * flops(a, b, steps) for count, a, b in shapes)
        sizes[kind] = MuonSize(matrices, elements, work)
    return sizes


def muon_load(config: Config, plan: Plan, degrees: Degrees) -> tuple[float, float]:
    """Return two figures of the chosen owners: FLOPs of the busiest rank over the mean, and the bytes that the rank
    with the largest messages sends per step, to owners and back."""
    assert config.optim.muon is not None
    found = list(_owners(config, plan, degrees))
    work = max(float(work.max()) for _, _, work in found)
    iteration = config.optim.muon.iteration
    sizes = CARRIED[iteration].itemsize, DTYPES[iteration].itemsize
    sent = max(_sent(layouts, runs, degrees.stage, *sizes) for layouts, runs, _ in found)
    return work / muon_size(config, plan, degrees).flops, sent


def _sent(layouts: dict[str, Layout], runs: list[Run], ranks: int, there: int, back: int) -> float:
    """Return the bytes that the rank with the largest messages sends per step. there, back: of a number."""
    sent = np.zeros(ranks)
    for run in runs:
        layout = layouts[run.name]
        parts = layout.parts[run.first : run.last]
        replica = next(part.ranks.index(run.owner) for part in parts if run.owner in part.ranks)
        for number, part in enumerate(parts, run.first):
            numbers = fragment(run, layout, number).numel
            if part.ranks[replica] != run.owner:
                sent[part.ranks[replica]] += numbers * there
            sent[run.owner] += numbers * back * sum(holder != run.owner for holder in part.ranks)
    return float(sent.max())


def busiest(config: Config, plan: Plan, degrees: Degrees) -> float:
    """Return the FLOPs of the busiest rank over the mean; 1 with AdamW."""
    if config.optim.name is not OptimizerName.muon or degrees.world == 1:
        return 1.0
    return _busiest(plan, degrees, tuple(blocks_of_stages(config, plan, degrees.pipeline)), config=config)


@cached_per_plan
def _busiest(plan: Plan, degrees: Degrees, counts: tuple[int, ...], config: Config) -> float:
    """counts: blocks of each stage."""
    most = max(float(work.max()) for _, _, work in _owners(config, plan, degrees))
    return most / muon_size(config, plan, degrees).flops


def _owners(config: Config, plan: Plan, degrees: Degrees) -> Iterator[tuple[dict[str, Layout], list[Run], np.ndarray]]:
    """Yield the layouts by row of the plan, the runs, and FLOPs by rank, of each kind of pipeline stage."""
    assert config.optim.muon is not None
    steps = len(polynomials(config.optim.muon.coefficients, config.optim.muon.steps))
    for own, rows, _ in stage_models(config, plan, degrees):
        layouts = muon_layouts(own, rows, degrees)
        yield layouts, *assign(layouts, steps, degrees.stage)
