"""Choose degrees of parallelism: forecasts memory and step time of every layout that fits, and prints the command.

    python scripts/plan_parallelism.py --gpus 8 model=moonlight_16b +recipe=fp8_delayed trainer.sequence_length=4096
    python scripts/plan_parallelism.py --gpus 256 model=deepseek_v3 +recipe=fp8_block
    python scripts/plan_parallelism.py --gpus 4 --sequences 4,6,8,10,12 model=moonlight_16b trainer.sequence_length=4096
    python scripts/plan_parallelism.py --gpus 64,256 --network 45,12.5 model=deepseek_v2_lite parallel.pipeline=1

Several --gpus, --node-link or --network: the fastest layout for each machine, a line each. Degrees that are given
(parallel.expert=8) are kept, and the others worked out.

Arguments after the options are train.py's; a sequence has 4,096 tokens if no argument sets its length. gpu=h100 (a100,
rtx4090) with --tflops plans for such GPUs, else for the H200. The arithmetic is that of docs/parallelism.md, and as
good as the rates it is given: --tflops what one GPU does in a step (scripts/bench/step.py), --node-link and --network
what it sends (scripts/bench/allreduce.py).
"""

import argparse
import sys
from contextlib import suppress
from dataclasses import asdict, fields, replace
from itertools import product
from math import inf
from pathlib import Path

import torch

from models import DeepSeek
from precision import Plan
from precision.errors import UserError
from precision.hardware import Gpu
from trainer.config import Config, GpuChoice, load
from trainer.forecast.cost import RATES, Cost, Machine, fewest, layouts, ranked
from trainer.forecast.gpus import KNOWN
from trainer.forecast.memory import GIB
from trainer.forecast.preflight import check_sizes
from trainer.forecast.stages import stages_line
from trainer.launch.command_line import Parser, compose, guarded
from trainer.parallel.mesh import Degrees

AXES = [field.name for field in fields(Degrees)]
DEGREES = ("parallel", *(f"parallel.{axis}" for axis in AXES), "parallel.stages")
LENGTH, UNSAID = 4096, 128  # tokens of a sequence if only configs/train.yaml sets it, and its value there


def main() -> int:
    """Exit code, as train.py's."""
    return guarded(run)


