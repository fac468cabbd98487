"""The whole step on 1, 2, 4, 8 GPUs of a node: tokens a second of each GPU, and the cost of communication.

    python scripts/bench/scaling.py --gpus 1,2,4,8 +recipe=fp8_delayed model=moonlight_16b model.num_layers=9 \
        model.vocab_size=102400 model.force_balanced_routing=true trainer.sequence_length=4096 \
        trainer.microbatch_size=8 trainer.global_batch_size=8 parallel=fsdp

Weak scaling: the command's `trainer.global_batch_size` is that of each GPU. Each count runs in its own processes, all
steps on random tokens. In the table, of the slowest rank:

    tokens/s/GPU     of consecutive steps without waiting; the median of --rounds times --steps of them
    of 1 GPU         the same relative to the smallest count that ran
    of no messages   the step with copies within the GPU in place of FSDP's messages (weights, gradients), over the
                     step: 1 if messages hide behind the arithmetic (tokens still travel to other ranks' experts)
    peak             the most memory of a rank; forecast: of dry_run=true
    retries          how often in these steps the allocator found no contiguous block and freed its cache
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import frame
import measure
import torch

from precision.errors import RunError, UserError
from trainer.launch.command_line import Parser, guarded
from trainer.launch.composition import compose
from trainer.launch.liveness.rank_group import RankGroup

AXES = "replicate", "shard", "context", "tensor", "pipeline", "expert"
WARM_UP = 3
GIB = 2**30


def main() -> int:
    if os.environ.get("SCALING_RESULT"):
        rank_group = RankGroup()
        return guarded(lambda: rank(rank_group), rank_group)
    return guarded(run)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the arguments of train.py."""
    parser = Parser(__doc__)
    parser.add_argument("--gpus", default="1,2,4,8", help="counts to measure (1,2,4,8)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a row (5)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of --steps steps (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    options, words = parser.parse_known_args()
    frame.check_positive(options, "steps", "rounds")
    counts = options.gpus.split(",")
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise UserError(f"--gpus {options.gpus}: want counts with commas between, as 1,2,4,8")
    options.gpus = sorted({int(count) for count in counts})
    return options, words


def run() -> None:
    """Start each count of processes, one after the other, and print their results."""
    options, _ = arguments()
    there = torch.cuda.device_count()
    if there and max(options.gpus) > there:
        raise UserError(f"--gpus {max(options.gpus)}: this node has {there}; name counts up to that")
    facts, results = measure.header(), []
    for count in options.gpus:
        results += measure.attempt(f"{count} GPUs", lambda count=count: [one(count)])
    if not results:
        raise RunError("no count of GPUs ran to the end; the lines above say why")
    measure.say(measure.table([row(result, results[0]) for result in results]))
    measure.write_json(options.json, facts, results)


def one(count: int) -> dict[str, Any]:
    """Return the measurements of `count` processes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        return frame.torchrun(count, Path(__file__).resolve(), sys.argv[1:], result, {"SCALING_RESULT": str(result)})


def row(result: dict[str, Any], first: dict[str, Any]) -> dict[str, str]:
    speed, silent = result["tokens_per_second"], result["silent_seconds"]
    return {
        "GPUs": str(result["gpus"]),
        "layout": result["layout"],
        "ms": measure.show(result["seconds"], ".1f", 1e3),
        "tokens/s/GPU": f"{speed:,.0f}",
        f"of {first['gpus']} GPU": f"{speed / first['tokens_per_second']:.1%}",
        "of no messages": measure.NONE if silent is None else f"{silent / result['seconds']:.2f}",
        "peak GiB": measure.show(result["peak"], ".1f", 1 / GIB),
        "forecast": measure.show(result["forecast"], ".1f", 1 / GIB),
        "retries": measure.show(result["retries"], ".0f"),
    }


def rank(rank_group: RankGroup) -> None:
    """Run one of the processes: build, time, and on rank 0 write the slowest rank's times."""
    from trainer.config import load
    from trainer.forecast.memory import forecast, total_memory
    from trainer.forecast.preflight import check
    from trainer.launch.device import pick_device
    from trainer.launch.world import init
    from trainer.parallel.mesh import resolve
    from trainer.step.engine import build_engine
    from trainer.step.train_step import train_step

    launch = rank_group.join(os.environ)
    options, words = arguments()
    sys.argv[1:] = words
    (job,) = compose(frame.CONFIGS, launch)
    if launch.size == 1:
        for axis in AXES:
            job.tree.parallel[axis] = 1
    job.tree.trainer.global_batch_size *= launch.size
    config = load(job.tree)
    check(config, launch.size)
    world = init(pick_device(config.trainer.device), rank_group, config.parallel.timeout)
    engine = build_engine(config, world.device, world=world)
    degrees = resolve(config.parallel, world.size)
    t = config.trainer
    torch.manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, (t.global_batch_size, t.sequence_length + 1)).to(world.device)
    number = 0

    def steps(count: int) -> None:
        nonlocal number
        for _ in range(count):
            number += 1
            train_step(engine, number, engine.share_of(tokens), t.microbatch_size)

    slots = engine.model.slots
    while slots is not None and slots.observing:  # tokens travel in slots when a run has reviewed a few steps
        steps(1)
        slots.fit(float(slots.fill))
    seconds = timed(steps, options, world)
    peak, retries = float("nan"), float("nan")
    if world.device.type == "cuda":
        peak, retries = torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["num_alloc_retries"]
    silent = silent_seconds(engine.model, steps, options, world)
    expected, _ = forecast(config, engine.plan, degrees, total_memory(world.device))
    peaks, retries = world.gather(peak), world.gather(retries)
    if world.is_first:
        result = {
            "gpus": world.size,
            "layout": ", ".join(f"{axis} {n}" for axis in AXES if (n := getattr(degrees, axis)) > 1) or "1",
            "seconds": seconds,
            "tokens_per_second": t.global_batch_size * t.sequence_length / seconds / world.size,
            "silent_seconds": silent,
            "peak": max(peaks),
            "retries": max(retries),
            "forecast": sum(expected.values()),
        }
        Path(os.environ["SCALING_RESULT"]).write_text(json.dumps(result))
    world.barrier()
    rank_group.leave()


