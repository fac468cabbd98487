"""Sizes of Muon's part of a step: its matrices, their numbers, the FLOPs of their orthogonalisation."""

from dataclasses import dataclass

from models.matrices import division
from precision import Plan
from precision.rows import GemmRow
from trainer.config import Config
from trainer.optim.build import muon_rows
from trainer.optim.orthogonalise import flops, polynomials
from trainer.parallel.mesh import Degrees


@dataclass(frozen=True)
class MuonSize:
    """Of whole matrices: their number, their elements, and the FLOPs of a step; all zero with AdamW."""

    matrices: int
    elements: float
    flops: float


def muon_size(config: Config, plan: Plan, degrees: Degrees = Degrees()) -> MuonSize:  # noqa: B008
    """What a rank has of it, matrices shared evenly; by default all."""
    matrices, elements, work = 0, 0.0, 0.0
    for row in muon_rows(config, plan).values():
        assert config.optim.muon is not None
        ranks = degrees.expert * degrees.expert_shard if row.op == "moe.experts" else degrees.cut
        steps = len(polynomials(config.optim.muon.coefficients, config.optim.muon.steps))
        shapes = division(config.model, row).shapes((row.out_features, row.in_features))
        matrices += row.groups * sum(count for count, _, _ in shapes)
        elements += _elements(row) / ranks
        work += row.groups * sum(count * flops(a, b, steps) for count, a, b in shapes) / ranks
    return MuonSize(matrices, elements, work)


def _elements(row: GemmRow) -> int:
    return row.groups * row.in_features * row.out_features