def run() -> None:
    """Read the command line, forecast, print."""
    parser = Parser(__doc__)
    parser.add_argument("--gpus", type=_counts, required=True, help="GPUs in all; several: the fastest of each")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node (8)")
    parser.add_argument("--sequences", type=_counts, default=[8], help="a GPU and step (8); of several, the fastest")
    parser.add_argument("--memory", type=float, help="GiB of a GPU (that of gpu=)")
    parser.add_argument("--tflops", type=float, help="of one GPU in a step (469 in BF16, 611 in FP8: one H200)")
    parser.add_argument("--node-link", type=_rates, default=[350.0], help="GB/s of a GPU within its node (350)")
    parser.add_argument("--network", type=_rates, default=[45.0], help="GB/s of a GPU between nodes (45: 400 Gbit/s)")
    parser.add_argument("--rows", type=int, default=6, help="layouts to print (6)")
    options, rest = parser.parse_known_args()
    for name in ("per_node", "memory", "tflops", "rows"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')}={value:g}: set more than 0")
    per_node = options.per_node
    for gpus in options.gpus:
        if gpus > per_node and gpus % per_node:
            even = next(n for n in range(per_node, 0, -1) if gpus % n == 0)
            fix = f"set {gpus // per_node * per_node} or {-(-gpus // per_node) * per_node}, or --per-node={even}"
            raise UserError(f"--gpus={gpus}: torchrun starts as many on each node, and --per-node={per_node}; {fix}")
    given = dict(_given(word) for word in rest if word.lstrip("+").partition("=")[0] in DEGREES)
    rest = [word for word in rest if word.partition("=")[0] not in DEGREES]
    sys.argv = [sys.argv[0], *rest]
    jobs = compose(Path(__file__).resolve().parents[1] / "configs")
    if len(jobs) != 1:
        raise UserError("several values: a layout is planned for one config; leave -m out")
    config = load(jobs[0].tree)
    key, length = "trainer.sequence_length", min(LENGTH, config.model.max_position_embeddings)
    if config.trainer.sequence_length == UNSAID and not any(word.partition("=")[0] == key for word in rest):
        config = replace(config, trainer=replace(config.trainer, sequence_length=length))
        rest.append(f"{key}={length}")
    check_sizes(config)
    target = KNOWN[GpuChoice.h200 if config.gpu is GpuChoice.auto else config.gpu]
    memory = options.memory * GIB if options.memory else target.memory
    if options.tflops is None and target is not KNOWN[GpuChoice.h200]:
        fix = "measure it with scripts/bench/step.py, and give --tflops"
        raise UserError(f"gpu={config.gpu.value}: a step was measured on an H200 only; {fix}")
    plan = _plan(config, target.gpu)
    fp8 = any(row.recipe.is_fp8 for row in plan.gemms.values())
    flops = 1e12 * (options.tflops or RATES[fp8])
    machines = [
        Machine(gpus, per_node, memory, flops, 1e9 * link, 1e9 * network)
        for gpus, link, network in product(options.gpus, options.node_link, options.network)
    ]

    def fastest_first(machine: Machine) -> list[Cost]:
        return ranked(one for n in options.sequences for one in layouts(config, plan, machine, n, given))

    if len(machines) > 1:
        print(compared([(machine, next(iter(fastest_first(machine)), None)) for machine in machines]))
        return
    machine, found = machines[0], fastest_first(machines[0])
    if not found:
        enough = fewest(config, plan, machine)
        more = f"{enough} would do" if enough else "none are enough"
        free = f"leave out {' '.join(f'parallel.{axis}={size}' for axis, size in given.items())}, " if given else ""
        raise UserError(
            f"--gpus={machine.gpus}: no layout fits into {memory / GIB:g} GiB a GPU; {free}take more GPUs ({more}), "
            "or a shorter trainer.sequence_length"
        )
    best, seen = [], set()
    for one in found:  # of each choice of degrees the fastest
        if one.degrees not in seen:
            seen.add(one.degrees)
            best.append(one)
    print(table(best[: options.rows]))
    first = best[0]
    if first.degrees.pipeline > 1:
        print(f"\n{stages_line(_as_run(config, first), plan, first.degrees)}")
    print(f"\n{command(first, machine.gpus, per_node, rest)}")


def _given(word: str) -> tuple[str, int]:
    """parallel.expert=8 -> expert, 8."""
    axis, _, size = word.removeprefix("parallel.").partition("=")
    if axis not in AXES or not size.isdecimal() or int(size) < 1:
        raise UserError(f"{word}: the degrees are what is worked out here; leave it out, or set an axis to 1 or more")
    return axis, int(size)


def _counts(text: str) -> list[int]:
    """8, or 6,8,10 -> the numbers. ArgumentTypeError if one is not above 0."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: want a number above 0, or several: 6,8,10")
    return numbers


def _rates(text: str) -> list[float]:
    """45, or 12.5,45 -> the numbers. ArgumentTypeError if one is not above 0."""
    with suppress(ValueError):
        numbers = [float(part) for part in text.split(",")]
        if all(0 < number < inf for number in numbers):
            return numbers
    raise argparse.ArgumentTypeError(f"{text}: want a number above 0, or several: 12.5,45")


def _as_run(config: Config, c: Cost) -> Config:
    """With the batch of a layout."""
    size = c.microbatch * c.microbatches * c.degrees.data
    return replace(config, trainer=replace(config.trainer, microbatch_size=c.microbatch, global_batch_size=size))


def _plan(config: Config, gpu: Gpu | None) -> Plan:
    """As the run will have it on such GPUs."""
    config.model.validate()
    plan = Plan(config.precision, config.model.num_layers, gpu)
    with torch.device("meta"):
        DeepSeek(config.model, plan)
    return plan


HEAD = (
    " ".join(f"{axis:>{max(len(axis), 6)}}" for axis in AXES)
    + f" {'microbatch':>10} {'recompute':>9} {'GiB':>6} {'compute ms':>10} {'gather+reduce':>13} {'exchange':>10} "
    f"{'bubble':>6} {'exposed':>7} {'tokens/s/GPU':>12}"
)


def table(costs: list[Cost]) -> str:
    """One layout a line."""
    return "\n".join([HEAD, *map(line, costs)])


def compared(found: list[tuple[Machine, Cost | None]]) -> str:
    """One machine a line, with its layout."""
    lines = [f"{'GPUs':>5} {'node GB/s':>9} {'network GB/s':>12} {HEAD}"]
    for m, c in found:
        fits = "does not fit" if c is None else line(c)
        lines.append(f"{m.gpus:5} {m.node_link / 1e9:9g} {m.network / 1e9:12g} {fits}")
    return "\n".join(lines)


def line(c: Cost) -> str:
    """A layout, as `HEAD` names its columns."""
    degrees = " ".join(f"{getattr(c.degrees, axis):{max(len(axis), 6)}}" for axis in AXES)
    return (
        f"{degrees} {c.microbatch:10} {c.recompute.value:>9} {c.memory / GIB:6.1f} {1e3 * c.compute:10.1f} "
        f"{1e3 * c.hidden:13.1f} {1e3 * c.waiting:10.1f} {c.bubble:6.1%} {c.exposed:7.1%} {c.tokens_per_second:12,.0f}"
    )


def command(c: Cost, gpus: int, per_node: int, rest: list[str]) -> str:
    """What to type for a layout."""
    nodes = gpus // per_node
    start = f"torchrun --nproc_per_node={min(gpus, per_node)}"
    if nodes > 1:
        start = f"torchrun --nnodes={nodes} --nproc_per_node={per_node} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500"
    if gpus == 1:
        start = "python"
    own = {"trainer.microbatch_size", "trainer.global_batch_size", "recompute", "dry_run", "gpu"}
    kept = [word for word in rest if word.partition("=")[0] not in own]
    d = c.degrees
    degrees = [f"parallel.{axis}={size}" for axis, size in asdict(d).items() if size != 1]
    batch = [
        f"trainer.microbatch_size={c.microbatch}",
        f"trainer.global_batch_size={c.microbatch * c.microbatches * d.data}",
    ]
    again = [] if c.recompute.value == "none" else [f"recompute={c.recompute.value}"]
    return " ".join([start, "train.py", *kept, *degrees, *batch, *again])


if __name__ == "__main__":
    sys.exit(main())
