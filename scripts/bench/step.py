"""Time the whole training step of one recipe against another, in turn, in one process.

    python scripts/bench/step.py fp8_delayed                         deepseek_tiny, against bf16
    python scripts/bench/step.py fp8_block --against fp8_jit --steps 20 model=deepseek_300m trainer.microbatch_size=2

Step A, step B, step A, ...: forward, backward, verdict, clipping, AdamW, quantisation of the weights, everything
`train_step` does, on the same random tokens. Printed for each: median tokens per second, spread (10th to 90th
percentile), memory (state that stays, and the peak of a step above it), share of the blocks' GEMM FLOPs in FP8; then
the ratio of the medians, and what loading a batch of the configured data costs against a step.
"""

import argparse
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainer.cli import compose, guarded

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
WARM_UP = 3


def main() -> int:
    """Exit code, as train.py's."""
    return guarded(run)


def run() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--against", default="bf16", help="recipe to compare with (default: bf16)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each (default: 20)")
    parser.add_argument("overrides", nargs="*", help="config overrides, as for train.py")
    arguments = parser.parse_intermixed_args()
    sys.argv[1:] = arguments.overrides

    import torch

    contestants = [Contestant(name, arguments.overrides) for name in (arguments.recipe, arguments.against)]
    config = contestants[0].config
    shape = config.trainer.global_batch_size, config.trainer.sequence_length + 1
    torch.manual_seed(0)
    for step in range(WARM_UP + arguments.steps):
        tokens = torch.randint(config.model.vocab_size, shape)
        for contestant in contestants:
            contestant.step(step, tokens, timed=step >= WARM_UP)
    for contestant in contestants:
        print(contestant.report())
    a, b = (statistics.median(contestant.seconds) for contestant in contestants)
    print(
        f"{arguments.recipe} takes {a / b:.2f} times the step of {arguments.against} ({b / a:.2f} times its tokens/s)"
    )
    load = loading_seconds(config)
    print(f"loading a batch: {load * 1e3:.2f} ms, {load / b:.2%} of a step of {arguments.against}")


@dataclass
class Contestant:
    """A recipe's engine and its times."""

    recipe: str
    overrides: list[str]
    seconds: list[float] = field(default_factory=list)
    peak: int = 0

    def __post_init__(self) -> None:
        from trainer.build import build_engine, pick_device
        from trainer.config import load
        from trainer.metrics import state_bytes
        from trainer.preflight import check

        sys.argv[1:] = [f"+recipe={self.recipe}", *self.overrides]
        (job,) = compose(CONFIGS)
        self.config = load(job.tree)
        check(self.config)
        self.engine = build_engine(self.config, pick_device(self.config.trainer.device))
        self.state = state_bytes(self.engine.model, self.engine.optimizer.state_dict())

    def step(self, number: int, tokens, timed: bool) -> None:
        """One step; its time and peak memory count if `timed`."""
        import torch

        from trainer.trainer import train_step

        cuda = self.engine.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else reset_peak_resident()
        began = time.perf_counter()
        train_step(self.engine, number, tokens, self.config.trainer.microbatch_size)
        if cuda:
            torch.cuda.synchronize()
        if timed:
            self.seconds.append(time.perf_counter() - began)
            after = torch.cuda.max_memory_allocated() if cuda else peak_resident()
            self.peak = max(self.peak, after - before)

    def report(self) -> str:
        """A line of results."""
        tokens = self.config.trainer.global_batch_size * self.config.trainer.sequence_length
        deciles = statistics.quantiles(self.seconds, n=10)
        median = statistics.median(self.seconds)
        share = self.engine.plan.blocks_fp8_share
        return (
            f"{self.recipe:<12} {tokens / median:10,.0f} tokens/s "
            f"({tokens / deciles[-1]:,.0f} to {tokens / deciles[0]:,.0f}), step {median * 1e3:.0f} ms, "
            f"state {self.state / 2**20:,.0f} MiB, step's peak above it {self.peak / 2**20:,.0f} MiB, "
            f"{share:.0%} of the blocks' GEMM FLOPs in FP8"
        )


def reset_peak_resident() -> int:
    """Start a new peak of resident memory (Linux); bytes resident now."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
        return status_bytes("VmRSS")
    return 0


def peak_resident() -> int:
    """Largest resident memory since the reset, bytes; without /proc of the whole process."""
    if Path("/proc/self/status").exists():
        return status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def status_bytes(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def loading_seconds(config) -> float:
    """Median time of one batch from the loader."""
    from trainer.data import Loader
    from trainer.data.bars import prepare_with_bars

    data = prepare_with_bars(config.data, config.model.vocab_size)
    t = config.trainer
    loader = Loader(data.train, t.sequence_length, t.global_batch_size, t.seed)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        loader.next()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
