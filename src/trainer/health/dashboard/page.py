"""Runs -> one HTML file that contains its style, script and data and loads nothing from a network.

`payload` is what the script draws and what `serve` sends. A budget for the numbers of all curves and one for the cells
of all grids keep it small enough for a phone, whatever the length of the runs; excess data is decimated.

Names, messages and paths come from files that others may have written. They are data: the page holds them as JSON
inside a script element that they cannot end, and the script shows them as text, never as HTML. The page's content
security policy forbids loading anything.
"""

import html
import json
import math
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config_diff import HIDDEN, flat, is_secret, shapes_of
from trainer.health.dashboard.decimate import curves, gap, grid
from trainer.health.dashboard.read import Run
from trainer.health.dashboard.summary import TRAIN, VALIDATION, summary

NUMBERS = 150_000
"""Numbers of all curves together: about 1.2 MB."""
CELLS = 240_000
"""Cells of all grids together: 0.65 MB."""
EVENTS = 1_500
"""Events of all runs together. Beyond that, the most frequent kinds are thinned out, except their first and last."""
DIFFERENCES = 200
"""Limit of config keys in which several runs differ."""
MESSAGE = 400
"""Characters of an event's message."""
MTP = "loss/mtp"
"""0 in a run without multi-token prediction: left out, since it would pull the axis of the losses down to 0."""
ORDER_OF_DATA = ("trainer", "seed"), ("trainer", "global_batch_size"), ("trainer", "sequence_length"), ("data", "path")
ORDER_OF_DATA += (("trainer", "phases"),)  # of these the shapes
SCRIPTS = "plot.js", "line.js", "map.js", "tables.js", "page.js"


def payload(runs: Sequence[Run], ended: str | None = None) -> dict[str, Any]:
    """Return all runs as JSON values. ended: of the first run, as for `summary`."""
    num_series = sum(len(run.series) for run in runs) or 1
    num_rows = sum(len(run.rows.get(key.partition("/")[0], ())) for run in runs for key in run.grids) or 1
    buckets = int(np.clip(NUMBERS // (3 * num_series), 80, 1000))
    columns = int(np.clip(CELLS // num_rows, 24, 300))
    out = []
    for i, (run, name) in enumerate(zip(runs, distinct([run.path for run in runs]), strict=True)):
        arrays = {key: series.arrays() for key, series in run.series.items() if key != MTP or any(series.values)}
        grids = {
            key: grid(key, source, len(run.rows[key.partition("/")[0]]), columns)
            for key, source in run.grids.items()
            if source.steps
        }
        row = {
            "name": name,
            "about": summary(run, ended if i == 0 else None),
            "curves": curves(arrays, buckets),
            "gaps": curves(gap(run, runs[0], TRAIN, VALIDATION), 400) if i else [],
            "grids": grids,
            "rows": run.rows,
            "load": None if run.load is None else {"step": run.load[0], "tokens": run.load[1]},
            "latest": latest(run),
            "events": events(run, EVENTS // len(runs)),
        }
        out.append(row)
    return {"time": time.time(), "remark": remark(runs), "differences": differences(runs), "runs": out}


def distinct(folders: Sequence[Path]) -> list[str]:
    """Return the folders of runs, each with as many parent folders as make the names distinct."""
    parts = [folder.absolute().parts for folder in folders]
    for depth in range(1, max(map(len, parts), default=1)):
        found = ["/".join(part[-depth:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [str(folder) for folder in folders]


def remark(runs: Sequence[Run]) -> str:
    """Return the reason why training losses do not compare with the first run's: another order of the data."""
    first = runs[0]
    for run in (run for run in runs[1:] if first.config and run.config):
        for section, key in ORDER_OF_DATA:
            a, b = ((one.config.get(section) or {}).get(key) for one in (first, run))
            if (shapes_of(a) != shapes_of(b)) if key == "phases" else a != b:
                return (
                    f"{run.path.name} differs from {first.path.name} in {section}.{key}: of a step they saw other "
                    "tokens, and only the gap in validation loss counts"
                )
    return ""


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]] | None:
    """Return the config keys in which the runs differ, with each run's value as text ("" if absent); None if a run has
    no config. Keys about a run's location are left out; of secrets only the fact that they differ is shown."""
    if not all(run.config for run in runs):
        return None
    configs = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [json.dumps(config[key]) if key in config else "" for config in configs]
        if len(set(values)) > 1 and not key.startswith("run."):
            rows.append((key, [HIDDEN if value and is_secret(key) else value.strip('"')[:MESSAGE] for value in values]))
    return rows[:DIFFERENCES]


def latest(run: Run) -> dict[str, Any]:
    """Return the last column of each quantity, for the table: {"saturated": {"step": 900, "values": [...]}}."""
    out = {}
    for key, source in run.grids.items():
        group, _, quantity = key.partition("/")
        if group == "fp8" and source.values:
            values = [float(f"{v:.4g}") if math.isfinite(v) else None for v in source.values[-1].tolist()]
            out[quantity] = {"step": source.steps[-1], "values": values}
    return out


def events(run: Run, most: int) -> list[dict[str, Any]]:
    """Return at most `most` events of a run: step, kind, time, text, and the rule of an alert."""
    found = run.events
    while len(found) > most:
        kinds = [event["kind"] for event in found]
        commonest = max(set(kinds), key=kinds.count)
        of_it = [i for i, kind in enumerate(kinds) if kind == commonest]
        gone = set(of_it[1:-1:2]) if len(of_it) > 3 else set(of_it)
        found = [event for i, event in enumerate(found) if i not in gone]
    return [_event(event) for event in found]


def _event(event: dict[str, Any]) -> dict[str, Any]:
    step = event.get("step")
    out = {
        "step": step if type(step) is int else 0,
        "kind": event["kind"],
        "time": str(event.get("time", ""))[:23],
        "text": str(event.get("message", ""))[:MESSAGE],
    }
    named = [
        f"{key} {event[key]}"
        for key in ("rule", "tensor", "block", "module", "rank")
        if event.get(key) not in (None, "")
    ]
    return out | ({"named": ", ".join(named)[:MESSAGE]} if named else {})


def page(data: dict[str, Any], live: bool = False) -> str:
    """Return the HTML of a payload. live: the page polls the server for updates."""
    title = ", ".join(run["name"] for run in data["runs"])
    here = files("trainer.health.dashboard")
    parts = {
        "title": html.escape(f"{title} - Octet"),
        "connect": "'self'" if live else "'none'",
        "live": "true" if live else "false",
        "style": here.joinpath("page.css").read_text("utf-8"),
        "script": "\n".join(here.joinpath(name).read_text("utf-8") for name in SCRIPTS),
        "data": as_json(data),
    }
    template = here.joinpath("page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def as_json(data: dict[str, Any]) -> str:
    """Return JSON that cannot end its script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
