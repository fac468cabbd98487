"""Time the whole training step of recipes against another, in turn, in one process.

    python scripts/bench/step.py fp8_delayed                         deepseek_tiny, against bf16
    python scripts/bench/step.py fp8_block --against fp8_jit --steps 20 model=deepseek_300m trainer.microbatch_size=2
    python scripts/bench/step.py fp8_delayed fp8_jit fp8_block model=moonlight_16b model.num_layers=5 \
        model.vocab_size=32768 trainer.sequence_length=4096 trainer.global_batch_size=8 trainer.microbatch_size=8
    python scripts/bench/step.py fp8_delayed --against fp8_delayed --accumulation fp32 fast    both sums of FP8 products
    python scripts/bench/step.py fp8_delayed fp8_delayed+precision.table.swiglu=fp8     a recipe with own overrides

Step A, step B, step A, ...: forward, backward, verdict, clipping, AdamW, quantisation of the weights, everything
`train_step` does, on the same random tokens. In the table:

    tokens/s     short: of the median step, each waited for; 10th to 90th percentile in brackets
    sustained    consecutive steps for `--hold` seconds after a warm-up of equal length, none waited for; watts, tokens
                 per joule
    limit        milliseconds of the model's GEMMs at the rates that this process measured for their shapes (FP8 where
                 the plan has it, casts not counted), and of the attention core, without anything else; and the share
                 of it that is reached, short / sustained
    state, peak  memory that stays between steps, and a step's peak above it

Then it prints the ratios to `--against`, and the time to load a batch of the configured data relative to a step, and to
a step of 50,000 tokens/s. With trainer.document_masking=true the tokens are documents of `--document` tokens.
Contestants share the GPU's memory; if that is too small, `--apart` builds, measures and frees one after the other. CUDA
graphs, which reserve memory, are off unless the command sets them: `--apart ... cuda_graph=true`.
"""

import argparse
import resource
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import frame
import layers
import limits
import measure
import packed
import torch
from measure import Timing, both, show

from precision.errors import RunError, UserError
from trainer.launch.command_line import Parser, guarded
from trainer.step.microbatch import GraphedMicrobatch

