"""A run folder -> series, grids and events, read as far as they have been written, and read on later.

    metrics.jsonl   {"step": 20, "loss/lm": 5.1, ...}                            -> Run.series["loss/lm"]: steps, values
    tensors.jsonl   {"names": {"fp8": [...], "blocks": [...], "moe": [...]}}     -> the rows of what follows
                    {"step": 20, "fp8": {"scale": [...], "amax": [...]}, ...}    -> Run.grids["fp8/scale"]: rows x steps
                    {"step": 20, "load": [[...]]}  {"step": 20, "shadow": {"cosine": {...}}}
    events.jsonl    {"time": ..., "step": 20, "kind": "alert", "message": ...}   -> Run.events

A file may grow while it is read (half a line waits until it is whole), be replaced by a shorter one (a resumed run
drops lines) or be gone. `Run.poll` takes what is new. When what was read before is no longer true, it begins again and
counts `generation` up, so that who has seen the old knows. A run that goes back some steps writes lines of steps that
it has written before: the new ones count.

tensors.jsonl of a long run of a big model has gigabytes. Past `BUDGET` bytes lines are left out evenly when the file is
first read: by `Run.stride` every n-th counts.
"""

import json
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trainer.config_diff import read_yaml
from trainer.files import parse_line

CONFIG, METRICS, TENSORS, EVENTS = (
    "config.yaml",
    "metrics.jsonl",
    "tensors.jsonl",
    "events.jsonl",
)  # as in trainer.run.run_folder
BUDGET = 48 * 2**20
"""Bytes of tensors.jsonl that are read of it at most when a run is opened: about two seconds."""
OVERLAP = 64
"""Bytes before the end of what was read, by which a file is known again."""
LOOK = b'"saturated"', b'"kurtosis_qkv"', b'"cosine"'
"""Only lines of a look inside or of a shadow have them."""
RARE = 8
"""Where so many plain lines come for one of these, fewer of these are left out, by this factor."""