def timed(steps: Callable[[int], None], options: argparse.Namespace, world: Any) -> float:
    """Return the seconds a step of the slowest rank: the median over rounds."""
    steps(WARM_UP)
    found = []
    for _ in range(options.rounds):
        measure.synchronize()
        world.barrier()
        began = time.perf_counter()
        steps(options.steps)
        measure.synchronize()
        found.append(max(world.gather((time.perf_counter() - began) / options.steps)))
    return statistics.median(found)


def silent_seconds(model: Any, steps: Callable[[int], None], options: argparse.Namespace, world: Any) -> float | None:
    """Return the same with copies within the device in place of FSDP's messages, or None in one process. Ruins the
    model."""
    from trainer.parallel.fsdp_internals import groups
    from trainer.parallel.large import LargeWeights

    if not world.is_distributed:
        return None
    gather, scatter = silent_messages()
    for module, group in groups(model):
        if isinstance(group.all_gather, LargeWeights):
            group.all_gather.comm = gather
        else:
            module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)
    return timed(steps, options, world)


def silent_messages() -> tuple[Any, Any]:
    """Return replacements of FSDP's gather and reduce, in which a rank's own part stands for everyone's."""
    import torch.distributed as dist

    from trainer.parallel.fsdp_internals import AllGather, ReduceScatter

    class Memory:
        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    class Gather(Memory, AllGather):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
        ) -> None:
            for part in output_tensor.chunk(dist.get_world_size(group)):
                if part.data_ptr() != input_tensor.data_ptr():  # its own part may already be there
                    part.copy_(input_tensor)

    class Scatter(Memory, ReduceScatter):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            output_tensor.copy_(input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    return Gather(), Scatter()


if __name__ == "__main__":
    sys.exit(main())
