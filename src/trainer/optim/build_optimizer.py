"""Builds the optimizer of a config, and assigns the model's weights to its parts."""

import torch

from models import DeepSeek
from models.matrices import division
from models.tensor import CUT
from precision import Plan
from precision.rows import GemmRow
from trainer.config import Config, OptimizerName
from trainer.config.timeline import Timeline, rates
from trainer.launch.world import World
from trainer.optim.adamw import LearningRate, Optimizer
from trainer.optim.muon import Muon
from trainer.optim.owners import Layout, layout
from trainer.parallel.mesh import ONE_PROCESS, Degrees, stage_group


def build_optimizer(
    config: Config,
    plan: Plan,
    model: DeepSeek,
    device: torch.device,
    world: World | None = None,
    degrees: Degrees = ONE_PROCESS,
) -> Optimizer:
    """Build the optimizer of the plan's model. world, degrees: the ranks that share its weights, and their layout; with
    several this is a collective.
    Raises ValueError if Muon would miss a weight that it should update: such a model needs a rule."""
    c, schedule, no_decay = config.optim, learning_rate(config), model.no_decay()
    if c.name is OptimizerName.adamw:
        return Optimizer(model, no_decay, c, schedule, device, world)
    found = {f"{name}.weight": each for name, each in muon_layouts(config, plan, degrees).items()}
    known = {"embed.weight", "lm_head.weight", *found}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and name not in known and not name.endswith(".router.weight"):
            raise ValueError(f"optim.name=muon: no rule lists the matrices in {name}; set optim.name=adamw")
    return Muon(model, no_decay, c, schedule, device, found, world, degrees, stage_group(degrees, device.type))


def learning_rate(config: Config) -> LearningRate:
    """Return the learning rate of a run, as a function of its steps."""
    timeline, c = Timeline(config.trainer), config.optim
    return LearningRate(c, timeline.steps, timeline.steps_of(c.warmup_steps), rates(timeline))


def muon_rows(config: Config, plan: Plan) -> dict[str, GemmRow]:
    """Return the plan's rows that Muon updates: all GEMMs of the blocks, routers if configured; empty with AdamW
    alone."""
    o = config.optim
    if o.muon is None or o.name is OptimizerName.adamw:
        return {}
    others = {"lm_head"} if o.muon.router else {"lm_head", "moe.router"}
    return {name: row for name, row in plan.gemms.items() if row.op not in others}


def muon_layouts(config: Config, plan: Plan, degrees: Degrees) -> dict[str, Layout]:
    """Return the positions of these weights' matrices on the ranks, by row of the plan."""
    return {
        name: layout(_shape(row), division(config.model, row), degrees, CUT.get(row.op))
        for name, row in muon_rows(config, plan).items()
    }


def _shape(row: GemmRow) -> tuple[int, ...]:
    shape = row.out_features, row.in_features
    return (row.groups, *shape) if row.op == "moe.experts" else shape
