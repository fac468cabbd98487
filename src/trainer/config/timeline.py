"""The timeline of a run: from the number of a step, what it reads and which settings hold in it.

Everything that changes along a run is a function of the step's number and of the config: batch, microbatch, sequence
length, the tokens read before, loss weights. So a run that resumes, rewinds or continues on another number of processes
needs no state for it, and a skipped step counts like any other: it is an attempt, and has read its tokens.

Tokens are converted to steps here, rounded up: the step that reaches a number of tokens is the last before it. Between
two points the learning rate moves by steps, which in a segment of one batch is the same as by tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from precision.errors import UserError, counted
from trainer.config.phases import Amount, PhaseConfig, Shape, Span, Unit, length, span
from trainer.config.schema import fit
from trainer.config.sections import Config, TrainerConfig

ENDLESS = 2**53
"""Steps of a run with a length in epochs, until the text is known."""
MOST_PARTS = 10_000
"""Of a ramp."""


@dataclass(frozen=True)
class Segment:
    """Steps of one shape. first: number of the first one; before: tokens of all steps before it; batch: sequences in a
    step; section: number of earlier changes of the sequence length."""

    first: int
    before: int
    batch: int
    microbatch: int
    length: int
    section: int

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.length


@dataclass(frozen=True)
class Phase:
    """A phase in steps: those after `begin`, up to `end`."""

    begin: int
    end: int
    config: PhaseConfig


@dataclass(frozen=True)
class LossWeights:
    """Loss weights of a step's phase; None: as in the model's config."""

    mtp: float | None
    router_bias_rate: float | None


class Timeline:
    """The timeline of a `trainer` section. Raises UserError, naming the key, for phases that do not follow each other,
    or a run without an end."""

    def __init__(self, trainer: TrainerConfig):
        t = trainer
        most = length(t.max_tokens) if t.max_tokens is not None else None
        if most is None and t.max_steps is None:
            raise UserError("trainer.max_steps=null: the run has no end; set it, or trainer.max_tokens")
        self._most_tokens = int(most.number) if most is not None and most.unit is Unit.tokens else None
        self._most_steps = ENDLESS if t.max_steps is None else t.max_steps
        self.epochs = most.number if most is not None and most.unit is Unit.epochs else None
        """Length of a run in epochs, until `with_epochs` converts it to tokens."""
        self._length = t.max_tokens
        self._segments = [Segment(1, 0, t.global_batch_size, t.microbatch_size, t.sequence_length, 0)]
        self.phases: list[Phase] = []
        for number, phase in enumerate(t.phases):
            self._add(f"trainer.phases[{number}]", phase, number == len(t.phases) - 1)
        self.steps = self._end()
        """Steps of the whole run."""

    @property
    def segments(self) -> list[Segment]:
        """All segments of the run, in order."""
        return [each for each in self._segments if each.first <= max(self.steps, 1)]

    def at(self, step: int) -> Segment:
        """Return the segment of step number `step`, from 1."""
        return self._segments[bisect_right(self._segments, step, key=lambda each: each.first) - 1]

    def tokens(self, step: int) -> int:
        """Return the tokens read by the end of that step; 0: none."""
        now = self.at(max(step, 1))
        return now.before + (step - now.first + 1) * now.tokens

    def steps_of(self, value: Span) -> int:
        """Return a span in steps from the start: those that reach its tokens, or its share of all steps."""
        amount = _amount(value)
        if amount.unit is Unit.tokens:
            return self._reach(int(amount.number))
        return round(amount.number * self.steps) if amount.unit is Unit.share else int(amount.number)

    def due(self, step: int, every: Span) -> bool:
        """Return whether something with this interval is due after this step. 0: never."""
        amount = _amount(every)
        if not amount.number:
            return False
        if amount.unit is Unit.tokens:
            return self.tokens(step) // amount.number > self.tokens(step - 1) // amount.number
        return step % max(self.steps_of(every), 1) == 0

    def weights(self, step: int) -> LossWeights:
        """Return the loss weights in a step."""
        mtp = rate = None
        for phase in self.phases:
            if phase.begin < step:
                mtp = mtp if phase.config.mtp_loss_weight is None else phase.config.mtp_loss_weight
                given = phase.config.router_bias_update_rate
                rate = rate if given is None else given
        return LossWeights(mtp, rate)

    def may_rise(self, step: int) -> bool:
        """Return whether total loss or gradient norm may rise with this step because a phase begins: with another MTP
        weight or sequence length, or a smaller batch."""
        before, now = self.at(max(step - 1, 1)), self.at(step)
        weighs = self.weights(step).mtp != self.weights(step - 1).mtp
        return step > 1 and (weighs or now.length != before.length or now.batch < before.batch)

    def shrinks(self, step: int) -> float:
        """Return how many times fewer tokens this step has than the one before, because a phase begins; at least 1."""
        return max(self.at(max(step - 1, 1)).tokens / self.at(step).tokens, 1.0)

    def read_by(self, step: int) -> list[tuple[int, int, int]]:
        """Return first step, batch and sequence length of each segment read by the end of a step."""
        shapes: list[tuple[int, int, int]] = []
        for each in self._segments:
            if each.first <= step and (not shapes or shapes[-1][1:] != (each.batch, each.length)):
                shapes.append((each.first, each.batch, each.length))
        return shapes

    def _add(self, key: str, phase: PhaseConfig, is_last: bool) -> None:
        now, begin = self._segments[-1], self.phases[-1].end if self.phases else 0
        if phase.until is None and not is_last:
            raise UserError(f"{key}.until=null: only the last phase ends with the run; set steps, tokens or a share")
        if phase.batch_ramp and (phase.until is None or phase.global_batch_size is None):
            missing = "until" if phase.until is None else "global_batch_size"
            raise UserError(f"{key}.batch_ramp=true: it has no end; set {key}.{missing}")
        after = replace(
            now,
            batch=phase.global_batch_size or now.batch,
            microbatch=phase.microbatch_size or now.microbatch,
            length=phase.sequence_length or now.length,
        )
        if after.length != now.length:
            after = replace(after, section=now.section + 1)
        sizes = [after.batch]
        if phase.batch_ramp:
            if after.batch % now.batch or after.batch <= now.batch:
                why = f"a ramp from {counted(now.batch, 'sequence')} has steps of that size"
                raise UserError(f"{key}.global_batch_size={after.batch}: {why}; set a multiple of {now.batch}")
            if (parts := after.batch // now.batch) > MOST_PARTS:
                each = counted(now.batch, "sequence")
                why = f"a ramp in steps of {each} has {parts:,} parts, and at most {MOST_PARTS:,}"
                raise UserError(f"{key}.global_batch_size={after.batch}: {why}; begin with a larger batch")
            sizes = list(range(now.batch, after.batch, now.batch))
        self._begin_at(begin, replace(after, batch=sizes[0]))
        if phase.until is None:
            self.phases.append(Phase(begin, ENDLESS, phase))
            return
        if self.epochs is not None and _amount(phase.until).unit is Unit.share:
            why = "with a length in epochs the text has to be read first"
            raise UserError(f"trainer.max_tokens={self._length}: {why}; set tokens, or phases in steps or tokens")
        until = self._end_of(phase.until)
        start = begin if until.unit is Unit.steps else self.tokens(begin)
        if until.number <= start:
            raise UserError(
                f"{key}.until={phase.until}: the previous phase ends at {start:,} {until.unit.value}; set more"
            )
        for number, size in enumerate(sizes, 1):
            share = start + (until.number - start) * number / len(sizes)
            end = self._last_step(Amount(round(share), until.unit))
            if number < len(sizes):
                self._begin_at(end, replace(after, batch=size + sizes[0]))
        if phase.batch_ramp:
            self._begin_at(end, after)
        self.phases.append(Phase(begin, end, phase))

    def last_step_of(self, end: Span) -> int:
        """Return the last step before the end of a phase, or of a move of the learning rate."""
        return self._last_step(self._end_of(end))

    def _end_of(self, value: Span) -> Amount:
        """Return the end of a phase, in steps or tokens. A share is one of tokens if the length of the run is."""
        amount = _amount(value)
        if amount.unit is not Unit.share:
            return amount
        if self._most_tokens is not None:
            return Amount(round(amount.number * self._most_tokens), Unit.tokens)
        return Amount(round(amount.number * self._most_steps), Unit.steps)

    def _begin_at(self, end: int, shape: Segment) -> None:
        """Give steps after `end` this shape."""
        now = self._segments[-1]
        if (now.batch, now.microbatch, now.length) == (shape.batch, shape.microbatch, shape.length):
            return
        begun = replace(shape, first=end + 1, before=self.tokens(end))
        while self._segments and self._segments[-1].first >= begun.first:
            self._segments.pop()
        self._segments.append(begun)

    def _last_step(self, amount: Amount) -> int:
        return int(amount.number) if amount.unit is Unit.steps else self._reach(int(amount.number))

    def _reach(self, tokens: int) -> int:
        """Return the first step that ends with this many tokens read."""
        if tokens <= 0:
            return 0
        now = self._segments[bisect_left(self._segments, tokens, key=lambda each: each.before) - 1]
        return now.first - 1 - (now.before - tokens) // now.tokens

    def _end(self) -> int:
        if self._most_tokens is None:
            return self._most_steps
        return min(self._most_steps, self._reach(self._most_tokens))


def _amount(value: Span) -> Amount:
    amount = span(value)
    assert amount is not None, f"{value} was not loaded by the schema"
    return amount


def shaped(config: Config, segment: Segment) -> Config:
    """Return the config of a run whose steps all have one shape, for code that judges one step."""
    t = config.trainer
    sizes = {"global_batch_size": segment.batch, "microbatch_size": segment.microbatch}
    return replace(config, trainer=replace(t, **sizes, sequence_length=segment.length, phases=[]))


def each_shape(config: Config) -> Iterator[tuple[Segment, Config]]:
    """Yield all shapes of a run, with `shaped`."""
    for segment in Timeline(config.trainer).segments:
        yield segment, shaped(config, segment)


def peak_memory(config: Config) -> Segment:
    """Return the segment with most memory: the largest microbatch in tokens, then the most microbatches."""
    segments = Timeline(config.trainer).segments
    return max(segments, key=lambda each: (each.microbatch * each.length, each.tokens))


def at_peak_memory(config: Config) -> Config:
    """Return `shaped` for the steps with most memory."""
    return shaped(config, peak_memory(config)) if config.trainer.phases else config


def with_epochs(config: Config, tokens: int) -> Config:
    """Convert a run's length from epochs to tokens of a text of this size."""
    t = config.trainer
    epochs = Timeline(t).epochs
    if epochs is None:
        return config
    return replace(config, trainer=replace(t, max_tokens=max(round(epochs * tokens), 1)))


