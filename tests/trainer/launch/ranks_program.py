"""A run without a model, for tests of what its processes owe each other: real folder, sinks, signals and groups.

    torchrun --nproc_per_node=2 tests/trainer/launch/ranks_program.py FOLDER NAME FAULT [STEPS [TIMEOUT]]

FAULT happens in step 3, on rank 1 or on the one named: kill, kill:0, bug, mistake, mistake:all, stop:all, exit, hang,
freeze, memory; lag: as hang, and rank 0 waits for a device, not for rank 1. absent, wrong: rank 1 is killed, or
refuses, before it meets the others, who wait for it; waits: it comes, and rank 0 waits for it in a collective.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from precision.errors import UserError
from trainer.config import ConsoleConfig, LoggingConfig, TensorboardConfig, WandbConfig, WandbMode
from trainer.launch.command_line import guarded
from trainer.launch.liveness import heartbeat
from trainer.launch.liveness.rank_group import RankGroup
from trainer.launch.signals import StopSignals
from trainer.launch.world import World, init
from trainer.run.run_folder import RunFolder
from trainer.sinks import Sinks
from trainer.step.guard import TrainingStopped

LOGGING = LoggingConfig(
    1, ConsoleConfig(True), TensorboardConfig(False), WandbConfig(False, "octet", None, WandbMode.auto)
)


def fail(fault: str, rank: int) -> None:
    """What goes wrong, on this rank."""
    kind, _, where = fault.partition(":")
    if where != "all" and rank != int(where or 1):
        return
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "exit":
        os._exit(7)
    if kind == "bug":
        _ = {}["x"]
    if kind == "memory":
        raise torch.OutOfMemoryError
    if kind == "mistake":
        raise UserError("optim.lr=9: too large; lower it")
    if kind == "stop":
        raise TrainingStopped("2 steps in a row skipped")
    if kind in ("hang", "lag"):
        time.sleep(1000)


def loop(world: World, folder: str, name: str, fault: str, steps: int) -> None:
    """Steps that do nothing but wait for all."""
    resume = "auto" if world.rank_group.launch.attempt else "never"
    if world.is_first:
        run = RunFolder(Path(folder), name, resume, "x", {"config.yaml": ""}, patience=60)
        world.broadcast(str(run.path))
    else:
        run = RunFolder._opened_by_another(Path(world.broadcast("")), None)
    error = None
    sinks = Sinks(LOGGING, run, steps, rank=world.rank)
    world.rank_group.on_end.append(sinks.ended)
    try:
        with StopSignals(world) as stop:
            for step in range(1, steps + 1):
                world.rank_group.step = step
                if step == 3 and not world.rank_group.launch.attempt:
                    fail(fault, world.rank)
                time.sleep(0.05)
                if fault != "lag":
                    world.barrier()
                elif step == 4:
                    time.sleep(1000)
                sinks.metrics({"step": step, "loss/total": 1.0})
                stop.agree()
                if stop.received:
                    sinks.event("signal", step, f"stopped by {stop.received} after step {step}")
                    number = signal.Signals[stop.received]
                    raise TrainingStopped(f"stopped by {stop.received} after step {step}", 128 + number)
    except BaseException as raised:
        error = raised
        raise
    finally:
        sinks.close(error)
        run.close()


def main() -> int:
    """Exit code, as of train.py."""
    rank_group = RankGroup()
    folder, name, fault, *numbers = sys.argv[1:]
    steps, timeout = [*map(int, numbers), *[6, 8][len(numbers) :]]
    heartbeat.PULSE_SECONDS, heartbeat.PATIENCE = 0.5, 2.0

    def run() -> None:
        rank_group.join(os.environ)
        if fault in ("absent", "wrong") and rank_group.launch.rank == 1:
            time.sleep(2)
            Path(folder).touch()  # when
            fail({"absent": "kill", "wrong": "mistake"}[fault], 1)
        world = init(torch.device("cpu"), rank_group, timeout)
        if fault == "waits":
            (Path(folder) / f"rank{world.rank}").mkdir(parents=True)
            time.sleep(1000 * world.rank)
            world.barrier()
        loop(world, folder, name, fault, steps)
        rank_group.leave()

    return guarded(run, rank_group)


if __name__ == "__main__":
    sys.exit(main())
