"""The ladder: reactions to bad steps, one rung after the other.

    1  a step is dropped                                              `guard`, on the device
    2  more than `max_consecutive_skips` in a row: a *rewind*, back to the newest whole checkpoint from before the row;
       its data is read again up to the row, what the row read is left out from then on
    3  the same trouble again, before a checkpoint was saved beyond it: from an older checkpoint, if there is one
    4  after `rewind.max` rewinds for the same trouble, or without a checkpoint: stop, and say what happened

SkippedStep steps change nothing, so that weights and moments at the end of a row are those from before it. But
something led up to the row: data that pushed the weights to where these batches break them, moments that are too
small for what comes. PaLM (arXiv 2204.02311, 5.1) went back some 100 steps before a spike and left out 200 to 500
batches; the same data from another checkpoint did no harm.

`recovery.json` in the run folder holds all rewinds of a run, written before anything else changes, so that a crash
right after a rewind forgets neither what is left out nor how often the run went back. Checkpoints hold the row, for a
run that is stopped in the middle of one. All ranks read the same verdicts and climb together; rank 0 chooses and
writes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from precision.errors import UserError
from trainer.checkpoint import (
    OnEvent,
    Verify,
    checkpoint_name,
    checkpoint_step,
    newest_checkpoint,
    verify_checkpoint,
)
from trainer.config.recovery import RecoveryConfig
from trainer.data.loader import put_together
from trainer.digests import read_signed, write_signed
from trainer.run.run_folder import RECOVERY
from trainer.step.guard import TrainingStopped


@dataclass
class SkippedStep:
    """A step of a row of dropped ones: its number, the windows of the run's stream that it read, and where it went bad
    first."""

    step: int
    begin: int
    end: int
    place: str


@dataclass
class Rewind:
    """A rewind. step: after which it was decided; first: the first step of the row; to: the checkpoint's step; attempt:
    how often for the same trouble, from 1; windows: [begin, end) of the run's stream that are left out from now on;
    lr_factor, lr_until: the learning rate's, and the number of committed steps up to which it holds."""

    step: int
    first: int
    to: int
    attempt: int
    windows: list[list[int]]
    lr_factor: float
    lr_until: int


