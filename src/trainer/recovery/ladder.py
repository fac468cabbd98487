"""The ladder: reactions to bad steps, one rung after the other.

    1  a step is skipped                                              `guard`, on the device
    2  more than `max_consecutive_skips` in a row: a *rewind* to the newest valid checkpoint from before the streak;
       data before the streak is read again, data of the streak is left out from then on
    3  the same trouble again, before a checkpoint was saved beyond it: from an older checkpoint, if there is one
    4  after `rewind.max` rewinds for the same trouble, or without a checkpoint: stop, and report what happened

Skipped steps change nothing: weights and moments at the end of a streak are those from before it. But something led to
the streak: data that moved the weights to where these batches break them, or moments that are too small for what comes.
PaLM (arXiv 2204.02311, 5.1) restarted some 100 steps before a spike and skipped 200 to 500 batches; the same data from
another checkpoint did no harm.

`recovery.json` in the run folder holds all rewinds of a run. It is written before anything else changes: a crash right
after a rewind loses neither the windows left out nor the number of rewinds. Checkpoints hold the streak, for a run that
is stopped within one. All ranks read the same verdicts and act together; rank 0 chooses and writes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from precision.errors import UserError, counted
from trainer.checkpoint import OnEvent, Verify, checkpoint_name, checkpoint_step, newest_checkpoint, verify_checkpoint
from trainer.config.health import TO_BF16
from trainer.config.paths import resuming
from trainer.config.recovery import RecoveryConfig
from trainer.data.loader import SECTION, Loader, merge_ranges, window_name
from trainer.digests import read_signed, write_signed
from trainer.optim.adamw import LearningRate
from trainer.run.names import RECOVERY
from trainer.step.guard import TrainingStopped


@dataclass
class SkippedStep:
    """A skipped step of a streak: its number, its windows of the run's stream, and the place that went bad first."""

    step: int
    begin: int
    end: int
    place: str


@dataclass
class Rewind:
    """A rewind. step: after which it was decided; first: the first step of the streak; to: the checkpoint's step;
    attempt: number for the same trouble, from 1; windows: [begin, end) of the run's stream that are left out from now
    on; lr_factor, lr_until: factor of the learning rate, and the number of committed steps up to which it holds."""

    step: int
    first: int
    to: int
    attempt: int
    windows: list[list[int]]
    lr_factor: float
    lr_until: int


