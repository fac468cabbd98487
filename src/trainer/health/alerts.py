"""Alerts: rules over the logged metrics, each raised once while its condition lasts.

A rule is a small object that sees every logged line, in order, and returns what is wrong as of this line:

    check(step, metrics, tensors) -> [Alert, ...]   wrong, worst first
                                     []             all is well
                                     None           the line has nothing to judge by

A rule keeps its past in `History`s. `Alerts` knows which alerts were raised before. It raises an alert when its
condition begins: one per rule and line, for all affected tensors. It raises it again after `QUIET` lines without the
condition, or every `repeat` steps while the condition lasts. To write a rule, subclass `Rule`, give it a `name` (the
config key of its threshold), implement `check`, and list it in `rules.RULES`. A rule must accept missing keys, None
(NaN in metrics.jsonl) and NaN: `number()` turns all three into None.

Steps go back when a run rewinds: a `History` then drops later values, and alerts may be raised again. The checkpoint
holds no state of rules: a run that resumes replays the tail of its metrics.jsonl and tensors.jsonl (`Alerts.replay`),
which restores medians and raised alerts. Rules `of_process` (speed, memory, heat) restart instead: the process may be
on another machine.
"""

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from trainer.files import parse_line

QUIET = 5
"""Lines without the condition before its alert may be raised again; also the least distance between a rule's alerts."""

TAIL = 8 * 2**20
"""Bytes at the end of each file that are replayed when a run resumes."""

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """An alert for the user. message: one line with the value, its threshold, and what to do."""

    rule: str
    """Name of the rule: the key of its threshold."""
    step: int
    message: str
    value: float
    """The measured value."""
    threshold: float
    """The threshold that it was compared with."""
    tensor: str | None = None
    """Row of tensors.jsonl that the alert is about."""
    block: str | None = None
    """Block of the model that the alert is about."""
    rank: int | None = None
    """Rank that the alert is about."""

    @property
    def about(self) -> str:
        """The subject of the alert. The same rule on another tensor is another alert."""
        return self.tensor or self.block or ("" if self.rank is None else f"rank {self.rank}")

    def what(self) -> dict[str, Any]:
        """Return the event's fields except step and message."""
        named = {"tensor": self.tensor, "block": self.block, "rank": self.rank}
        fields = {"rule": self.rule, "value": _rounded(self.value), "threshold": _rounded(self.threshold)}
        return fields | {key: name for key, name in named.items() if name is not None}


