"""Measures how many steps before divergence kurtosis warned, against the run's twin in BF16.

    python scripts/kurtosis_lead.py runs/fp8 --twin runs/bf16

The twin is the same run in BF16: same model, data, seed and learning rate; a note names other settings that differ. It
reads metrics.jsonl of both and events.jsonl, and prints the step of each sign, and its lead over the divergence in
steps.

    divergence       the first step of a loss (loss/lm) that is 0.5 nats above its lowest over 100 steps and not back
                     within 500, or of 10 skipped steps in a row, as far as logged lines show
    gradient norm    the first line whose norm is 4 times the median of the 20 lines before
    kurtosis_power   the alert of the run, if any: growth faster than linear (docs/health.md)
    twin             FOG's criterion (arXiv 2505.20524): kurtosis leaves the trend of BF16, here --ratio times the
                     twin's at equal steps in --lines lines in a row; by place, and by both definitions

An alert of a run that did not diverge is a false alarm.
"""

import math
import statistics
import sys
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from precision.errors import UserError
from trainer.config_diff import changes
from trainer.files import parse_lines
from trainer.launch.command_line import Parser, guarded
from trainer.run.names import CONFIG, EVENTS, METRICS

RISE, OVER, BACK, SKIPPED = 0.5, 100, 500, 10
NORM, LINES = 4.0, 20
KINDS = tuple(f"act/kurtosis_{place}{kind}" for kind in ("", "_sequence") for place in ("qkv", "ffn", "block"))
Series = dict[int, float]


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--twin", type=Path, required=True, metavar="RUN", help="the same run in BF16")
    parser.add_argument("--ratio", type=float, default=2.0, metavar="X", help="kurtosis over the twin's (2)")
    parser.add_argument("--lines", type=int, default=3, metavar="N", help="lines in a row (3)")
    arguments = parser.parse_args()
    if not arguments.ratio > 1 or arguments.lines < 1:
        given = f"--ratio {arguments.ratio} --lines {arguments.lines}"
        raise UserError(f"{given}: give a ratio above 1 and 1 or more lines")
    ours, theirs = series(arguments.run), series(arguments.twin)
    if different := differences(arguments.twin, arguments.run):
        print(f"note: the twin is another run: {different}", file=sys.stderr)
    end = divergence(ours)
    print(f"divergence           {'none' if end is None else f'step {end}'}")
    spike = norm_spike(ours.get("optim/grad_norm", {}))
    power = next((e["step"] for e in entries(arguments.run, EVENTS) if e.get("rule") == "kurtosis_power"), None)
    signs: dict[str, int | str | None] = {"gradient norm": spike, "kurtosis_power": power}
    for kind in KINDS:
        found = departure(ours.get(kind, {}), theirs.get(kind, {}), arguments.ratio, arguments.lines)
        both = ours.get(kind, {}).keys() & theirs.get(kind, {}).keys()
        signs[f"twin {kind.removeprefix('act/kurtosis_')}"] = found if both else "not logged in both"
    if not any(ours.get(kind, {}).keys() & theirs.get(kind, {}).keys() for kind in KINDS):
        why = f"no step with kurtosis that {arguments.run} has too"
        raise UserError(f"{arguments.twin}: {why}; log both at equal steps")
    for name, step in signs.items():
        print(f"{name:<20} {verdict(step, end)}")


def differences(twin: Path, run: Path) -> str:
    """Return settings of the twin that differ from the run's, beside precision and what does not train."""
    try:
        theirs, ours = ((folder / CONFIG).read_bytes() for folder in (twin, run))
        return changes(theirs, ours, but=("precision", "run", "logging", "checkpoint", "health", "eval"))
    except (OSError, yaml.YAMLError):  # of folders without a config, only the metrics count
        return ""


def verdict(step: int | str | None, end: int | None) -> str:
    """Return the lead of a sign in words."""
    if isinstance(step, str):
        return step
    if step is None:
        return "none"
    if end is None:
        return f"step {step}: a false alarm, as far as the run goes"
    apart = abs(end - step)
    return f"step {step}: {apart} step{'s' * (apart != 1)} {'before' if step <= end else 'late'}"


def entries(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of a run. Raises UserError without one."""
    path = folder / name
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the folder of a run, as runs/NAME")
    yield from parse_lines(path)


def series(folder: Path) -> dict[str, Series]:
    """Return step -> value of each metric of a run."""
    found: dict[str, Series] = {}
    for entry in entries(folder, METRICS):
        for key, value in entry.items():
            if key == "loss/lm" and value is None:  # NaN in metrics.jsonl
                value = math.inf
            if isinstance(value, int | float):
                found.setdefault(key, {})[entry["step"]] = float(value)
    return found


def divergence(run: dict[str, Series]) -> int | None:
    """Return the step of divergence; see the module docstring."""
    loss = sorted(run.get("loss/lm", {}).items())
    steps, values = [step for step, _ in loss], [value for _, value in loss]
    for i, (step, value) in enumerate(loss):
        lowest = min(values[bisect_right(steps, step - OVER) : i + 1])
        later = values[i : bisect_right(steps, step + BACK)]
        known = value == math.inf or loss[-1][0] >= step + BACK  # else the run ends before it is certain
        if known and value > lowest + RISE and min(later) > lowest + RISE:
            return step
    skipped = sorted(run.get("recovery/skipped_steps", {}).items())
    row = 0
    for (before, count), (step, more) in pairwise(skipped):
        lost = max(more - count, 0)  # a rewind lowers the count
        row = lost + (row if lost == step - before else 0)
        if row >= SKIPPED:
            return step - int(row) + 1
    return None


def norm_spike(norms: Series) -> int | None:
    """Return the first line whose gradient norm is far above those before."""
    past: list[float] = []
    for step, value in sorted(norms.items()):
        if len(past) >= LINES and value > NORM * statistics.median(past[-LINES:]):
            return step
        past.append(value)
    return None


def departure(ours: Series, twin: Series, ratio: float, lines: int) -> int | None:
    """Return the step at which kurtosis is `ratio` times the twin's for the `lines`-th time in a row."""
    row = 0
    for step in sorted(ours.keys() & twin.keys()):
        row = row + 1 if ours[step] > ratio * twin[step] else 0
        if row == lines:
            return step
    return None


if __name__ == "__main__":
    sys.exit(guarded(run))