class Ladder:
    """The reactions of a run. folder: of the run; batch: windows in a batch, now; in_fp8, in_fp16: whether it has FP8
    or computes in FP16."""

    def __init__(self, config: RecoveryConfig, folder: Path, batch: int, in_fp8: bool = True, in_fp16: bool = False):
        self._config, self._folder, self.batch, self._in_fp8 = config, folder, batch, in_fp8
        self._in_fp16 = in_fp16
        self.streak: list[SkippedStep] = []
        self.rewinds: list[Rewind] = []

    def note(self, skipped: SkippedStep | None) -> None:
        """Record the next reviewed step: skipped, or (None) committed. Steps come in order."""
        self.streak = [*self.streak, skipped] if skipped is not None else []

    @property
    def exhausted(self) -> bool:
        """Whether too many steps in a row were skipped."""
        return len(self.streak) > self._config.max_consecutive_skips

    @property
    def streak_begins(self) -> int | None:
        """First step of the current streak, or None. A checkpoint from before it may be needed."""
        return self.streak[0].step if self.streak else None

    def choose(
        self, committed: int, checkpoints: Path, on_event: OnEvent, verify: Verify = verify_checkpoint
    ) -> Rewind | str:
        """Return the rewind for the streak, or the reason why there is none. committed: steps before the streak;
        verify: of the checkpoints."""
        first, last = self.streak[0].step, self.streak[-1].step
        if not self._config.rewind.max:
            return "recovery.rewind.max=0"
        target = _step(newest_checkpoint(checkpoints, on_event, first, verify))
        if target is None:
            return f"there is no intact checkpoint from before step {first}"
        rewinds = [rewind for rewind in self.rewinds if rewind.to < first]  # others belong to a discarded course
        attempt, before = 1, rewinds[-1] if rewinds else None
        if before is not None and target <= before.step:  # no checkpoint was saved beyond it: the same trouble
            attempt = before.attempt + 1
            older = _step(newest_checkpoint(checkpoints, on_event, min(before.to, first), verify))
            target = target if older is None else older
        if attempt > self._config.rewind.max:
            steps = ", ".join(str(rewind.to) for rewind in rewinds[-(attempt - 1) :])
            often = "once" if attempt == 2 else f"{attempt - 1} times"
            return f"the run has rewound {often} already (to step {steps}), and the trouble recurred"
        rewind = self._config.rewind
        until = committed + rewind.lr_steps if rewind.lr_factor < 1 else 0
        return Rewind(last, first, target, attempt, self._left_out(), rewind.lr_factor, until)

    def _left_out(self) -> list[list[int]]:
        margin = self._config.rewind.margin * self.batch
        return merge_ranges(
            [max(step.begin - margin, step.begin // SECTION * SECTION), step.end + margin] for step in self.streak
        )

    def take(self, choice: Rewind | str, step: int, on_event: OnEvent) -> str:
        """Accept rank 0's choice after `step`. Return the message; raise TrainingStopped with the diagnosis to end the
        run."""
        row, limit = self.streak, self._config.max_consecutive_skips
        count = f"{counted(len(row), 'step')} in a row"
        where = f"from step {row[0].step} on, first at {row[0].place}"
        if len(row) > 1:
            where += f", the last one at {row[-1].place}"
        what = f"{count} skipped (recovery.max_consecutive_skips={limit}), {where}"
        if isinstance(choice, str):
            on_event("rollback", step, f"{what}; {choice}: the run stops", failed=True)
            raise TrainingStopped(f"{what}; {choice}. {self._advice(choice)}")
        self.rewinds.append(choice)
        self.streak = []
        windows = ", ".join(window_name(begin, end - 1) for begin, end in choice.windows)
        lower = f"; learning rate times {choice.lr_factor:g} for a while" if choice.lr_until else ""
        skipped = f"windows {windows} of the run are skipped from now on"
        return f"{what}; rewinding to {checkpoint_name(choice.to)}; {skipped}{lower}"

    def _advice(self, why: str) -> str:
        spikes = any("(spike)" in step.place for step in self.streak)
        to_bf16 = [TO_BF16] if self._in_fp8 else ["+recipe=bf16"] if self._in_fp16 else []
        hints = ["a lower optim.lr", *to_bf16]
        if spikes:
            hints.append("a higher recovery.spikes.threshold")
        elif self._in_fp8:
            hints.append("precision.rules for that module")
        if "recurred" in why:
            hints.append(f"recovery.rewind.max={self._config.rewind.max + 2} for more attempts")
        listed = f"{', '.join(hints[:-1])} or {hints[-1]}" if len(hints) > 1 else hints[0]
        where = f"Look at {self._folder / 'events.jsonl'} for where each began"
        return f"{where}; then resume with {resuming(self._folder)} and {listed}"

    def apply(self, step: int, loader: Loader, schedule: LearningRate) -> None:
        """Before a step, apply the windows left out and the lowered rate of the rewinds up to the last one that went
        back to before it: a run that resumes from an older checkpoint repeats what it did until then."""
        last = max((i for i, rewind in enumerate(self.rewinds) if rewind.to < step), default=-1)
        if last >= 0:
            done = self.rewinds[: last + 1]
            loader.leave_out(merge_ranges(windows for rewind in done for windows in rewind.windows))
            schedule.lower(done[-1].lr_factor, done[-1].lr_until)

    def begins(self, step: int) -> bool:
        """Return whether a step is the first after a checkpoint that a rewind went back to."""
        return any(rewind.to == step - 1 for rewind in self.rewinds)

    def write(self, choice: Rewind, on_event: OnEvent) -> None:
        """Write all rewinds and `choice` to the run folder. A failing disk does not end the run."""
        path = self._folder / RECOVERY
        try:
            write_signed(path, {"rewinds": [asdict(rewind) for rewind in [*self.rewinds, choice]]})
        except OSError as error:
            why = f"{path} cannot be written ({error.strerror or error}): this rewind is lost if the run is killed"
            on_event("rollback", choice.step, why, failed=True)

    def read(self) -> list[Rewind]:
        """Return all rewinds in the run folder. Raises UserError if the file is damaged."""
        path = self._folder / RECOVERY
        if not path.is_file():
            return []
        why = "remove it; the data that was left out is then read again"
        entries = read_signed(path, ("rewinds",), why)["rewinds"]
        try:
            return [Rewind(**{field.name: entry[field.name] for field in fields(Rewind)}) for entry in entries]
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}: it is damaged ({type(error).__name__}: {error}); {why}") from error

    def state_dict(self) -> dict[str, Any]:
        """Return the streak, for the checkpoint."""
        return {"streak": [asdict(step) for step in self.streak]}

    def load_state_dict(self, state: Mapping[str, Any], rewinds: list[Rewind]) -> None:
        """Resume from a checkpoint. rewinds: as read by rank 0."""
        self.streak = [SkippedStep(**step) for step in state.get("streak", [])]
        self.rewinds = rewinds


def _step(checkpoint: Path | None) -> int | None:
    return None if checkpoint is None else checkpoint_step(checkpoint)