def rates(timeline: Timeline) -> list[tuple[int, int, float, Shape]]:
    """Return the phases that move the learning rate: (steps before, last step, rate, shape)."""
    moves = []
    for each in timeline.phases:
        if each.config.lr is not None:
            until = each.config.lr_until
            end = timeline.steps if each.end == ENDLESS else each.end
            end = end if until is None else timeline.last_step_of(until)
            moves.append((each.begin, end, each.config.lr, each.config.lr_shape))
    return moves


def steps_of_tree(tree: Any, of: Any = None) -> int | None:
    """Return the steps of the run with this plain tree as its config, of any age, or `of` a span of it; None if
    unknown."""
    trainer = tree.get("trainer") if isinstance(tree, dict) else None
    given = of if of is not None else trainer.get("max_steps") if isinstance(trainer, dict) else None
    try:
        timeline = Timeline(fit(trainer, TrainerConfig, lambda key, value: key))
        return timeline.steps if of is None else timeline.steps_of(of) if span(of) is not None else None
    except (UserError, AttributeError, TypeError):
        return given if isinstance(given, int) else None


def last_step(config: Config) -> str:
    """Return the key that sets the end of a run, and the resulting step, for a message."""
    t = config.trainer
    steps = Timeline(t).steps
    if t.max_steps == steps:
        return f"trainer.max_steps={steps}"
    return f"trainer.max_tokens={t.max_tokens} ({counted(steps, 'step')})"
