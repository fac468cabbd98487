"""The cost of health metrics: a logged line, sampling of a step, a BF16 shadow, against the step.

    python scripts/bench/health.py                                    deepseek_tiny, fp8_delayed
    python scripts/bench/health.py fp8_block --steps 20 model=deepseek_300m trainer.microbatch_size=2 logging.every=10
    python scripts/bench/health.py fp8_delayed model=moonlight_16b model.num_layers=5 model.vocab_size=32768 \
        trainer.sequence_length=4096 trainer.global_batch_size=8 trainer.microbatch_size=8

Step, sampled step, line, shadow, step, ...: each waited for, in one process, medians. Sampling costs
the difference of a sampled step and a plain one. The shares of training time follow from `logging.every`,
`health.every` and `health.shadow_every`; a shadow that is off (0) is shown with its cost and not counted. The line is
the extra work of a logged step: norms, update ratio, statistics of the arena and the experts, sampled statistics, the
copy, and writing the details.
"""

import statistics
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import frame
import measure
import torch

from precision.errors import UserError
from trainer.launch.command_line import Parser, guarded

if TYPE_CHECKING:
    from trainer.health.health import Health
    from trainer.step.train_step import StepResult

WARM_UP = 3


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "words", nargs="*", default=[], metavar="RECIPE | KEY=VALUE", help="recipe (default: fp8_delayed), overrides"
    )
    parser.add_argument("--steps", type=int, default=10, help="rounds that are timed (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    options = parser.parse_intermixed_args()
    recipes = [word for word in options.words if "=" not in word] or ["fp8_delayed"]
    if len(recipes) > 1:
        raise UserError(f"{' '.join(recipes)}: one recipe at a time; name one")
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: nothing would be timed; set 1 or more")
    facts = measure.header()
    times = rounds(recipes[0], [word for word in options.words if "=" in word], options.steps)
    measure.write_json(options.json, facts, times)


def rounds(recipe: str, overrides: list[str], steps: int) -> list[dict]:
    """Time everything in turn, print the table, and return the measurements."""
    from trainer.config.timeline import Timeline
    from trainer.forecast.preflight import check
    from trainer.health.health import Health
    from trainer.launch.device import pick_device
    from trainer.sinks.jsonl import JsonLines
    from trainer.step.engine import build_engine
    from trainer.step.train_step import train_step

    config = frame.composed([f"+recipe={recipe}", "cuda_graph=false", *overrides])
    plan = check(config)
    t, watch = config.trainer, config.health
    engine = build_engine(config, pick_device(t.device))
    has_fp8 = any(row.recipe.is_fp8 for row in plan.gemms.values())
    logged = Timeline(t).steps_of(config.logging.every)
    every = {"line": logged, "sampling": logged if watch.every is None else watch.every}
    every |= {"shadow": watch.shadow_every} if has_fp8 else {}
    with tempfile.TemporaryDirectory() as folder:
        file = JsonLines(Path(folder) / "tensors.jsonl", measure.say)

        def health(every: int, shadow: int) -> Health:
            asked = replace(watch, every=every, shadow_every=shadow)
            return Health(asked, engine, file.write, t.global_batch_size, t.microbatch_size)

        sampler, shadows = health(1, 0), health(0, 1)
        measured = ["step", "sampled", "line", *(["shadow"] if has_fp8 else [])]
        seconds: dict[str, list[float]] = {name: [] for name in measured}
        torch.manual_seed(0)
        for step in range(WARM_UP + steps):
            tokens = torch.randint(config.model.vocab_size, (t.global_batch_size, t.sequence_length + 1))
            train = partial(train_step, engine, step, tokens, t.microbatch_size)
            took: dict[str, float] = {}
            if has_fp8:
                took["shadow"], _ = measure.clock(partial(shadows.before, step, tokens))
            took["step"], _ = measure.clock(train)
            with sampler.inside(step, logged=True):
                took["sampled"], result = measure.clock(train)
            took["line"], _ = measure.clock(partial(line, sampler, step, result))
            if step >= WARM_UP:
                for name in seconds:
                    seconds[name].append(took[name])
        file.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    medians["sampling"] = medians["sampled"] - medians["step"]
    share = {name: medians[name] / n / medians["step"] if n else 0.0 for name, n in every.items()}
    rows = [{"what": "step", "ms": f"{medians['step'] * 1e3:.1f}", "in steps": "1.00"}]
    for name, n in every.items():
        per_step = f"{medians[name] / medians['step']:.2f}"
        row = {"what": name, "ms": f"{medians[name] * 1e3:.1f}", "in steps": per_step, "every": str(n) if n else "off"}
        rows.append(row | {"share of training": f"{share[name]:.2%}"})
    measure.say(measure.table(rows))
    measure.say(f"{recipe}: health takes {sum(share.values()):.2%} of the time of its steps (target: below 1 %)")
    return [{"name": name, "seconds": values, "every": every.get(name)} for name, values in seconds.items()]


def line(health: "Health", step: int, result: "StepResult") -> None:
    """Do the extra work of a logged step."""
    from trainer.step.metrics import copy_to_host

    health.report(step, copy_to_host(health.collect(result.load, result.verdict.ok)))


if __name__ == "__main__":
    sys.exit(guarded(run))
