"""The optimizer that a config asks for."""

import torch

from models import DeepSeek
from models.matrices import Division, divisions
from precision import Plan
from trainer.config import Config, OptimizerName
from trainer.launch.world import World
from trainer.optim.adamw import Optimizer
from trainer.optim.muon import Muon


def build_optimizer(
    config: Config, plan: Plan, model: DeepSeek, device: torch.device, world: World | None = None
) -> Optimizer:
    """For the model that the plan was made for. world: who shares its weights."""
    c, steps, no_decay = config.optim, config.trainer.max_steps, model.no_decay()
    if c.name is OptimizerName.adamw:
        return Optimizer(model, no_decay, c, steps, device, world)
    return Muon(model, no_decay, c, steps, device, muon_divisions(config, plan), world)


def muon_divisions(config: Config, plan: Plan) -> dict[str, Division]:
    """Division of each parameter that Muon updates, by name; none with AdamW alone."""
    if config.optim.muon is None or config.optim.name is OptimizerName.adamw:
        return {}
    router = config.optim.muon.router
    found = divisions(config.model, plan)
    return {name: d for name, d in found.items() if router or not name.endswith(".router.weight")}