class Lines:
    """Follows a file of JSON lines. thin: whether lines may be left out of a file that is too long."""

    def __init__(self, path: Path, thin: bool = False) -> None:
        self.path, self._thin = path, thin
        self.stride = 1
        self.reset()

    def reset(self) -> None:
        """Begin at the beginning."""
        self._offset, self._tail, self._numbers = 0, b"", [0, 0]

    def read(self, replaced: Callable[[], None]) -> list[dict[str, Any]]:
        """The whole lines that have come since the last call.

        Calls `replaced` first if those before are not true any more. A line that is no JSON object is passed over.
        Nothing where there is no file.
        """
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(self._offset - OVERLAP, 0))
                if self._offset > size or (self._offset and file.read(min(OVERLAP, self._offset)) != self._tail):
                    self.reset()
                    replaced()
                file.seek(self._offset)
                if self._offset == 0 and self._thin:
                    self.stride = max(1, -(-size // BUDGET))
                return self._parse(file)
        except OSError:
            return []

    def _parse(self, file: Any) -> list[dict[str, Any]]:
        entries = []
        for line in file:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            self._tail = (self._tail + line)[-OVERLAP:]
            if self.stride > 1 and self._left_out(line):
                continue
            if (entry := parse_line(line)) is not None:
                entries.append(entry)
        return entries

    def _left_out(self, line: bytes) -> bool:
        """Every n-th line counts. Where looks are rare (`health.every`), they are counted apart."""
        look = any(word in line for word in LOOK)
        self._numbers[look] += 1
        rare = look and RARE * self._numbers[True] <= self._numbers[False]
        stride = max(1, self.stride // RARE) if rare else self.stride
        return self._numbers[look] % stride != 0 and b'"names"' not in line[:12]


class Series:
    """One metric: steps, ascending, and values. None and what is not finite are not in it."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        """A value; in place of one of the same step."""
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
        else:
            self.steps.append(step)
            self.values.append(value)

    def cut(self, step: int) -> None:
        """Drop what is of `step` or later."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    def arrays(self, since: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """steps [N], values [N], from index `since` on."""
        return np.array(self.steps[since:], dtype=np.int64), np.array(self.values[since:], dtype=np.float64)


class Grid:
    """One quantity of many rows (tensors, blocks, modules): a column of float32 a step, NaN where there is none."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.columns: list[np.ndarray] = []

    def add(self, step: int, column: np.ndarray) -> None:
        """A column; in place of one of the same step."""
        self.cut(step)
        self.steps.append(step)
        self.columns.append(column)

    def cut(self, step: int) -> None:
        """Drop what is of `step` or later."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.columns.pop()

    def matrix(self, num_rows: int, since: int = 0) -> np.ndarray:
        """[columns from `since` on, rows], columns of before a row was known filled up with NaN."""
        out = np.full((len(self.columns) - since, num_rows), np.nan, dtype=np.float32)
        for i, column in enumerate(self.columns[since:]):
            out[i, : len(column)] = column
        return out


class Run:
    """A run folder as read so far. `poll` reads on.

    series, grids, events: what is in the files. rows: names of the rows of a group of grids ("fp8", "blocks", "moe",
    "shadow"; a grid's group is what stands before its slash). load: step and tokens per expert [blocks][E] of the last
    look. config, environment, overrides: what produced the run; empty where it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.there = False
        self.config: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.overrides: list[str] = []
        self._files = {name: Lines(path / name, name == TENSORS) for name in (METRICS, TENSORS, EVENTS)}
        self._read_config: float | None = None
        self._clear()

    @property
    def stride(self) -> int:
        """Every how many lines of tensors.jsonl count."""
        return self._files[TENSORS].stride

    @property
    def last_step(self) -> int:
        """Of the last line of metrics; 0 before the first."""
        return self._last["metrics"]

    def poll(self) -> None:
        """Read what has come since the last call."""
        self.there = (self.path / METRICS).is_file()
        self._read_about()
        for name, take in ((METRICS, self._metric), (TENSORS, self._tensor), (EVENTS, self._event)):
            entries = self._files[name].read(self._restart)
            if self._again:  # one file has been replaced: the others are read from their beginning, too
                break
            for entry in entries:
                try:
                    take(entry)
                except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
                    continue  # a line of another format
        if self._again:
            for file in self._files.values():
                file.reset()
            self._clear()
            self.poll()

    def last(self, key: str) -> float | None:
        """Last value of a metric."""
        series = self.series.get(key)
        return series.values[-1] if series and series.values else None

    def _clear(self) -> None:
        self.series: dict[str, Series] = {}
        self.grids: dict[str, Grid] = {}
        self.rows: dict[str, list[str]] = {}
        self.events: list[dict[str, Any]] = []
        self.load: tuple[int, list[list[float]]] | None = None
        self._places: dict[str, list[int] | None] = {}  # where the values of a line belong; None: in order
        self._last = {"metrics": 0, "tensors": 0}
        self._again = False

    def _restart(self) -> None:
        self.generation += 1
        self._again = True

    def _read_about(self) -> None:
        """config.yaml and its neighbours, when they have changed."""
        try:
            changed = (self.path / CONFIG).stat().st_mtime
            if changed == self._read_config:
                return
            self.config = _mapping(read_yaml((self.path / CONFIG).read_bytes()))
            self._read_config = changed
        except (OSError, yaml.YAMLError):
            return
        try:
            self.overrides = (self.path / "overrides.txt").read_text().split("\n")
            self.environment = _mapping(json.loads((self.path / "environment.json").read_text()))
        except (OSError, ValueError, RecursionError):
            return

    def _metric(self, entry: dict[str, Any]) -> None:
        step = entry["step"]
        if (
            step < self._last["metrics"]
        ):  # the run went back: what it had written of later steps is no longer its course
            self.generation += 1
            for series in self.series.values():
                series.cut(step)
        self._last["metrics"] = step
        for key, value in entry.items():
            if type(value) in (int, float) and key != "step" and math.isfinite(value):
                series = self.series.get(key)
                if series is None:
                    series = self.series[key] = Series()
                series.add(step, value)

    def _tensor(self, entry: dict[str, Any]) -> None:
        if "names" in entry:
            for group, names in entry["names"].items():
                self._places[group] = self._place(group, [str(name) for name in names])
            return
        step = entry["step"]
        if step < self._last["tensors"]:
            self.generation += 1
            for grid in self.grids.values():
                grid.cut(step)
        self._last["tensors"] = step
        for group, quantities in entry.items():
            if group in ("fp8", "blocks", "moe"):
                for quantity, values in quantities.items():
                    self._column(f"{group}/{quantity}", step, self._places[group], values)
            elif group == "shadow":
                cosine = quantities["cosine"]
                places = self._place("shadow", list(cosine))
                self._column("shadow/cosine", step, places, list(cosine.values()))
            elif group == "load":
                self.load = step, quantities

    def _place(self, group: str, names: list[str]) -> list[int] | None:
        """Where in the rows of a group these names are; new ones come last."""
        rows = self.rows.setdefault(group, [])
        known = {name: i for i, name in enumerate(rows)}
        new = [name for name in names if name not in known]
        if new:
            if rows:
                self.generation += 1
            rows.extend(new)
            known = {name: i for i, name in enumerate(rows)}
        places = [known[name] for name in names]
        return None if places == list(range(len(places))) else places

    def _column(self, key: str, step: int, places: list[int] | None, values: list[float | None]) -> None:
        group = key.partition("/")[0]
        with np.errstate(over="ignore"):  # damaged digits: inf
            column = np.array(values, dtype=np.float32)  # None becomes NaN
        if places is not None:
            spread = np.full(len(self.rows[group]), np.nan, dtype=np.float32)
            spread[places] = column
            column = spread
        if len(column) > len(self.rows[group]):
            raise ValueError(f"{key}: more values than names")
        self.grids.setdefault(key, Grid()).add(step, column)

    def _event(self, entry: dict[str, Any]) -> None:
        if isinstance(entry.get("kind"), str):
            self.events.append(entry)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
