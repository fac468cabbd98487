"""Diagnosis of a skipped step: the tensor that went bad first, its rank, and its text.

It reads the snapshot that the step left behind (`StepSnapshot`), only after a bad step:

    where      each rank finds its own first place (in the order of `StepGuard.places`) in its own first bad microbatch,
               and the ranks compare. The earliest is the origin: later places were infected, on other ranks too
    how        the tensor's amax there (NaN or inf), and the scale of its cast: FP8 holds numbers up to limit / scale. A
               finite tensor far above that range was clipped, which is often the cause: the worst one is named
    from what  rank and microbatch identify the windows of the run's stream, the loader the tokens of train.bin, the
               tokenizer the text

A skipped step changes nothing. Until another step is committed, the same microbatch can run again with every tensor
probed (`nonfinite_probe`), which counts the numbers that are not finite, by sequence. This happens at once on CPUs, and
on a single GPU if the last step before a log was bad. It does not happen on several GPUs: the others would wait, and
the pass may need more memory than a step. Otherwise the event names the command that does it, scripts/replay_step.py.

Windows are numbered in the run's stream, as by the data cursor; tokens are offsets into train.bin.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from trainer.data import Loader, load_tokenizer
from trainer.data.loader import window_name
from trainer.files import script
from trainer.recovery.nonfinite_probe import probe_microbatch
from trainer.step.guard import GRAD_SUFFIX, Verdict
from trainer.step.step_snapshot import StepSnapshot

if TYPE_CHECKING:
    from trainer.step.engine import Engine

CHARACTERS = 60
"""Characters of the offending text in an event."""
CLIPPED = 2.0
"""A tensor this many times above its range is reported; a smaller excess is normal with scales of earlier steps."""


@dataclass
class BadStep:
    """A skipped step as far as it is known. what: the fields of its event."""

    place: str
    """The place that went bad first, one of `StepGuard.places`."""
    details: list[str] = field(default_factory=list)
    what: dict[str, Any] = field(default_factory=dict)

    def line(self, step: int) -> str:
        """Format the step in words."""
        return f"step {step} is not finite, first at {'; '.join([self.place, *self.details])}; it is skipped"


class SecondRun(NamedTuple):
    """The bad tensor in a second run of its microbatch: elements that are not finite (0: all were finite), all
    elements, the share that was clipped (None without a cast), and the sequences affected (empty if its shape does not
    show them)."""

    not_finite: int
    elements: int
    saturated: float | None
    sequences: list[int]


class Origin(NamedTuple):
    """Origin of a bad step: microbatch `microbatch` of rank `rank`. amax: of the bad tensor there, before ranks compare
    theirs as infinite; None if the place has none."""

    rank: int
    microbatch: int
    amax: float | None = None


class Diagnosis:
    """Diagnoses the skipped steps of a run. A collective: all ranks make the same calls. run: the run's folder."""

    def __init__(self, engine: Engine, loader: Loader, tokenizer: Path, microbatch_size: int, run: Path):
        self._engine, self._world, self._guard, self._arena = engine, engine.world, engine.guard, engine.arena
        self._loader, self._tokenizer, self._run = loader, tokenizer, run
        self.microbatch_size = microbatch_size
        """Of the steps that are reported next."""
        self._rows = {name: i for i, name in enumerate(self._arena.names)}
        self._limit = self._arena.limit.cpu()

    def report(self, skipped: list[tuple[Verdict, np.ndarray]]) -> list[BadStep]:
        """Diagnose `skipped`: all verdicts since the last call that are not ok, each with the windows of its step."""
        kept = self._engine.snapshot.take()
        assert len(kept) == len(skipped)
        committed, reports, was_run = int(self._guard.committed), [], False
        for (verdict, served), evidence in zip(skipped, kept, strict=True):
            place, origin = self._where(verdict, evidence)
            again = None
            same_weights = evidence is not None and evidence.committed == committed
            may_run = self._may_run_again and not bool(verdict.overflow)  # a lower loss scale cures an overflow
            if origin is not None and same_weights and not was_run and may_run:
                again, was_run = self._run_again(verdict.step, place, served, origin), True
            reports.append(self._report(verdict.step, place, origin, served, evidence, again))
        return reports

    def _where(self, verdict: Verdict, evidence: StepSnapshot | None) -> tuple[int, Origin | None]:
        """Return the place of origin, and its rank and microbatch if one shows it."""
        own = None
        if self._engine.pipelined is not None:  # microbatches of a rank overlap: the bad one is unknown
            return int(verdict.place), None
        if evidence is not None and (microbatch := evidence.microbatch) is not None:
            place = self._guard.first_place(evidence.own[microbatch], evidence.loss[microbatch, None])
            assert place is not None
            row = self._row(place)
            own = microbatch, place, self._world.rank, None if row is None else float(evidence.own[microbatch, row])
        found = [theirs for theirs in self._world.gather(own) if theirs is not None]
        if not found:
            return int(verdict.place), None
        microbatch, place, rank, amax = min(found)  # ranks differ: no amax is compared
        return place, Origin(rank, microbatch, amax)

    def _report(
        self,
        step: int,
        place: int,
        origin: Origin | None,
        served: np.ndarray,
        evidence: StepSnapshot | None,
        again: SecondRun | None,
    ) -> BadStep:
        text, row = self._guard.places[place], self._row(place)
        name, _, direction = text.rpartition(" (")
        bad = BadStep(text, what={"module": name.partition(":")[0], "where": direction.strip(")")})
        bad.what["tensor"] = name if row is None else self._arena.names[row]
        if origin is not None and evidence is not None:
            self._add_scale(bad, row, evidence, origin)
        if evidence is None:
            bad.details.append("no details: too many bad steps since the last logged line")
        if again is not None:
            self._add_second_run(bad, again)
        self._add_data(bad, served, origin, again)
        if origin is not None and again is None:
            run = shlex.quote(str(self._run))
            bad.details.append(f"details: python {script('scripts/replay_step.py')} {run} {step}")
        return bad

    def _row(self, place: int) -> int | None:
        """Return the arena row of a place, or None if it has none (the loss, weight gradients)."""
        name, _, direction = self._guard.places[place].rpartition(" (")
        return self._rows.get(name + GRAD_SUFFIX if direction == "backward)" else name)

    def _add_scale(self, bad: BadStep, row: int | None, evidence: StepSnapshot, origin: Origin) -> None:
        """Add amax and scale."""
        if row is not None and origin.amax is not None:
            bad.what["amax"] = _word(origin.amax)
            bad.details.append(f"amax {bad.what['amax']}")
            if (limit := float(self._limit[row])) > 0:
                scale = float(evidence.scale[row])
                bad.what |= {"scale": scale or None, "limit": limit}
                range_ = f"scale {scale:.3g}, for numbers up to {limit / scale:.3g}" if scale else "its own scale"
                bad.details.append(range_)
        if not self._arena.delayed:
            return
        times = torch.where(self._limit > 0, evidence.amax * evidence.scale / self._limit.clamp(min=1.0), 0.0)
        times = torch.where(torch.isfinite(times), times, 0.0)
        worst = int(times.argmax())
        if times[worst] >= CLIPPED:
            name, count = self._arena.names[worst], int((times >= CLIPPED).sum())
            amax, scale = float(evidence.amax[worst]), float(evidence.scale[worst])
            bad.what["clipped"] = {"tensor": name, "amax": amax, "scale": scale, "tensors": count}
            more = f", and {count - 1} more" if count > 1 else ""
            bad.details.append(f"{name} was {times[worst]:.3g} times above its range{more}")

    def _add_second_run(self, bad: BadStep, again: SecondRun) -> None:
        """Add the result of the second run."""
        bad.what["elements"] = again.not_finite
        if not again.not_finite:
            bad.details.append(
                "finite when the same microbatch ran again: the fault was in the computation, not in its data"
            )
            return
        if again.elements == 1:  # the loss
            return
        bad.what["of"] = again.elements
        count = f"{again.not_finite:,} of {again.elements:,} numbers not finite"
        if again.saturated is not None:
            bad.what["saturated"] = again.saturated
            count += f", {100 * again.saturated:.3g} % clipped"
        bad.details.append(count)

    def _add_data(self, bad: BadStep, served: np.ndarray, origin: Origin | None, again: SecondRun | None) -> None:
        """Add the data: the sequences or the microbatch if they are known, else the step's."""
        if origin is not None:
            bad.what |= {"rank": origin.rank, "microbatch": origin.microbatch}
            which = f"rank {origin.rank}, " if self._world.is_distributed else ""
            of = len(served) // self._engine.degrees.data // self.microbatch_size
            bad.details.append(f"{which}microbatch {origin.microbatch} of {of}")
            served = served[self._rows_of(origin, len(served))]
        some = again is not None and 0 < len(again.sequences) < len(served)  # if it is all, the text is not to blame
        if again is not None and some:
            served = served[again.sequences]
        first, last = int(served.min()), int(served.max())
        bad.what["windows"] = [first, last]
        name = window_name(first, last)
        bad.details.append(f"window {name} of the run" if first == last else f"windows {name}")
        if origin is not None:
            bad.what["tokens"] = tokens_of(self._loader, served)
        if origin is not None and (some or len(served) == 1):
            begin, end = bad.what["tokens"][0]
            try:
                bad.what["text"] = text_of(self._loader, self._tokenizer, first)
                text = json.dumps(bad.what["text"], ensure_ascii=False)
            except (OSError, ValueError) as error:  # the report must not end the run
                text = f"({' '.join(str(error).split())})"
            which = "" if len(served) == 1 else "the first one "
            bad.details.append(f"{which}tokens {begin:,} to {end:,} of {self._loader.bins.path.name}: {text}")

    def _rows_of(self, origin: Origin, batch: int) -> slice:
        """Return the sequences of a microbatch among the `batch` of a step."""
        degrees = self._engine.degrees
        group = origin.rank % degrees.stage // degrees.sequence
        start = group * (batch // degrees.data) + origin.microbatch * self.microbatch_size
        return slice(start, start + self.microbatch_size)

    @property
    def _may_run_again(self) -> bool:
        return self._engine.device.type == "cpu" or not self._world.is_distributed

    def _run_again(self, step: int, place: int, served: np.ndarray, origin: Origin) -> SecondRun | None:
        """Run the microbatch again, each rank its own of that number. Return None if memory does not suffice."""
        own = served[self._rows_of(Origin(self._world.rank, origin.microbatch), len(served))]
        tokens = self._loader.gather(own)
        second = None
        if self._engine.injector is not None:
            self._engine.injector.data(served)
        try:
            seen = probe_microbatch(self._engine, step, origin.microbatch, tokens, len(served))
        except torch.OutOfMemoryError:
            if self._world.is_distributed:
                raise
            return None
        if self._world.rank == origin.rank:
            row, at = self._row(place), None
            if row is not None:
                at = seen.rows.get(re.sub(r":weight\.\d+$", ":weight", self._arena.names[row]))
            if row is None and seen.losses is not None:  # the loss: one number
                bad = int(not math.isfinite(float(seen.losses.total)))
                second = SecondRun(bad, 1, None, seen.bad_sequences)
            elif at is not None and at.not_finite:
                second = SecondRun(at.not_finite, at.elements, at.saturated, seen.bad_sequences)
            else:
                second = SecondRun(0, 0, None, [])
        return self._world.gather(second)[origin.rank]


def tokens_of(loader: Loader, numbers: np.ndarray) -> list[list[int]]:
    """Return first and last token of the windows with these numbers in the run's stream, as offsets into the bins."""
    S = loader.length_of(int(numbers[0]))
    return [[int(window) * S, int(window) * S + S] for window in loader.windows_at(numbers)]


def text_of(loader: Loader, tokenizer: Path, number: int, characters: int = CHARACTERS) -> str:
    """Return the beginning of the text of window `number` of the run's stream."""
    tokens = loader.gather(np.array([number]))[0]
    text = load_tokenizer(tokenizer).decode(tokens[: 2 * characters].tolist(), skip_special_tokens=False)
    return text if len(text) <= characters else text[:characters] + "..."


def _word(value: float) -> str | float:
    """Convert a number for JSON."""
    return "NaN" if math.isnan(value) else "inf" if math.isinf(value) else value
