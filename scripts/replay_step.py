"""Replay one step of a run and inspect every tensor of it, in the run's precision and in another.

    python scripts/replay_step.py runs/NAME 1234                      against BF16
    python scripts/replay_step.py runs/NAME 1234 --against fp32
    python scripts/replay_step.py runs/NAME 1234 precision.scaling.margin=1 trainer.device=cpu

It begins with the nearest checkpoint before the step and trains the steps in between again, on one process whatever the
run had (see `trainer.offline.replay`). Then the step's tokens go through two models with the same weights. It prints
loss and gradient norm of the step in both, the place that went bad first with its text, and for one microbatch a table
of all tensors in the order of the forward and then the backward pass:

    amax          largest absolute value in the run's precision, and in the other
    of range      amax times scale, in percent of the FP8 format's largest number: above 100 it was clipped
    clipped, lost shares of the numbers that were too large for FP8, or not 0 and came out as 0
    not finite    how many numbers are NaN or infinite
    difference    ||x - y|| / ||y||, y in the other precision; not for tensors inside the experts, whose rows depend on
                  the router's choice

A `!` marks rows that are not finite, `!!` the first one. KEY=VALUE changes keys of the run's config for this replay.
Nothing is written into the run's folder; it may still be running.
"""

import fnmatch
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from precision.errors import UserError, counted
from trainer.forecast.words import aligned
from trainer.launch.command_line import Parser, guarded

if TYPE_CHECKING:
    from trainer.offline.replay import Replay
    from trainer.recovery.nonfinite_probe import TensorReading

PRECISIONS = Path(__file__).resolve().parents[1] / "configs" / "precision"
AGAINST = "bf16", "fp32"
TEXT = 400  # characters of a sequence


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("step", type=int, metavar="STEP", help="the step to look at")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="changes to the run's config")
    parser.add_argument("--against", choices=AGAINST, default="bf16", help="the precision to compare with (bf16)")
    parser.add_argument("--without-faults", action="store_true", help="leave out the run's debug.inject")
    parser.add_argument("--microbatch", type=int, metavar="N", help="the one to look at (default: the bad one, or 0)")
    parser.add_argument("--most", type=int, default=1000, metavar="N", help="steps to train again at most (1000)")
    parser.add_argument("--only", metavar="GLOB", help="rows of tensors with such names, as 'layers.1.*'")
    given = parser.parse_intermixed_args()
    from trainer.offline.replay import config_of, find, replay  # imports torch

    target = find(given.run, given.step, given.most)
    tree = config_of(target, given.overrides, not given.without_faults)
    done = replay(target, tree, PRECISIONS / f"{given.against}.yaml", given.microbatch)
    print("\n".join([*head(done), "", *data(done), ""]))
    print("\n".join(table(done, given.only)))


def head(done: "Replay") -> list[str]:
    """Return a description of the replay, and the result in both precisions."""
    target = done.target
    begin = "the start of the run" if target.checkpoint is None else target.checkpoint.name
    again = target.step - 1 - target.first
    lines = [f"{target.run}, step {target.step}: from {begin}, {counted(again, 'step')} trained again"]
    if target.rewinds:
        lines.append(f"as after {counted(len(target.rewinds), 'rewind')} of the run")
    if done.config.debug.inject is not None:
        lines.append("with the faults of debug.inject, as in the run (--without-faults leaves them out)")
    rows: list[tuple[str, ...]] = [("", "loss", "gradient norm", "")]
    for each in (done.ours, done.theirs):
        place = each.place or ""
        verdict = f"a spike: {place.removesuffix(' (spike)')}" if place.endswith(" (spike)") else place
        verdict = f"not finite, first at {place}" if verdict == place else verdict
        rows.append((each.name, f"{each.loss:.4f}", f"{each.grad_norm:.4g}", verdict if place else "finite"))
    if target.logged is not None:
        loss, norm = (target.logged.get(key) for key in ("loss/total", "optim/grad_norm"))
        cells = ("not finite" if x is None else f"{x:{form}}" for x, form in ((loss, ".4f"), (norm, ".4g")))
        rows.append(("the run logged", *cells, ""))
    lines += ["", *aligned(rows, left=(0, 3))]
    if target.event is not None:
        lines += ["", f"the run reported: {target.event['message']}"]
    return lines


