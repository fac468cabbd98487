"""Reads a run folder into series, grids and events, and continues as the files grow.

    metrics.jsonl   {"step": 20, "loss/lm": 5.1, ...}                            -> Run.series["loss/lm"]: steps, values
    tensors.jsonl   {"names": {"fp8": [...], "blocks": [...], "moe": [...]}}     -> the rows of what follows
                    {"step": 20, "fp8": {"scale": [...], "amax": [...]}, ...}    -> Run.grids["fp8/scale"]: rows x steps
                    {"step": 20, "load": [[...]]}  {"step": 20, "shadow": {"cosine": {...}}}
    events.jsonl    {"time": ..., "step": 20, "kind": "alert", "message": ...}   -> Run.events

A file may grow while it is read (half a line waits until it is whole), be replaced by a shorter one (a resumed run
drops lines) or disappear. `Run.poll` reads what is new, and starts over if earlier data is no longer valid. A run that
rewinds writes lines of earlier steps again: the new ones count.

tensors.jsonl of a long run of a big model has gigabytes. Beyond `BUDGET` bytes the first read skips lines evenly: it
keeps every n-th (`Run.stride`).
"""

import json
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trainer.config_diff import read_yaml
from trainer.files import parse_line
from trainer.run.names import CONFIG, EVENTS, METRICS, TENSORS

BUDGET = 48 * 2**20
"""Bytes of tensors.jsonl that are read when a run is opened, at most: about two seconds."""
OVERLAP = 64
"""Bytes before the end of the part already read, which identify the file."""
SAMPLED = b'"saturated"', b'"kurtosis_qkv"', b'"cosine"'
"""Keys that only lines of sampled steps and shadows have."""
RARE = 8
"""If more plain lines than this come for one of these, these are thinned out less, by this factor."""


class Lines:
    """Follows a file of JSON lines. thin: whether lines of a file that is too long may be skipped."""

    def __init__(self, path: Path, thin: bool = False) -> None:
        self.path, self._thin = path, thin
        self.stride = 1
        self._offset, self._tail, self._numbers = 0, b"", [0, 0]

    def read(self) -> list[dict[str, Any]] | None:
        """Return the complete lines that have arrived since the last call, none without a file; None if the earlier
        lines are no longer valid. A line that is not a JSON object is skipped."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(self._offset - OVERLAP, 0))
                if self._offset > size or (self._offset and file.read(min(OVERLAP, self._offset)) != self._tail):
                    return None
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
        """Return whether to skip a line. If sampled steps are rare (`health.every`), they are counted separately."""
        sampled = any(word in line for word in SAMPLED)
        self._numbers[sampled] += 1
        rare = sampled and RARE * self._numbers[True] <= self._numbers[False]
        stride = max(1, self.stride // RARE) if rare else self.stride
        return self._numbers[sampled] % stride != 0 and b'"names"' not in line[:12]


class Series:
    """One metric: ascending steps, and values. None and values that are not finite are left out."""

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.values: Any = array("d")

    def add(self, step: int, value: Any) -> None:
        """Add a value. It replaces those of the same step and later."""
        self.cut(step)
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Drop the values at `step` and later."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return steps [N] and values [N]."""
        return np.array(self.steps, dtype=np.int64), np.array(self.values, dtype=np.float64)


class Grid(Series):
    """One quantity of many rows (tensors, blocks, modules): a float32 column per step, NaN where there is no value."""

    def __init__(self) -> None:
        super().__init__()
        self.values = []

    def matrix(self, num_rows: int) -> np.ndarray:
        """Return [columns, rows]. Columns from before a row was known are padded with NaN."""
        out = np.full((len(self.values), num_rows), np.nan, dtype=np.float32)
        for i, column in enumerate(self.values):
            out[i, : len(column)] = column
        return out


class Run:
    """A run folder as read so far. `poll` reads more.

    series, grids, events: the contents of the files. rows: names of the rows of each group of grids ("fp8", "blocks",
    "moe", "shadow"; a grid's group is the part before its slash). load: step and tokens per expert [blocks][E] of the
    last sampled step. config, environment, overrides: what produced the run; empty if unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.there = False
        self.config: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.overrides: list[str] = []
        self._read_config: float | None = None
        self._start()

    @property
    def stride(self) -> int:
        """n if every n-th line of tensors.jsonl is read."""
        return self._files[TENSORS].stride

    @property
    def last_step(self) -> int:
        """Step of the last line of metrics; 0 before the first."""
        return self._last["metrics"]

    def poll(self) -> bool:
        """Read what is new since the last call. Return whether there are new lines."""
        self.there = (self.path / METRICS).is_file()
        self._read_about()
        new = False
        for name, take in ((METRICS, self._metric), (TENSORS, self._tensor), (EVENTS, self._event)):
            entries = self._files[name].read()
            if entries is None:  # one file was replaced: read all from their beginning
                self._start()
                self.poll()
                return True
            new |= bool(entries)
            for entry in entries:
                try:
                    take(entry)
                except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
                    continue  # a line of another format
        return new

    def values(self, key: str) -> Sequence[float]:
        return self.series.get(key, Series()).values

    def last(self, key: str) -> float | None:
        values = self.values(key)
        return values[-1] if values else None

    def _start(self) -> None:
        self._files = {name: Lines(self.path / name, name == TENSORS) for name in (METRICS, TENSORS, EVENTS)}
        self.series: dict[str, Series] = {}
        self.grids: dict[str, Grid] = {}
        self.rows: dict[str, list[str]] = {}
        self.events: list[dict[str, Any]] = []
        self.load: tuple[int, list[list[float]]] | None = None
        self._places: dict[str, list[int]] = {}  # row of each value of a line
        self._last = {"metrics": 0, "tensors": 0}

    def _read_about(self) -> None:
        try:
            changed = (self.path / CONFIG).stat().st_mtime
            if changed == self._read_config:
                return
            self.config = mapping(read_yaml((self.path / CONFIG).read_bytes()))
            self._read_config = changed
        except (OSError, yaml.YAMLError):
            return
        try:
            self.overrides = (self.path / "overrides.txt").read_text().split("\n")
            self.environment = mapping(json.loads((self.path / "environment.json").read_text()))
        except (OSError, ValueError, RecursionError):
            return

    def _metric(self, entry: dict[str, Any]) -> None:
        step = entry["step"]
        if step < self._last["metrics"]:  # the run rewound: lines of later steps are no longer valid
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

    def _place(self, group: str, names: list[str]) -> list[int]:
        """Return the rows of these names in a group; new names are appended."""
        rows = self.rows.setdefault(group, [])
        known = {name: i for i, name in enumerate(rows)}
        for name in names:
            if name not in known:
                known[name] = len(rows)
                rows.append(name)
        return [known[name] for name in names]

    def _column(self, key: str, step: int, places: list[int], values: list[float | None]) -> None:
        if len(values) != len(places):
            raise ValueError(f"{key}: not as many values as names")
        column = np.full(len(self.rows[key.partition("/")[0]]), np.nan, dtype=np.float32)
        with np.errstate(over="ignore"):  # damaged digits: inf
            column[places] = np.array(values, dtype=np.float32)  # None becomes NaN
        self.grids.setdefault(key, Grid()).add(step, column)

    def _event(self, entry: dict[str, Any]) -> None:
        if isinstance(entry.get("kind"), str):
            self.events.append(entry)


def mapping(value: Any) -> dict[str, Any]:
    """Return a section of a config, empty if it is something else."""
    return value if isinstance(value, dict) else {}
