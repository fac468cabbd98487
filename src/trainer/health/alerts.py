"""Alerts: rules over the logged metrics, each raised once while its condition lasts.

A rule is a small object that sees every logged line, in order, and answers what is wrong as of this line:

    see(step, metrics, tensors) -> [Alert, ...]   wrong, worst first
                                   []             all is well
                                   None           nothing in this line to judge by

It keeps what it needs of the past in `History`s. It does not know which alerts were raised before: `Alerts` does. An
alert is raised when its condition begins, one a rule and line for all affected tensors; again only after `QUIET` lines
without the condition, or every `repeat` steps while it lasts. To write a rule: subclass `Rule`, give it a `name` (the
config key of its threshold), implement `see`, and pass it to `Alerts.add`. It must accept missing keys, None (what
metrics.jsonl has for NaN) and NaN: `number()` turns all three into None.

Steps go back when a run rewinds: a `History` drops later values by itself, and alerts may be raised again. A run that
resumes feeds its rules from the tail of its metrics.jsonl and tensors.jsonl (`Alerts.replay`), so that the checkpoint
holds nothing of them: medians and raised alerts are as they were. Rules `of_process` (speed, memory, heat) start again
instead: the process may be on another machine.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from trainer.files import parse_line

QUIET = 5
"""Lines without the condition before its alert may be raised again; also the least distance of a rule's alerts."""

TAIL = 8 * 2**20
"""So many bytes of each file are read again when a run continues."""

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """Something that the user should know. message: one line: what, the value and its threshold, and what to do."""

    rule: str
    """Name of the rule: the key of its threshold."""
    step: int
    message: str
    value: float
    """What was measured ..."""
    threshold: float
    """... and what it was held against."""
    tensor: str | None = None
    """Row of tensors.jsonl that it is about."""
    block: str | None = None
    """Block of the model that it is about."""

    @property
    def about(self) -> str:
        """What the alert is about: the same rule about another tensor is another alert."""
        return self.tensor or self.block or ""

    def what(self) -> dict[str, Any]:
        """Fields of the event, beside step and message."""
        named = {"tensor": self.tensor, "block": self.block}
        fields = {"rule": self.rule, "value": _rounded(self.value), "threshold": _rounded(self.threshold)}
        return fields | {key: name for key, name in named.items() if name is not None}


class Rule:
    """Something that can be wrong. One object a run."""

    name: ClassVar[str]
    """The config key of its threshold; `rule` of its alerts."""
    of_process: ClassVar[bool] = False
    """About this process and machine (speed, memory, heat) and not the model: knows nothing of the time before a
    resume."""
    lasting: ClassVar[bool] = False
    """Never clears by itself: raised once, not every `repeat` steps."""

    def see(self, step: int, metrics: Entry, tensors: Entry | None) -> list[Alert] | None:
        """What is wrong as of this line, worst first; [] if nothing is; None if the line has nothing to judge by.

        metrics: numbers by slashed key, some or all missing. tensors: the line's entry in tensors.jsonl, with "names"
        put into it, or None.
        """
        raise NotImplementedError


class History:
    """The last `size` values of something, with their steps. A step that comes again makes it forget what was later."""

    def __init__(self, size: int):
        self._points: deque[tuple[int, float]] = deque(maxlen=size)

    def add(self, step: int, value: float) -> None:
        """`value` at `step`."""
        self.forget(step)
        self._points.append((step, value))

    def forget(self, step: int) -> None:
        """What was at `step` and later."""
        while self._points and self._points[-1][0] >= step:
            self._points.pop()

    def before(self, step: int) -> list[float]:
        """Values of the steps before `step`, oldest first."""
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
    """The finite number under `key`; None if there is none."""
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


@dataclass
class _Said:
    """The last alert about something: its step, and the lines without the condition since."""

    step: int
    well: int = 0


class Alerts:
    """The rules of a run. On rank 0; no rule costs more than microseconds, or a millisecond of a look inside.

    repeat: steps after which a lasting alert is raised again; None: not before it has cleared.
    """

    def __init__(self, rules: Iterable[Rule] = (), repeat: int | None = None):
        self._repeat = repeat
        self._rules: list[Rule] = []
        self._said: dict[str, dict[str, _Said]] = {}
        self._lines_since: dict[str, int] = {}
        self._names: Entry = {}
        self._inside: Entry | None = None
        self._last = 0
        self.add(*rules)

    def add(self, *rules: Rule) -> None:
        """More rules. Each has a name of its own."""
        for rule in rules:
            assert rule.name not in self._said, rule.name
            self._rules.append(rule)
            self._said[rule.name] = {}
            self._lines_since[rule.name] = QUIET

    def tensors(self, entry: Entry) -> None:
        """A line of tensors.jsonl, which comes before the line of metrics that it belongs to."""
        if "names" in entry:
            self._names = entry["names"]
        else:
            self._inside = entry

    def see(self, metrics: Entry) -> list[Alert]:
        """A logged line -> the alerts to raise now."""
        inside, self._inside = self._inside, None
        return self._see(self._rules, metrics, inside if inside and inside.get("step") == metrics["step"] else None)

    def replay(self, metrics: Path, tensors: Path) -> None:
        """Make up for the lines before a resume, from the files of the run, without raising their alerts again."""
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
                    self._see(rules, line, of_step.pop(line["step"], None))

    def _see(self, rules: list[Rule], metrics: Entry, tensors: Entry | None) -> list[Alert]:
        step = metrics["step"]
        if step < self._last:  # the run was rewound: what goes wrong again is news
            for said in self._said.values():
                said.clear()
        self._last = step
        named = None if tensors is None else {**tensors, "names": self._names}
        return [alert for rule in rules if (alert := self._news(rule, step, rule.see(step, metrics, named)))]

    def _news(self, rule: Rule, step: int, wrong: list[Alert] | None) -> Alert | None:
        """One alert for all that is new in `wrong`; None if nothing is."""
        if wrong is None:
            return None
        said = self._said[rule.name]
        self._lines_since[rule.name] += 1
        for about in said.keys() - {alert.about for alert in wrong}:
            said[about].well += 1
            if said[about].well >= QUIET:
                del said[about]
        new = [alert for alert in wrong if self._is_new(rule, step, alert, said)]
        if not new or self._lines_since[rule.name] <= QUIET:
            return None  # too soon after the last alert: raised later, if it lasts
        self._lines_since[rule.name] = 0
        for alert in wrong:
            said[alert.about] = _Said(step)
        first, others = new[0], len(wrong) - 1
        return replace(first, message=f"{first.message} (and {others} more)") if others else first

    def _is_new(self, rule: Rule, step: int, alert: Alert, said: dict[str, _Said]) -> bool:
        before = said.get(alert.about)
        if before is None:
            return True
        before.well = 0
        return self._repeat is not None and not rule.lasting and step - before.step >= self._repeat


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of the last lines of a JSON-lines file, and its first one if it names what the others list."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        first = file.readline()
        rest = max(file.tell(), path.stat().st_size - TAIL)
        whole = rest == file.tell()
        file.seek(rest)
        lines = file.read().splitlines()
    for i, line in enumerate([first, *lines[0 if whole else 1 :]]):
        entry = parse_line(line)  # cut off, or damaged: one line less to remember
        if entry is not None and (i or whole or "names" in entry):
            yield entry


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
