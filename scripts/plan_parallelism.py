"""Choose degrees of parallelism: forecasts memory and step time of every layout that fits, and prints the command.

    python scripts/plan_parallelism.py --gpus 8 model=moonlight_16b +recipe=fp8_delayed trainer.sequence_length=4096
    python scripts/plan_parallelism.py --gpus 256 model=deepseek_v3 +recipe=fp8_block
    python scripts/plan_parallelism.py --gpus 4 --sequences 4,6,8,10,12 model=moonlight_16b trainer.sequence_length=4096
    python scripts/plan_parallelism.py --gpus 64,256 --network 45,12.5 model=deepseek_v2_lite parallel.pipeline=1

Several --gpus, --node-link or --network: the fastest layout for each machine, a line each. Given degrees
(parallel.expert=8) are fixed, and the others are computed.

Arguments after the options are train.py's; a sequence has 4,096 tokens if no argument sets its length. Of a run with
phases (trainer.phases) the steps that take most memory are planned. gpu=h100 (a100, rtx4090) with --tflops plans for
such GPUs; the default is the H200. docs/parallelism.md has the arithmetic. Its accuracy depends on the given rates:
--tflops of one GPU in a step (scripts/bench/step.py), --node-link and --network of its messages
(scripts/bench/allreduce.py).
"""

import argparse
import sys
from contextlib import suppress
from math import inf
from pathlib import Path

from precision.errors import UserError
from trainer.launch.command_line import Parser, guarded
from trainer.launch.composition import compose

MOST = 1 << 20  # GPUs, or sequences of one


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--gpus", type=_counts, required=True, help="GPUs in all; several: the fastest of each")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node (8)")
    parser.add_argument(
        "--sequences", type=_counts, help="a GPU and step (of the batch that is given, or 8); of several, the fastest"
    )
    parser.add_argument("--memory", type=float, help="GiB of a GPU (that of gpu=)")
    parser.add_argument("--tflops", type=float, help="of one GPU in a step (469 in BF16, 611 in FP8: one H200)")
    parser.add_argument("--node-link", type=_rates, default=[350.0], help="GB/s of a GPU within its node (350)")
    parser.add_argument("--network", type=_rates, default=[45.0], help="GB/s of a GPU between nodes (45: 400 Gbit/s)")
    parser.add_argument("--rows", type=int, default=6, help="layouts to print (6)")
    options, rest = parser.parse_known_args()
    for name in ("per_node", "memory", "tflops", "rows"):
        value = getattr(options, name)
        if value is not None and not 0 < value < inf:
            raise UserError(f"--{name.replace('_', '-')}={value:g}: set a number above 0")
    per_node = options.per_node
    for gpus in options.gpus:
        if gpus > per_node and gpus % per_node:
            even = next(n for n in range(per_node, 0, -1) if gpus % n == 0)
            fix = f"set {gpus // per_node * per_node} or {-(-gpus // per_node) * per_node}, or --per-node={even}"
            raise UserError(f"--gpus={gpus}: torchrun starts as many on each node, and --per-node={per_node}; {fix}")
    from trainer.config import load
    from trainer.forecast.planner import degrees_given, planned
    from trainer.run.own_settings import own_settings

    rest, given = degrees_given(rest)
    sys.argv = [sys.argv[0], *rest]
    jobs = compose(Path(__file__).resolve().parents[1] / "configs", own=own_settings)
    if len(jobs) != 1:
        raise UserError("several values: a layout is planned for one config; leave -m out")
    print(planned(load(jobs[0].tree), options, given, rest, jobs[0].settings is not None))


def _counts(text: str) -> list[int]:
    """Parse 8, or 6,8,10. Raises ArgumentTypeError if a number is not above 0."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: want a number above 0, or several: 6,8,10")
    if max(numbers) > MOST:  # layouts of more take minutes to count
        raise argparse.ArgumentTypeError(f"{max(numbers)}: want at most {MOST}")
    return numbers


def _rates(text: str) -> list[float]:
    """Parse 45, or 12.5,45. Raises ArgumentTypeError if a number is not above 0."""
    with suppress(ValueError):
        numbers = [float(part) for part in text.split(",")]
        if all(0 < number < inf for number in numbers):
            return numbers
    raise argparse.ArgumentTypeError(f"{text}: want a number above 0, or several: 12.5,45")


if __name__ == "__main__":
    sys.exit(guarded(run))