class Rule:
    """Base class of rules. Each run has one object of each."""

    name: ClassVar[str]
    """The config key of its threshold, and `rule` of its alerts."""
    of_process: ClassVar[bool] = False
    """Whether the rule is about this process and machine (speed, memory, heat) and not the model. Such a rule sees
    nothing from before a resume."""
    lasting: ClassVar[bool] = False
    """Whether the condition never clears: the alert is raised once, not every `repeat` steps."""

    def check(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        """Return what is wrong as of this line, worst first; [] if nothing is; None if the line has nothing to judge
        by.

        metrics: numbers by slashed key; any may be missing. tensors: the line's entry in tensors.jsonl with "names"
        added, or None.
        """
        raise NotImplementedError

    def another_shape(self) -> None:
        """Take note that steps have another batch or sequence length from the next one on."""

    def another_precision(self) -> None:
        """Take note that tensors are in other formats, or scaled otherwise, from the next step on."""


class History:
    """The last `size` values of a quantity, with their steps. Adding a step again drops the later ones."""

    def __init__(self, size: int):
        self._points: deque[tuple[int, float]] = deque(maxlen=size)

    def add(self, step: int, value: float) -> None:
        """Append `value` at `step`."""
        self.forget(step)
        self._points.append((step, value))

    def forget(self, step: int) -> None:
        """Drop the values at `step` and later."""
        while self._points and self._points[-1][0] >= step:
            self._points.pop()

    def before(self, step: int) -> list[float]:
        """Return the values of the steps before `step`, oldest first."""
        return [value for at, value in self._points if at < step]

    @property
    def last(self) -> tuple[int, float] | None:
        """The newest step and its value."""
        return self._points[-1] if self._points else None

    @property
    def steps(self) -> list[int]:
        """Steps, oldest first."""
        return [step for step, _ in self._points]

    @property
    def values(self) -> list[float]:
        """Values, oldest first."""
        return [value for _, value in self._points]

    def __len__(self) -> int:
        return len(self._points)


def number(metrics: Entry, key: str) -> float | None:
    """Return the finite number under `key`, or None."""
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def in_fp8(metrics: Entry, advice: str) -> str:
    """Return advice that only a run with FP8 can follow; "" for other runs."""
    return advice if "fp8/amax_max" in metrics else ""


@dataclass
class _LastAlert:
    """The last alert on a subject: its step, and the lines without the condition since."""

    step: int
    quiet: int = 0


@dataclass
class _Raised:
    """The alerts of a rule that may last, by subject, and the lines since one was raised."""

    last: dict[str, _LastAlert] = field(default_factory=dict)
    lines: int = QUIET


class Alerts:
    """The rules of a run, on rank 0. A rule takes microseconds a line, a millisecond for a sampled step.

    repeat: steps after which a lasting alert is raised again; None: only after it has cleared.
    """

    def __init__(self, rules: Iterable[Rule] = (), repeat: int | None = None):
        self._repeat, self._rules = repeat, list(rules)
        self._raised = {rule.name: _Raised() for rule in self._rules}
        self._names: Entry = {}
        self._inside: Entry | None = None
        self._last = 0

    def tensors(self, entry: Entry) -> None:
        """Take a line of tensors.jsonl. It comes before the line of metrics of its step."""
        if "names" in entry:
            self._names = entry["names"]
        else:
            self._inside = entry

    def another_shape(self) -> None:
        """Pass on that steps have another batch or sequence length from the next one on."""
        for rule in self._rules:
            rule.another_shape()

    def another_precision(self) -> None:
        """Pass on that tensors are in other formats, or scaled otherwise, from the next step on."""
        for rule in self._rules:
            rule.another_precision()

    def check(self, metrics: Entry) -> list[Alert]:
        """Return the alerts to raise for a logged line."""
        inside, self._inside = self._inside, None
        return self._check(self._rules, metrics, inside if inside and inside.get("step") == metrics["step"] else None)

    def replay(self, metrics: Path, tensors: Path) -> None:
        """Restore the rules from the run's files after a resume, without raising the alerts again."""
        rules = [rule for rule in self._rules if not rule.of_process]
        of_step: dict[int, Entry] = {}
        for entry in _tail(tensors):
            self.tensors(entry)
            if "step" in entry:
                of_step[entry["step"]] = entry
        self._inside = None
        for line in _tail(metrics):
            if "step" in line:
                with suppress(TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):  # damaged
                    self._check(rules, line, of_step.pop(line["step"], None))

    def _check(self, rules: list[Rule], metrics: Entry, tensors: Entry | None) -> list[Alert]:
        step = metrics["step"]
        if step < self._last:  # the run was rewound: an alert may be raised again
            for raised in self._raised.values():
                raised.last.clear()
        self._last = step
        named = None if tensors is None else {**tensors, "names": self._names}
        return [alert for rule in rules if (alert := self._combined(rule, step, rule.check(step, metrics, named)))]

    def _combined(self, rule: Rule, step: int, wrong: list[Alert] | None) -> Alert | None:
        """Return one alert for everything new in `wrong`, or None."""
        if wrong is None:
            return None
        raised = self._raised[rule.name]
        raised.lines += 1
        for about in raised.last.keys() - {alert.about for alert in wrong}:
            raised.last[about].quiet += 1
            if raised.last[about].quiet >= QUIET:
                del raised.last[about]
        new = [alert for alert in wrong if self._is_new(rule, step, raised.last.get(alert.about))]
        if not new or raised.lines <= QUIET:
            return None  # too soon after the last alert: raised later if the condition lasts
        raised.lines = 0
        raised.last |= {alert.about: _LastAlert(step) for alert in wrong}
        first, others = new[0], len(wrong) - 1
        return replace(first, message=f"{first.message} (and {others} more)") if others else first

    def _is_new(self, rule: Rule, step: int, before: _LastAlert | None) -> bool:
        if before is None:
            return True
        before.quiet = 0
        return self._repeat is not None and not rule.lasting and step - before.step >= self._repeat


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in the last `TAIL` bytes of a JSON-lines file, and before them that in its first line if these
    include it or it holds the names. Lines that are cut off or damaged are skipped."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        first = file.readline()
        is_whole = file.tell() >= path.stat().st_size - TAIL
        if not is_whole:
            file.seek(-TAIL, os.SEEK_END)
        if (entry := parse_line(first)) is not None and (is_whole or "names" in entry):
            yield entry
        for line in file:
            if (entry := parse_line(line)) is not None:
                yield entry


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
