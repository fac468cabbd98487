"""Compare runs that learned the same thing in different ways: a table, and loss curves with their differences as PNG.

    python scripts/compare_runs.py runs/bf16 runs/fp8_delayed runs/fp8_jit            against the first
    python scripts/compare_runs.py runs/bf16 runs/bf16_seed2 runs/fp8_block --markdown --out compare

Runs may be finished or still running. They must have the same model and the same data in the same order, or their
differences would be meaningless. One exception is useful: a run that differs from another only in its seed shows how
much of a gap is chance, and is called noise. Below the table it lists the runs that started from weights of others, and
those that resumed with other settings.

In the table: the last validation loss, in nats per token; its difference to the first run; mean training loss over the
last steps; median tokens per second; peak memory; skipped steps. If power was metered (gpu/ keys), also the medians of
watts, tokens per joule and joules per token, and the difference of the latter to the first run: of all the job's GPUs,
without the rest of the machines.

`--out` gets `loss.png` (moving means of the training loss, and validation loss as marks) and `difference.png` (the same
against the first run, in percent; for another seed only the validation loss, and the gap between two seeds at the end
is shaded).
"""

import importlib.util
import io
import math
import shlex
import statistics
import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from precision.errors import UserError, counted
from trainer.config.data import TOKENIZER
from trainer.config.timeline import steps_of_tree
from trainer.config_diff import changed_keys, configs_before, differ, flat, read_yaml, shapes_of
from trainer.files import parse_lines, replace_file, script
from trainer.forecast.words import aligned
from trainer.health.dashboard.decimate import moving_mean
from trainer.health.dashboard.page import distinct
from trainer.health.dashboard.summary import typical
from trainer.launch.command_line import Parser, guarded
from trainer.run.names import CONFIG, METRICS

# sections that change no number of a run
NO_MATTER = {"run", "logging", "dry_run", "gpu", "force_memory", "checkpoint", "health"}
PHASES, REWINDS = "trainer.phases", "recovery/rewinds"
PLACES = {"data.path", "data.tokenizer", "data.mix"}  # absolute paths, as a run keeps them
TRAIN, VALIDATION = "loss/lm", "loss/validation"
WATTS, JOULES = "gpu/power_watts", "gpu/joules_per_token"
SLOWED = ("gpu/throttled_thermal", "gpu/throttled_hardware")
# of Okabe and Ito: for colour-blind readers
COLOURS = "#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
DASHES = ("-", "--", ":", "-.")  # for readers who see no colours
MARKERS = "os^Dv"