WARM_UP = 3
MIB = 2**20
END = 0  # the token that documents begin with, if attention stays within them
GOAL = 50_000  # tokens a second and GPU


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RECIPE | KEY=VALUE",
        help="recipes (RECIPE+KEY=VALUE: with overrides of their own), and overrides as for train.py",
    )
    parser.add_argument("--against", default="bf16", help="recipe to compare with (default: bf16)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each (default: 20)")
    parser.add_argument("--hold", type=float, help="sustained: seconds; 0: leave it out (default: 3, on a CPU 0)")
    parser.add_argument("--rounds", type=int, default=2, help="sustained: rounds in turn (default: 2)")
    parser.add_argument("--apart", action="store_true", help="one contestant in memory at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    layers.add_accumulation(parser)
    packed.add_arguments(parser)
    options = parser.parse_intermixed_args()
    packed.check(options)
    recipes = [word for word in options.words if "=" not in word.partition("+")[0]]
    overrides = [word for word in options.words if word not in recipes]
    if not recipes:
        raise UserError(f"{' '.join(options.words)}: no recipe to measure; name one: fp8_delayed")
    if options.steps < 2:
        raise UserError(f"--steps {options.steps}: a spread takes at least 2")
    from trainer.launch.device import pick_device

    facts = measure.header()
    if options.hold is None:
        options.hold = 3.0 if torch.cuda.is_available() else 0.0
    contestants = [
        Contestant(name, overrides, accumulation)
        for name in dict.fromkeys([*(name for name in recipes if name != options.against), options.against])
        for accumulation in (options.accumulation if "fp8" in name else options.accumulation[-1:])
    ]
    limit = limits.StepLimit()
    for contestant in contestants:
        if pick_device(contestant.config.trainer.device).type == measure.device().type:
            contestant.limit = limit.seconds(contestant.config, contestant.plan)
    measure.release()
    for together in [[c] for c in contestants] if options.apart else [contestants]:
        try:
            race(together, options)
        except torch.OutOfMemoryError:
            if len(together) == 1:
                raise
            names = ", ".join(contestant.recipe for contestant in together)
            raise RunError(f"out of GPU memory with {names} in it; add --apart: one at a time") from None
        if options.apart:
            measure.say(measure.table([contestant.row() for contestant in together]))
    base = contestants[-1]
    measure.say(measure.table([contestant.row() for contestant in contestants]))
    for contestant in contestants[:-1]:
        measure.say(contestant.against(base))
    load = loading_seconds(base.config)
    step = statistics.median(base.seconds)
    line = f"loading a batch: {load * 1e3:.2f} ms, {load / step:.2%} of a step of {base.recipe}"
    measure.say(f"{line}, {base.tokens / load:,.0f} tokens/s ({load * GOAL / base.tokens:.2%} of {GOAL:,} tokens/s)")
    measure.write_json(options.json, facts, [contestant.record() for contestant in contestants])


def race(contestants: "list[Contestant]", options: argparse.Namespace) -> None:
    """Build, time and free contestants, each step in turn."""
    for contestant in contestants:
        contestant.build()
    shape = contestants[0].config.trainer.global_batch_size, contestants[0].config.trainer.sequence_length + 1
    begins = packed.starts(*shape, options.document)
    torch.manual_seed(0)
    for step in range(WARM_UP + options.steps):
        tokens = torch.randint(END + 1, contestants[0].config.model.vocab_size, shape).masked_fill_(begins, END)
        for contestant in contestants:
            contestant.step(step, tokens, timed=step >= WARM_UP)
    meter = measure.Meter()
    for _ in range(options.rounds if options.hold > 0 else 0):
        for contestant in contestants:
            contestant.hold(tokens, options.hold, meter)
    for contestant in contestants:
        contestant.free()
    torch.compiler.reset()
    measure.release()


class Contestant:
    """A recipe's engine and its measurements in bytes, seconds, watts."""

    def __init__(self, recipe: str, overrides: list[str], accumulation: str):
        from trainer.forecast.preflight import check

        fast = ["precision.accumulation=fast"] if accumulation == "fast" and "fp8" in recipe else []
        self.recipe = recipe + layers.FAST if fast else recipe
        name, *own = recipe.split("+")
        self.config = frame.composed([f"+recipe={name}", "cuda_graph=false", *fast, *overrides, *own])
        self.plan = check(self.config)
        self.limit: float | None = None
        self.engine: Any = None
        self.state = self.peak = 0
        self.seconds: list[float] = []
        self.sustained: dict[str, list[float]] = {}

    def build(self) -> None:
        """Build model, optimizer and engine on the device."""
        from trainer.launch.device import pick_device
        from trainer.step.engine import build_engine
        from trainer.step.metrics import state_bytes

        self.engine = build_engine(self.config, pick_device(self.config.trainer.device))
        self.engine.model.end_of_text = END if self.config.trainer.document_masking else None
        self.state = state_bytes(self.engine.model, self.engine.optimizer.state_dict())

    def free(self) -> None:
        """Free it. Reports skipped steps, which are not whole steps."""
        skipped = int(self.engine.guard.skipped)
        if skipped:
            measure.say(
                f"{self.recipe}: {skipped} steps were not finite and changed nothing; its times are no steps' times"
            )
        self.engine = None

    def step(self, number: int, tokens: torch.Tensor, timed: bool) -> None:
        """Run one step; its time and peak memory count if `timed`."""
        cuda = self.engine.device.type == "cuda"
        measure.synchronize()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else reset_peak_resident()
        began = time.perf_counter()
        self._train(number, tokens)
        measure.synchronize()
        if timed:
            self.seconds.append(time.perf_counter() - began)
        # a graph takes its memory while it is recorded
        if timed or isinstance(self.engine.microbatch, GraphedMicrobatch):
            after = torch.cuda.max_memory_allocated() if cuda else peak_resident()
            self.peak = max(self.peak, after - before)

    def hold(self, tokens: torch.Tensor, seconds: float, meter: measure.Meter) -> None:
        """Run steps in a row without waiting. The tokens are already on the device: a copy from the host would wait."""
        tokens = tokens.to(self.engine.device)
        number = WARM_UP + len(self.seconds)
        unit = statistics.median(self.seconds)
        for key, value in measure.sustained(lambda: self._train(number, tokens), unit, seconds, meter).items():
            if value is not None:
                self.sustained.setdefault(key, []).append(value)

    def _train(self, number: int, tokens: torch.Tensor) -> None:
        from trainer.step.train_step import train_step

        train_step(self.engine, number, tokens, self.config.trainer.microbatch_size)

    @property
    def tokens(self) -> int:
        return self.config.trainer.global_batch_size * self.config.trainer.sequence_length

    @property
    def timing(self) -> Timing:
        """Return medians, as the other benches do."""
        medians = {key: statistics.median(values) for key, values in self.sustained.items()}
        timing = Timing(self.recipe, "step", statistics.median(self.seconds))
        for key, value in medians.items():
            setattr(timing, key, value)
        return timing

    @property
    def tokens_per_joule(self) -> float | None:
        """Tokens per joule under sustained load; None without an energy meter."""
        return None if self.timing.joules is None else self.tokens / self.timing.joules

    def row(self) -> dict[str, str]:
        timing, deciles = self.timing, statistics.quantiles(self.seconds, n=10, method="inclusive")
        limit = None if self.limit is None else Timing("limit", "", self.limit, self.limit)
        return {
            "recipe": self.recipe,
            "tokens/s": f"{self.tokens / timing.short:,.0f} "
            f"({self.tokens / deciles[-1]:,.0f} to {self.tokens / deciles[0]:,.0f})",
            "ms": show(timing.short, ".1f", 1e3),
            "sustained tokens/s": show(measure.ratio(self.tokens, timing.sustained), ",.0f"),
            "ms ": show(timing.sustained, ".1f", 1e3),
            "W": show(timing.watts, ".0f"),
            "tokens/J": show(self.tokens_per_joule, ".4g"),
            "limit ms": show(self.limit, ".1f", 1e3),
            "of limit": measure.share(limit, timing),
            "state MiB": show(self.state, ",.0f", 1 / MIB),
            "peak above": show(self.peak, ",.0f", 1 / MIB),
            "both": show(self.state + self.peak, ",.0f", 1 / MIB),
            "FP8 of blocks": f"{self.plan.blocks_fp8_share:.0%}",
            "of model": f"{self.plan.fp8_share:.0%}",
        }

    def against(self, base: "Contestant") -> str:
        """Return the ratios to another contestant, in words."""
        a, b = self.timing, base.timing
        line = f"{self.recipe} takes {a.short / b.short:.2f} times the step of {base.recipe}"
        line += f" ({both(b, a)} times its tokens/s, short / sustained"
        ours, theirs = self.tokens_per_joule, base.tokens_per_joule
        line += f"; {ours / theirs:.2f} times its tokens per joule)" if ours and theirs else ")"
        return f"{line}; {(self.state + self.peak) / (base.state + base.peak):.2f} times its memory"

    def record(self) -> dict[str, Any]:
        return {
            **asdict(self.timing),
            "rounds": {"short": self.seconds, **self.sustained},
            **{key: getattr(self, key) for key in ("tokens", "tokens_per_joule", "limit", "state", "peak")},
            "fp8_share": self.plan.fp8_share,
            "blocks_fp8_share": self.plan.blocks_fp8_share,
        }


def reset_peak_resident() -> int:
    """Reset the peak of resident memory (Linux). Returns the bytes resident now."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
        return status_bytes("VmRSS")
    return 0


def peak_resident() -> int:
    """Return the peak resident memory since the reset, bytes; without /proc that of the whole process."""
    if Path("/proc/self/status").exists():
        return status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def status_bytes(key: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def loading_seconds(config) -> float:
    """Return the median time of one batch from the loader."""
    from trainer.config.timeline import Timeline
    from trainer.data import Loader, prepare
    from trainer.data.progress_bars import bars

    with bars() as show:
        data = prepare(config.data, config.model.vocab_size, show)
    loader = Loader(data.train, Timeline(config.trainer).segments[:1], config.trainer.seed)
    return statistics.median(measure.clock(loader.next)[0] for _ in range(50))


if __name__ == "__main__":
    sys.exit(guarded(run))
