"""Train a DeepSeek-style model: python train.py +recipe=fp8_delayed (more: --help).

Composes the config with Hydra, loads it strictly, and trains: in one process, or in each process of torchrun.
"""

import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from precision import Plan
    from trainer.config import Config
    from trainer.launch.launcher import Launch
    from trainer.launch.liveness.rank_group import RankGroup
    from trainer.launch.saved_config import OwnSettings
    from trainer.sinks import Summary


class Checked(NamedTuple):
    """A run that can start. remark: what the user is told about it first."""

    config: "Config"
    overrides: list[str]
    plan: "Plan"
    remark: str


def run(rank_group: "RankGroup") -> None:
    """Run everything that the command line asks for, after checking all of it."""
    launch = rank_group.join(os.environ)
    jobs, done = check_all(rank_group, launch), []
    for number, job in enumerate(jobs, 1):
        if job.config.dry_run:
            if launch.is_first:
                print_forecast(rank_group, job)
        else:
            title = f"\nrun {number} of {len(jobs)}" if len(jobs) > 1 else ""
            done.append((train(rank_group, job, title), job.overrides))
    if len(done) > 1:
        from trainer.offline.ending import say, sweep_table

        say(f"\n{sweep_table(done)}")
    rank_group.leave()


def check_all(rank_group: "RankGroup", launch: "Launch") -> list[Checked]:
    """Compose the runs that the command line asks for. Raises UserError for what cannot start."""
    from trainer.launch.composition import compose

    jobs = compose(Path(__file__).resolve().parent / "configs", launch, "train", partial(own_settings, rank_group))
    from trainer.config import load
    from trainer.config.paths import kept_tree

    configs = [load(job.tree) for job in jobs]
    from trainer.forecast.check_values import check_values, cut_line, with_fitting_microbatch
    from trainer.parallel.mesh import forecast_degrees, resolve

    remarks = []
    for i, (job, config) in enumerate(zip(jobs, configs, strict=True)):
        degrees = (forecast_degrees if config.dry_run else resolve)(config.parallel, launch.size)
        configs[i] = with_fitting_microbatch(config, degrees)
        own = None if job.settings is None else job.settings.line(kept_tree(configs[i]))
        remarks.append("\n".join(line for line in (own, cut_line(config, configs[i])) if line))
        check_values(configs[i], degrees)  # before torch is imported: a mistake is reported at once
    with rank_group.importing():
        from trainer.forecast.fits import check_memory
        from trainer.forecast.gpus import target
        from trainer.forecast.preflight import check
        from trainer.run.location import check_place, check_writable

    plans = [check(config, None if config.dry_run else launch.size) for config in configs]
    trained = [(config, plan) for config, plan in zip(configs, plans, strict=True) if not config.dry_run]
    for config, plan in trained:
        check_memory(config, plan, resolve(config.parallel, launch.size), target(config), launch.local_size)
    for config, _ in trained:
        if not launch.under_torchrun:  # there, the first rank may already have created the folder
            check_place(config.run)
            check_writable(config.run)
    overrides = [job.overrides for job in jobs]
    return [Checked(*each) for each in zip(configs, overrides, plans, remarks, strict=True)]


def print_forecast(rank_group: "RankGroup", job: Checked) -> None:
    """Print the report of a dry run. Raises UserError for a run or weights that it could not start from."""
    with rank_group.importing():
        from trainer.forecast.dry_run import report
        from trainer.run.resume_source import check_origin

    check_origin(job.config)
    if job.remark:
        print(f"{job.remark}\n")
    print(report(job.config, job.plan, rank_group.launch.size), flush=True)


def train(rank_group: "RankGroup", job: Checked, title: str) -> "Summary":
    """Train one run, with the other processes. title: of a run of a sweep."""
    with rank_group.importing():
        from trainer.launch.agreement import agree
        from trainer.launch.device import pick_device
        from trainer.launch.world import init
        from trainer.offline.ending import ending, say, shown
        from trainer.trainer import Trainer

    config = job.config
    world = init(pick_device(config.trainer.device), rank_group, config.parallel.timeout)
    agree(world, config, job.plan.to_text())
    if title:
        say(f"{title}: {shown(job.overrides)}")
    shows = world.is_first and config.logging.console.enabled
    if job.remark and shows:
        say(job.remark)
    trainer = Trainer(config, job.overrides, world)
    if job.remark:
        trainer.run.sinks.log(job.remark)
    summary = trainer.train()
    if shows:
        say(ending(summary, trainer.run, rank_group.launch))
    return summary


def own_settings(
    rank_group: "RankGroup", run: Mapping[str, Any], restarted: bool, from_run: str | None
) -> "OwnSettings | None":
    """`trainer.run.own_settings`, which imports torch: not before a command line names a run."""
    with rank_group.importing():
        from trainer.run.own_settings import own_settings

    return own_settings(run, restarted, from_run)


def main() -> int:
    """Return the exit code: 0 done, 1 the run failed, 2 the command or its config is wrong, 130 interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends without a traceback
    from trainer.launch.command_line import guarded
    from trainer.launch.liveness.rank_group import RankGroup

    rank_group = RankGroup()
    return guarded(lambda: run(rank_group), rank_group)


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # a signal during the exit ends it without a traceback
