"""Octet's side of `compare.py`: `train_step` of the engine that train.py builds, under FSDP on several GPUs."""

import os
import sys
from pathlib import Path

from trainer.launch.command_line import guarded
from trainer.launch.composition import compose
from trainer.launch.liveness.rank_group import RankGroup

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def run(rank_group: RankGroup) -> None:
    """Build and measure. The command line has overrides of train.py."""
    launch = rank_group.join(os.environ)
    (job,) = compose(CONFIGS, launch)
    import torch
    from work import Work

    from trainer.config import load
    from trainer.forecast.preflight import check
    from trainer.launch.device import pick_device
    from trainer.launch.world import init
    from trainer.step.engine import build_engine
    from trainer.step.train_step import train_step

    work, config = Work.read(), load(job.tree)
    check(config, launch.size)
    world = init(pick_device(config.trainer.device), rank_group, config.parallel.timeout)
    engine = build_engine(config, world.device, world=world)
    batch = work.tokens(world.rank, world.size).to(world.device)
    number = 0

    def step() -> torch.Tensor:
        nonlocal number
        number += 1
        return train_step(engine, number, batch, work.sequences).metrics["loss/lm"].detach()

    work.measure(step, world.barrier, world.rank)
    rank_group.leave()


if __name__ == "__main__":
    group = RankGroup()
    sys.exit(guarded(lambda: run(group), group))