def data(done: "Replay") -> list[str]:
    """Return the examined windows, and the text of the sequence that went bad, or of the first."""
    from trainer.data.loader import window_name
    from trainer.recovery.diagnosis import text_of, tokens_of

    bad = done.ours.probe.bad_sequences
    number = int(done.windows[bad[0] if bad else 0])
    ((first, last),) = tokens_of(done.loader, done.windows[[bad[0] if bad else 0]])
    name = window_name(int(done.windows.min()), int(done.windows.max()))
    lines = [f"microbatch {done.microbatch} of {done.microbatches}: windows {name} of the run"]
    if bad:
        which = ", ".join(window_name(n, n) for n in done.windows[bad[:8]].tolist()) + (", ..." if len(bad) > 8 else "")
        lines.append(f"not finite in {len(bad)} of {len(done.windows)} sequences: window{'s' * (len(bad) > 1)} {which}")
    text = text_of(done.loader, done.data.tokenizer_path, number, TEXT)
    lines.append(f"window {window_name(number, number)}, tokens {first:,} to {last:,} of {done.loader.bins.path.name}:")
    return [*lines, f"    {json.dumps(text, ensure_ascii=False)}"]


def table(done: "Replay", only: str | None = None) -> list[str]:
    """Return every tensor, or those whose names match, a row each."""
    ours, theirs = done.ours.probe.rows, done.theirs.probe.rows
    names = in_order(list(ours) + [name for name in theirs if name not in ours])
    if only is not None and not (names := fnmatch.filter(every := names, only)):
        raise UserError(f"--only {only}: no tensor is called so; some are {', '.join(every[:3])}")
    first = done.ours.probe.first_bad
    titles = "", "tensor", "shape", "amax", "of range", "clipped", "lost", "not finite", done.theirs.name, "difference"
    rows: list[tuple[str, ...]] = [titles]
    for name in names:
        x, y = ours.get(name), theirs.get(name)
        seen = x or y
        assert seen is not None
        mark = "" if x is None or not x.not_finite else "!!" if x is first else "!"
        rows.append(
            (
                mark,
                name,
                "x".join(map(str, seen.shape)),
                "" if x is None else f"{x.amax:.4g}",
                "" if x is None else of_range(done, x),
                "" if x is None else share(x.saturated),
                "" if x is None else share(x.underflown),
                "" if x is None or not x.not_finite else f"{x.not_finite:,}",
                "" if y is None else f"{y.amax:.4g}",
                difference(x, y),
            )
        )
    return aligned(rows, left=(0, 1, 2))


def in_order(names: list[str]) -> list[str]:
    """Sort names forward, each weight before its GEMM, then backward."""
    forward = [name for name in names if not name.endswith((":grad", ":weight", ":weight gradient"))]
    weights = {name.removesuffix(":weight"): name for name in names if name.endswith(":weight")}
    out: list[str] = []
    for name in forward:
        if name in weights:
            out.append(weights.pop(name))
        out.append(name)
    return [*out, *weights.values(), *(name for name in names if name.endswith((":grad", ":weight gradient")))]


def of_range(done: "Replay", row: "TensorReading") -> str:
    """Return the share of its format's range that a tensor uses, if one scale is known beforehand."""
    arena = done.engine.arena
    if row.saturated is None or row.not_finite or row.name not in arena.names:
        return ""
    at = arena.names.index(row.name)
    return f"{100 * row.amax * done.scales[at] / float(arena.limit[at]):.3g} %" if done.scales[at] else ""


def difference(x: "TensorReading | None", y: "TensorReading | None") -> str:
    """Return the relative difference of the tensors, in percent; empty if they cannot be compared."""
    if x is None or y is None or x.kept is None or y.kept is None or x.shape != y.shape:
        return ""
    if x.not_finite or y.not_finite or (".experts." in x.name and not x.name.endswith(":weight gradient")):
        return ""
    ours, theirs = x.kept.double(), y.kept.double()
    norm = float(theirs.norm())
    return f"{100 * float((ours - theirs).norm()) / norm:.3g} %" if norm else ""


def share(value: float | None) -> str:
    """Return a share in percent."""
    return "" if value is None else f"{100 * value:.3g} %"


if __name__ == "__main__":
    sys.exit(guarded(run))
