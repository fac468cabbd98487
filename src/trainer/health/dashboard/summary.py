"""The head of the page: a run's settings, progress and state.

The end of a run is read from its files: the last event, and the last line of its log (`stopped by ...`). A run with
neither and short of its goal counts as running while its files still change.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from trainer.config.timeline import steps_of_tree
from trainer.forecast.words import duration
from trainer.health.dashboard.read import Run, mapping
from trainer.run.names import EVENTS, METRICS

TRAIN, VALIDATION = "loss/lm", "loss/validation"
QUIET_SECONDS = 120.0
"""A run counts as silent if its files have not changed for this long and for 20 logging intervals."""
LOG = "logs/rank0.log"


def summary(run: Run, ended: str | None = None) -> dict[str, Any]:
    """Return the row of a run. ended: what ended it, if known ("" for nothing unusual)."""
    config = run.config
    trainer, model = mapping(config.get("trainer")), mapping(config.get("model"))
    tokens = run.last("tokens")
    per_step = (trainer.get("global_batch_size") or 0) * (trainer.get("sequence_length") or 0)
    goal = steps_of_tree(config)
    kind, text = state(run, goal, ended)
    return {
        "path": str(run.path),
        "recipe": mapping(config.get("precision")).get("name"),
        "model": model_line(run, model),
        "seed": trainer.get("seed"),
        "machine": machine(run),
        "step": run.last_step,
        "goal": goal,
        "tokens": tokens if tokens is not None else run.last_step * per_step or None,
        "state": kind,
        "state_text": text,
        "loss": recent(run),
        "validation": run.last(VALIDATION),
        "tokens_per_second": typical(run.values("perf/tokens_per_second")),
        "mfu": typical(run.values("perf/mfu")),
        "peak_gib": max(run.values("memory/peak_gib"), default=None),
        "joules_per_token": typical(run.values("gpu/joules_per_token")),
        "skipped": run.last("recovery/skipped_steps"),
        "alerts": sum(event["kind"] == "alert" for event in run.events),
        "stride": run.stride,
    }


def typical(values: Sequence[float]) -> float | None:
    """Return the median of a metric over the logged lines except the first, which includes compilation."""
    return statistics.median(values[1:] or values) if values else None


def recent(run: Run) -> float | None:
    """Return the mean training loss over the last 50 steps, nats per token."""
    series = run.series.get(TRAIN)
    if not series or not series.values:
        return None
    last = [value for step, value in zip(series.steps, series.values, strict=True) if step > run.last_step - 50]
    return statistics.fmean(last or series.values[-1:])


def model_line(run: Run, model: dict[str, Any]) -> str:
    """Return the model in a few words: the name that selected it, if any, and its size."""
    chosen = [
        line.strip().partition("model=")[2] for line in run.overrides if line.strip().lstrip("- ").startswith("model=")
    ]
    size = []
    if model.get("num_layers") and model.get("hidden_size"):
        size.append(f"{model['num_layers']} layer{'s' * (model['num_layers'] != 1)} of {model['hidden_size']}")
    if model.get("num_experts"):
        dense = not model.get("num_mtp_layers") and model.get("num_dense_layers") == model.get("num_layers")
        size.append("dense" if dense else f"{model['num_experts']} expert{'s' * (model['num_experts'] != 1)}")
    return ", ".join([*chosen[-1:], *size])


def machine(run: Run) -> str:
    """Return the GPUs of rank 0's node, or the number of its CPU cores."""
    gpus = run.environment.get("gpus")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {gpus[0]}"
    cpus = run.environment.get("cpus")
    return f"{cpus} CPU cores" if cpus else ""


def state(run: Run, goal: int | None, ended: str | None) -> tuple[str, str]:
    """Return (waiting | gone | running | finished | stopped | failed | silent, a remark)."""
    if not run.there:
        return (
            ("gone", "its folder is gone; this is what was read before") if run.series else ("waiting", "not there yet")
        )
    if ended is None:
        ended = ending(run)
    if ended:
        by_user = ("SIGTERM", "SIGINT", "SIGHUP", "interrupted")
        kind = "stopped" if any(word in ended for word in by_user) else "failed"
        return kind, ended
    if goal and run.last_step >= goal:
        return "finished", ""
    age = time.time() - max(_changed(run, name) for name in (METRICS, EVENTS, LOG))
    logging = steps_of_tree(run.config, mapping(run.config.get("logging")).get("every") or 1) or 1
    quiet = max(QUIET_SECONDS, 20 * logging * (run.last("perf/step_seconds") or 0))
    if age > quiet:
        return "silent", f"nothing written for {duration(age)}"
    return "running", ""


def ending(run: Run) -> str:
    """Return what ended the run, if it ended before its goal and an event records it."""
    for event in reversed(run.events):
        if event["kind"] == "resume":
            return ""
        if event["kind"] in ("failure", "signal") and not event.get("finishes"):
            return str(event.get("message", ""))
    try:
        with (run.path / LOG).open("rb") as file:
            file.seek(max(file.seek(0, 2) - 2**16, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        _, found, what = line.partition(" INFO trainer: stopped by ")
        if found:
            return what.partition(": ")[2] or what
        if " INFO trainer: step " in line or " INFO trainer: resume: " in line:
            break
    return ""


def _changed(run: Run, name: str) -> float:
    try:
        return (run.path / name).stat().st_mtime
    except OSError:
        return 0.0