@dataclass
class Run:
    """A run folder as read. series: step -> value, by metric; config: flat, by dotted key, as the run last resumed.

    origin: the run that gave its first weights, None for random ones. changed: step -> keys that changed when it
    resumed from there, with both values. is_noise: it only shows the effect of chance: its seed is not the first run's.
    """

    path: Path
    config: dict[str, Any]
    series: dict[str, dict[int, float]]
    origin: str | None
    changed: dict[int, str]
    label: str = ""
    is_noise: bool = False

    @property
    def recipe(self) -> str:
        return str(self.config.get("precision.name", "?"))

    @property
    def seed(self) -> Any:
        return self.config.get("trainer.seed")

    @property
    def tokenizer(self) -> bytes:
        """Its tokenizer file, which usually identifies its text, too."""
        path = self.path / TOKENIZER
        return path.read_bytes() if path.is_file() else b""

    @cached_property
    def last_step(self) -> int:
        return max(step for values in self.series.values() for step in values)

    def last(self, key: str = VALIDATION) -> float | None:
        """Return the last value of a metric."""
        values = self.series.get(key, {})
        return values[max(values)] if values else None

    def typical(self, key: str) -> float | None:
        """Return a metric's `typical` value."""
        return typical(list(self.series.get(key, {}).values()))

    def differs_in(self, other: "Run") -> set[str]:
        """Return the keys of the config that matter and differ."""
        keys = {key for key in self.config | other.config if key.partition(".")[0] not in NO_MATTER}
        different = {key for key in keys if differ(self.config.get(key), other.config.get(key))}
        if self.tokenizer == other.tokenizer:  # runs of two machines have the same data in two places
            different -= {key for key in PLACES if names(self.config.get(key)) == names(other.config.get(key))}
        return different


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder; the first is the measure")
    parser.add_argument("--out", type=Path, default=Path("compare"), help="folder for the PNGs (default: compare)")
    parser.add_argument("--last", type=int, default=50, metavar="N", help="steps in the mean training loss (50)")
    parser.add_argument("--smooth", type=int, metavar="N", help="steps in a moving mean (default: a 30th of the run)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--no-plots", action="store_true", help="only the table; needs no matplotlib")
    arguments = parser.parse_args()
    if not arguments.no_plots and importlib.util.find_spec("matplotlib") is None:
        raise UserError("matplotlib is missing: pip install 'octet[plots]', or --no-plots for the table alone")
    for name in ("last", "smooth"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            raise UserError(f"--{name} {given}: a number of steps; give 1 or more")

    if len({path.resolve() for path in arguments.runs}) < len(arguments.runs):
        raise UserError(f"{' '.join(map(str, arguments.runs))}: a run is named twice; name each once")
    runs = [read_run(path) for path in arguments.runs]
    if len(arguments.runs) == 1:
        one = arguments.runs[0]
        raise UserError(
            f"{one}: one run has nothing to be compared to; name two or more, or see its curves with "
            f"python {script('scripts/dashboard.py')} {shlex.quote(str(one))}"
        )
    check_comparable(runs)
    name_runs(runs)
    print(table(runs, arguments.last, arguments.markdown))
    for line in remarks(runs):
        print(f"\n{line}" if arguments.markdown else line)
    if not arguments.no_plots:
        smooth = arguments.smooth or max(runs[0].last_step // 30, 1)
        for path in draw(runs, smooth, arguments.out):
            print(path)


def read_run(path: Path) -> Run:
    """Read a run folder. Incomplete lines are skipped."""
    if not (path / METRICS).is_file() or not (path / CONFIG).is_file():
        lacks = f"no {METRICS if (path / CONFIG).is_file() else CONFIG} in it" if path.is_dir() else "no such folder"
        raise UserError(f"{path}: {lacks}; give the folder of a run that has begun, as runs/NAME")
    series: dict[str, dict[int, float]] = {}
    has_loss, before_it = False, 0
    for values in parse_lines(path / METRICS):
        has_loss |= TRAIN in values
        step = values.pop("step")
        if step < before_it:  # the run rewound: lines of later steps are no longer valid
            series = {key: {at: old for at, old in curve.items() if at < step} for key, curve in series.items()}
        before_it = step
        for key, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                series.setdefault(key, {})[step] = value
    if not series.get(TRAIN):
        state, fix = ("finite", "leave the run out") if has_loss else ("logged yet", "wait for the first logged step")
        raise UserError(f"{path}: no {TRAIN} in {METRICS} is {state}; {fix}")
    trees: dict[int, dict[str, Any]] = {}  # by the last step that each was in force for; the present one last
    for step, config in (configs_before(path) | {-1: path / CONFIG}).items():
        try:
            trees[step] = read_yaml(config.read_bytes())
        except yaml.YAMLError:
            if step == -1:  # another one was put aside by a resume, which used a checkpoint's
                raise UserError(f"{config}: is damaged (not YAML); compare other runs") from None
    changed = {n: changed_keys(*pair, but=NO_MATTER) for n, pair in zip(trees, pairwise(trees.values()), strict=False)}
    origin = flat(next(iter(trees.values()))).get("run.init_from")
    return Run(path, flat(trees[-1]), series, origin, {step: keys for step, keys in changed.items() if keys})


def names(place: Any) -> Any:
    """Return the name of a path, or of each path of a mix, without its place."""
    if isinstance(place, list):
        return [{**entry, "path": names(entry.get("path"))} for entry in place]
    return Path(place).name if isinstance(place, str) else place


def check_comparable(runs: list[Run]) -> None:
    """Raise UserError if a run has another model than the first, or another data order without being a seed twin."""
    first = runs[0]
    for other in runs[1:]:
        different = other.differs_in(first) - {"data.cache_dir"}
        for section in ("model", "data"):
            keys = (key for key in different if key.startswith(f"{section}."))
            for key in sorted(keys, key=lambda key: (key != "data.source", key)):  # the rest follows from it
                refuse(other, key, first, "another model" if section == "model" else "other data")
        for key in ("trainer.global_batch_size", "trainer.sequence_length"):
            if key in different:
                refuse(other, key, first, "another data order")
        if shapes_of(other.config.get(PHASES)) != shapes_of(first.config.get(PHASES)):
            refuse(other, PHASES, first, "another data order")
        if other.seed != first.seed and not any(is_twin(other, run) for run in runs):
            refuse(other, "trainer.seed", first, "another data order, and no run beside it differs in the seed alone")


def refuse(other: Run, key: str, first: Run, what: str) -> None:
    """Raise UserError with the reason why two runs cannot be compared."""
    theirs, ours = first.config.get(key), other.config.get(key)
    raise UserError(f"{other.path}: {key}={ours}, but {first.path} has {theirs}: {what}; compare runs that share it")


def is_twin(a: Run, b: Run) -> bool:
    """Return whether two runs differ only in the seed."""
    return a.differs_in(b) - {"data.cache_dir"} == {"trainer.seed"}


def twins(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Return pairs of runs that differ only in the seed."""
    return [(a, b) for i, a in enumerate(runs) for b in runs[i + 1 :] if is_twin(a, b)]


def name_runs(runs: list[Run]) -> None:
    """Set labels: the recipe, plus the seed if it differs, plus the folder if that is not enough."""
    for run in runs:
        run.is_noise = run.seed != runs[0].seed
        run.label = run.recipe + (f", seed {run.seed}" if run.is_noise else "")
    labels, folders = [run.label for run in runs], distinct([run.path for run in runs])
    for run, label, folder in zip(runs, labels, folders, strict=True):
        if labels.count(label) > 1:
            run.label += f" ({folder})"


def table(runs: list[Run], last: int, markdown: bool) -> str:
    """Return the table, one row a run."""
    head = ("run", "steps", "validation loss", "difference", f"training loss, last {counted(last, 'step')}", "tokens/s",
            "peak GiB", "skipped steps")  # fmt: skip
    metered = any(run.series.get(JOULES) for run in runs)
    if metered:
        head = (*head, "watts", "tokens/joule", "joules/token", "energy")
    base = runs[0].typical(JOULES)
    rows: list[tuple[str, ...]] = [head]
    for run in runs:
        trainer = {key[8:]: value for key, value in run.config.items() if key.startswith("trainer.")}
        goal = steps_of_tree({"trainer": trainer})
        recent = [value for step, value in run.series[TRAIN].items() if step > run.last_step - last]
        rate, joules = run.typical("perf/tokens_per_second"), run.typical(JOULES)
        memory = run.series.get("memory/peak_gib", {}).values()
        skipped = run.last("recovery/skipped_steps")
        difference = percent(run.last(), runs[0].last()) if run is not runs[0] else None
        energy = (
            number(run.typical(WATTS), ",.0f"),
            number(1 / joules if joules else None, ",.4g"),
            number(joules, ".4g"),
            number(percent(joules, base) if run is not runs[0] else None, "+.1f", " %"),
        )
        rows.append(
            (
                run.label,
                f"{run.last_step:,}" if goal in (run.last_step, None) else f"{run.last_step:,} of {goal:,}",
                number(run.last(), ".4f"),
                number(difference, "+.2f", " %"),
                number(statistics.fmean(recent) if recent else None, ".4f"),
                number(rate, ",.0f"),
                number(max(memory, default=None), ".2f"),
                number(skipped, ".0f"),
                *(energy if metered else ()),
            )
        )
    if markdown:
        ruled = [rows[0], ("---",) * len(head), *rows[1:]]
        return "\n".join(f"| {' | '.join(row)} |" for row in ruled)
    return "\n".join(aligned(rows))


def number(value: float | None, form: str, unit: str = "") -> str:
    """Return a cell; empty without a value."""
    return "" if value is None else f"{value:{form}}{unit}"


def percent(value: float | None, base: float | None) -> float | None:
    """Return how far `value` lies above `base`, in percent; None if one is missing, or `base` is 0."""
    return None if value is None or not base else 100 * (value / base - 1)


def remarks(runs: list[Run]) -> list[str]:
    """Return remarks needed to read the table."""
    lines = []
    if len({run.origin for run in runs}) > 1:
        began = ", ".join(f"{run.label} with {f'those of {run.origin}' if run.origin else 'its own'}" for run in runs)
        lines.append(f"They did not begin with the same weights: {began}.")
    for run in runs:
        for step, keys in run.changed.items():
            lines.append(f"{run.label}: from step {step:,} on with other settings: {keys}.")
    for a, b in twins(runs):
        gap = percent(b.last(), a.last())
        if gap is not None:
            lines.append(f"Noise: {a.label} and {b.label} differ in the seed alone, by {abs(gap):.2f} %.")
    for run in runs:
        if count := int(run.last(REWINDS) or 0):
            often = "once" if count == 1 else f"{count} times"
            lines.append(f"{run.label} rewound {often} and left data out: from there on its steps saw other tokens.")
    steps = {max(run.series[VALIDATION]) for run in runs if run.series.get(VALIDATION)}
    if len(steps) > 1:
        at = ", ".join(f"{run.label} {max(run.series.get(VALIDATION) or [0]):,}" for run in runs)
        lines.append(f"Validation losses are of different steps: {at}.")
    for run in runs:
        shares = [statistics.fmean(run.series[key].values()) for key in SLOWED if run.series.get(key)]
        if max(shares, default=0.0) > 0.01:
            what = "its speed and energy are not the recipe's alone"
            lines.append(f"{run.label}: heat or hardware slowed a GPU for {max(shares):.0%} of the time: {what}.")
    others = sorted({key for run in runs[1:] for key in run.differs_in(runs[0]) if not key.startswith("precision.")})
    others = [key for key in others if key not in ("trainer.seed", "data.cache_dir")]
    if others:
        lines.append(f"The runs also differ in {', '.join(others)}.")
    return lines


def smoothed(values: dict[int, float], steps: int) -> dict[int, float]:
    """Return the mean over the logged values of the last `steps` steps, at each."""
    at = sorted(values)
    means = moving_mean(np.array(at), np.array([values[step] for step in at]), steps)
    return dict(zip(at, means.tolist(), strict=True))


def differences(run: Run, first: Run, key: str, smooth: int) -> dict[int, float]:
    """Return the excess of a metric over the first run's, in percent, at common steps; means over `smooth`."""
    ours, theirs = run.series.get(key, {}), first.series.get(key, {})
    common = sorted(ours.keys() & theirs.keys())
    a, b = (smoothed({step: values[step] for step in common}, smooth) for values in (ours, theirs))
    return {step: gap for step in common if (gap := percent(a[step], b[step])) is not None}


def draw(runs: list[Run], smooth: int, out: Path) -> list[Path]:
    """Write the two figures and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "loss.png", out / "difference.png"]
    title = f"Training loss (mean over {counted(smooth, 'step')}), validation loss (marks)"
    figure, axes = canvas("loss, nats per token", title)
    for i, run in enumerate(runs):
        plot(axes, run, i, smoothed(run.series[TRAIN], smooth), run.series.get(VALIDATION, {}))
    losses = [loss for run in runs for loss in run.series[TRAIN].values()]
    end = [loss for run in runs for step, loss in run.series[TRAIN].items() if step > run.last_step / 20]
    axes.set_ylim(min(losses) * 0.97, max(end or losses) * 1.03)  # the fall in the first steps would flatten the rest
    axes.legend(frameon=False)
    save(figure, paths[0])

    title = "Loss against the first run: training (line), validation (marks)"
    figure, axes = canvas(f"difference to {runs[0].label}, %", title)
    axes.axhline(0, color=COLOURS[0], linewidth=1)
    gaps = [abs(gap) for a, b in twins(runs) if (gap := percent(b.last(), a.last())) is not None]
    if gaps:
        axes.axhspan(-max(gaps), max(gaps), color="0.9", zorder=0, label="gap between two seeds at the end")
    late: list[float] = []
    for i, run in enumerate(runs[1:], 1):
        validation = differences(run, runs[0], VALIDATION, 1)
        # with another data order a step has other tokens: the difference of training losses is meaningless
        line = validation if run.is_noise else differences(run, runs[0], TRAIN, smooth)
        plot(axes, run, i, line, validation)
        late += [abs(value) for step, value in (line | validation).items() if step > run.last_step / 20]
    reach = 1.1 * max([*late, *gaps, 0.1])
    axes.set_ylim(-reach, reach)
    axes.legend(frameon=False)
    save(figure, paths[1])
    return paths


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    image = io.BytesIO()
    figure.savefig(image)
    replace_file(path, image.getvalue())


def canvas(ylabel: str, title: str) -> tuple[Any, Any]:
    """Return a figure with a light grid and no box."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel.replace("$", r"\$"))  # between dollars matplotlib reads formulas
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def plot(axes: Any, run: Run, number: int, line: dict[int, float], dots: dict[int, float]) -> None:
    """Plot one run's line and dots. A run of another seed is grey: only its distance matters."""
    colour = "0.55" if run.is_noise else COLOURS[number % len(COLOURS)]
    dashes = "-" if run.is_noise else DASHES[number // len(COLOURS) % len(DASHES)]
    axes.plot(list(line), list(line.values()), dashes, color=colour, linewidth=1.4, label=run.label.replace("$", r"\$"))
    marker = MARKERS[number % len(MARKERS)]
    axes.plot(list(dots), list(dots.values()), marker, color=colour, markersize=5.5, markerfacecolor="none")


if __name__ == "__main__":
    sys.exit(guarded(run))