class Ladder:
    """Decides for a run. folder: of the run; batch: windows in a batch."""

    def __init__(self, config: RecoveryConfig, folder: Path, batch: int):
        self._config, self._folder, self._batch = config, folder, batch
        self.streak: list[SkippedStep] = []
        self.rewinds: list[Rewind] = []

    def note(self, dropped: SkippedStep | None) -> None:
        """A step was reviewed, in the order of steps: dropped, or (None) committed."""
        self.streak = [*self.streak, dropped] if dropped is not None else []

    @property
    def exhausted(self) -> bool:
        """Whether too many steps in a row were dropped."""
        return len(self.streak) > self._config.max_consecutive_skips

    @property
    def streak_begins(self) -> int | None:
        """First step of the current streak: a checkpoint from before it may be needed. None: no streak."""
        return self.streak[0].step if self.streak else None

    def choose(
        self, committed: int, checkpoints: Path, on_event: OnEvent, verify: Verify = verify_checkpoint
    ) -> Rewind | str:
        """The rewind that the row calls for, or why there can be none. committed: steps up to the row; verify: of the
        checkpoints."""
        first, last = self.streak[0].step, self.streak[-1].step
        if not self._config.rewind.max:
            return "recovery.rewind.max=0"
        target = _step(newest_checkpoint(checkpoints, on_event, first, verify))
        if target is None:
            return f"there is no whole checkpoint from before step {first} to go back to"
        attempt, before = 1, self.rewinds[-1] if self.rewinds else None
        if before is not None and target <= before.step:  # none was saved beyond it: the same trouble
            attempt = before.attempt + 1
            older = _step(newest_checkpoint(checkpoints, on_event, min(before.to, first), verify))
            target = target if older is None else older
        if attempt > self._config.rewind.max:
            steps = ", ".join(str(rewind.to) for rewind in self.rewinds[-(attempt - 1) :])
            often = "once" if attempt == 2 else f"{attempt - 1} times"
            return f"the run went back {often} already (to step {steps}) and it came again"
        rewind = self._config.rewind
        until = committed + rewind.lr_steps if rewind.lr_factor < 1 else 0
        return Rewind(last, first, target, attempt, self._left_out(), rewind.lr_factor, until)

    def _left_out(self) -> list[list[int]]:
        margin = self._config.rewind.margin * self._batch
        return put_together([max(step.begin - margin, 0), step.end + margin] for step in self.streak)

    def take(self, choice: Rewind | str, step: int, on_event: OnEvent) -> str:
        """Accept what rank 0 chose after `step`. Returns the message; TrainingStopped, with the diagnosis, if the run
        is to end here."""
        row, limit = self.streak, self._config.max_consecutive_skips
        count = f"{len(row)} step{'s' if len(row) > 1 else ''} in a row"
        where = f"from step {row[0].step} on, first at {row[0].place}"
        if len(row) > 1:
            where += f", the last one at {row[-1].place}"
        what = f"{count} dropped (recovery.max_consecutive_skips={limit}), {where}"
        if isinstance(choice, str):
            on_event("rollback", step, f"{what}; {choice}: the run stops", failed=True)
            raise TrainingStopped(f"{what}; {choice}. {self._advice(choice)}")
        self.rewinds.append(choice)
        self.streak = []
        windows = ", ".join(f"{begin:,} to {end - 1:,}" for begin, end in choice.windows)
        lower = f", learning rate times {choice.lr_factor:g} for a while" if choice.lr_until else ""
        return f"{what}; back to {checkpoint_name(choice.to)}, without windows {windows} of the run from now on{lower}"

    def _advice(self, why: str) -> str:
        spikes = any("(spike)" in step.place for step in self.streak)
        hints = [
            "a lower optim.lr",
            "+recipe=bf16",
            "a higher recovery.spikes.threshold" if spikes else "precision.rules for that module",
        ]
        if "came again" in why:
            hints.append(f"recovery.rewind.max={self._config.rewind.max + 2} for more attempts")
        return (
            f"Look at {self._folder / 'events.jsonl'} for where each began; then resume with run.resume=auto and "
            f"{', '.join(hints[:-1])} or {hints[-1]}"
        )

    @property
    def left_out(self) -> list[list[int]]:
        """[begin, end) of all windows of the run's stream that are left out."""
        return put_together(windows for rewind in self.rewinds for windows in rewind.windows)

    @property
    def lowered(self) -> tuple[float, int]:
        """Factor of the learning rate, and the number of committed steps up to which it holds."""
        return (self.rewinds[-1].lr_factor, self.rewinds[-1].lr_until) if self.rewinds else (1.0, 0)

    def write(self, choice: Rewind, on_event: OnEvent) -> None:
        """Put all rewinds and `choice` into the run folder. A disk that takes nothing does not end the run."""
        rewinds = [asdict(rewind) for rewind in [*self.rewinds, choice]]
        path = self._folder / RECOVERY
        try:
            write_signed(path, {"rewinds": rewinds})
        except OSError as error:
            why = f"{path} cannot be written ({error.strerror or error}): this rewind is forgotten if the run is killed"
            on_event("rollback", choice.step, why, failed=True)

    def read(self) -> list[dict[str, Any]]:
        """All rewinds in the run folder, for `load_state_dict`. UserError if the file is damaged."""
        path = self._folder / RECOVERY
        if not path.is_file():
            return []
        why = "remove it, and what was left out of the data is read again"
        entries = read_signed(path, ("rewinds",), why)["rewinds"]
        try:
            return [asdict(_rewind(entry)) for entry in entries]
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}: it is damaged ({type(error).__name__}: {error}); {why}") from error

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: the row."""
        return {"streak": [asdict(step) for step in self.streak]}

    def load_state_dict(self, state: Mapping[str, Any], rewinds: Sequence[Mapping[str, Any]]) -> None:
        """Resume from a checkpoint. rewinds: as rank 0 has read them."""
        self.streak = [SkippedStep(**step) for step in state.get("streak", [])]
        self.rewinds = [_rewind(entry) for entry in rewinds]


def _rewind(entry: Mapping[str, Any]) -> Rewind:
    return Rewind(**{field.name: entry[field.name] for field in fields(Rewind)})


def _step(checkpoint: Path | None) -> int | None:
    return None if checkpoint is None else checkpoint_step(checkpoint)
