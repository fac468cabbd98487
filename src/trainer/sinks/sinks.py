"""All sinks of a run behind one object.

                   metrics.jsonl   events.jsonl   console   logs/rank0.log   W&B, TensorBoard
metrics(values)          x                           x             x                x
tensors(entry)      and nothing else: tensors.jsonl
event(kind, ...)                        x            x             x
progress(step), activity(what)                       x
summary(...)                                         x             x

An alert event also becomes a W&B alert; alerts and failures go to `health.notify`, too.

Rank 0 has all sinks. Rank N has logs/rankN.log, which receives everything, and prints only its failures on the screen.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from trainer.config import LoggingConfig
from trainer.config_diff import read_yaml, without_secrets
from trainer.files import last_step_in
from trainer.launch.liveness.job_store import Failure
from trainer.run.names import CONFIG, EVENTS, METRICS, TENSORS
from trainer.run.run_folder import RunFolder
from trainer.sinks.console import Screen, metrics_line, open_screen
from trainer.sinks.jsonl import JsonLines
from trainer.sinks.log_file import LogFile
from trainer.sinks.notify import Notifier, is_sent
from trainer.sinks.trackers import TensorboardTracker, one_line
from trainer.sinks.wandb_tracker import WandbTracker

_EVENT_STYLES = {"checkpoint": "dim", "resume": "cyan", "signal": "yellow", "profile": "cyan", "power": "cyan"}
_OF_ALL = frozenset({"power", "rollback"})  # all ranks reach these alike: rank 0 shows them
_ALARM = "yellow"
_TENSORS_LIMIT = 512 << 20  # bytes; a resume reads 61 MB/s
_LAST_WORD_SECONDS = 3.0  # the other ranks wait for it


@dataclass
class Summary:
    """Result of a finished run. Losses in nats per token; memory in GiB."""

    folder: Path
    step: int
    validation_loss: float
    bigram_loss: float | None
    """None if the data was prepared without it."""
    tokens_per_second: float
    peak_memory_gib: float
    skipped_steps: int


class Sinks:
    """The sinks of a run, a context manager: on exit the terminal is restored and the end recorded.

    Notes from opening the run folder (`run.notes`) become the first events. `rank`: of this process. webhook, command:
    of `health.alerts`. alone: this process is the whole job. `console` is for tests.
    """

    def __init__(
        self,
        logging: LoggingConfig,
        run: RunFolder,
        max_steps: int,
        console: Console | None = None,
        rank: int = 0,
        webhook: str | None = None,
        command: str | None = None,
        alone: bool = True,
    ) -> None:
        self._max_steps, self._rank, self._folder = max_steps, rank, run.path
        self._screen = Screen()
        self._show_events = logging.console.enabled and rank == 0
        log = run.path / "logs" / f"rank{rank}.log"
        self._log = LogFile(log, lambda text: self._screen.line(Text(text, _ALARM)))
        self._notifier = Notifier(webhook, command, run.path, self._warn)
        self._alone = alone
        self._step = run.first_step
        self._logged: int | None = None
        self._metrics: JsonLines | None = None
        self._tensors: JsonLines | None = None
        self._events: JsonLines | None = None
        self._wandb_id: str | None = None
        self._wandb: WandbTracker | None = None
        self._tensorboard: TensorboardTracker | None = None
        if rank != 0:
            return
        self._metrics = JsonLines(run.path / METRICS, self._alarm("disk"))
        self._tensors = JsonLines(run.path / TENSORS, self._alarm("disk"), _TENSORS_LIMIT, self._say)
        self._events = JsonLines(run.path / EVENTS, self._alarm("disk"))
        if logging.wandb.enabled:
            config = without_secrets(read_yaml((run.path / CONFIG).read_bytes()))
            wandb = logging.wandb
            self._wandb = WandbTracker(
                run.path, wandb.project, wandb.entity, wandb.mode.value, config, self._say, self._alarm("wandb")
            )
        if logging.tensorboard.enabled:
            self._tensorboard = TensorboardTracker(run.path / "tensorboard", run.first_step, self._warn)
        # last: an error above leaves the terminal as it was
        self._screen = open_screen(logging.console.enabled, run.first_step, max_steps, console)
        for note in run.notes:
            self.event(note.kind, note.step, note.message, **note.what)

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Log the metrics of a step: Python numbers by slashed key, and `step` (int) among them."""
        if self._metrics is not None:
            self._metrics.write(values)
            self._logged = values["step"]
        self._screen.metrics(values)
        self._log.write(metrics_line(values, self._max_steps).plain)
        for tracker in (self._wandb, self._tensorboard):
            if tracker is not None:
                tracker.metrics(values)

    def tensors(self, entry: Mapping[str, Any]) -> None:
        """Write details by tensor and block (`trainer.health.health`). JSON, with NaN and infinities already null."""
        if self._tensors is not None:
            self._tensors.write(entry, first="names" in entry)  # without it, its lines have no names

    def event(self, kind: str, step: int, message: str, **what: Any) -> None:
        """Record an event; `what` (JSON) adds fields: module, value, path. Thread-safe."""
        event = _event(kind, step, message, what)
        if self._events is not None:
            self._events.write(event)
            if is_sent(kind, what):
                self._notifier.send(event)
            if self._wandb is not None and kind == "alert":
                self._wandb.alert(str(what.get("rule", kind)), message)
        self._log.write(f"{kind}: {message}")
        if self._rank != 0:
            if what.get("failed") and kind not in _OF_ALL:
                print(f"octet: rank {self._rank}: {kind}: {message}", file=sys.stderr, flush=True)
            return
        alarming = what.get("failed") or kind not in _EVENT_STYLES
        if self._show_events or alarming:
            self._screen.line(Text(f"{kind}: {message}", _ALARM if alarming else _EVENT_STYLES[kind]))

    def ended(self, failure: Failure) -> None:
        """Record the end of the job, caused by some rank, and restore the terminal.

        Any thread may call it, and the process exits right after. If rank 0 has died, another rank calls it.
        """
        # a separate file object: the others may be closed, or another rank's
        events = JsonLines(self._folder / EVENTS, self._log.write)
        what = {"rank": failure.rank, "exit_code": failure.code}
        event = _event("failure", failure.step, failure.message, what)
        events.write(event)
        events.close()
        self._log.write(failure.message)
        self._screen.close()
        self._notifier.send(event)
        self._notifier.close(_LAST_WORD_SECONDS)

    def rewind(self, step: int) -> None:
        """Drop metrics later than `step`: the run resumes from it."""
        for file in (self._metrics, self._tensors):
            if file is not None:
                file.trim(step)
        self._logged = last_step_in(self._folder / METRICS)
        if self._tensorboard is not None:
            self._tensorboard.rewind(step)
        self._screen.progress(step)

    def progress(self, step: int) -> None:
        """Show that `step` is done. Costs microseconds: call it every step."""
        self._step = step
        self._screen.progress(step)

    def activity(self, what: str) -> None:
        """Show the activity between two steps, in a few words, until the next metrics."""
        self._screen.activity(what)

    def header(self, rows: Iterable[tuple[str, str]]) -> None:
        """Show what the run will do: labels and values, in the log, and on the screen if it shows progress."""
        for label, value in rows:
            self._row(label, value, self._show_events)

    def log(self, text: str) -> None:
        """Write lines that are on the screen already to the log."""
        for line in text.splitlines():
            self._log.write(line)

    def _row(self, label: str, value: str, is_shown: bool = True) -> None:
        self._log.write(f"{label}: {value}")
        if is_shown:
            self._screen.row(label, value)

    def summary(self, summary: Summary) -> None:
        """Show the run's result, and its folder."""
        bar = "" if summary.bigram_loss is None else f" (bigrams: {summary.bigram_loss:.4f})"
        self._screen.close()
        self._screen.line(Text())
        self._row("validation loss", f"{summary.validation_loss:.4f} nats per token{bar}")
        self._row("tokens per second", f"{summary.tokens_per_second:,.0f}")
        self._row("peak memory", f"{summary.peak_memory_gib:.2f} GiB")
        self._row("skipped steps", f"{summary.skipped_steps} of {summary.step}")
        self._row("run folder", str(summary.folder))

    def state_dict(self) -> dict[str, Any]:
        """Return, for the checkpoint, the W&B run id, which a resumed run continues, and the last step in
        metrics.jsonl."""
        if self._wandb is not None and self._wandb.run_id is not None:
            self._wandb_id = self._wandb.run_id
        return {"wandb_id": self._wandb_id, "logged": self._logged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the W&B run id, and report lines missing from metrics.jsonl. Call it before the first metrics."""
        self._wandb_id = state["wandb_id"]
        if self._wandb is not None:
            self._wandb.run_id = self._wandb_id
        if self._metrics is None:
            return
        self._logged = last_step_in(self._folder / METRICS)
        before = state.get("logged")
        if before is not None and (self._logged is None or self._logged < before):
            ends = "has no lines" if self._logged is None else f"ends at step {self._logged}"
            lost = f"{METRICS} {ends}, and had step {before} when the checkpoint was saved: lines of it are lost"
            self.event("alert", self._step, lost, rule="disk", path=str(self._folder / METRICS))

    def close(self, error: BaseException | None = None) -> None:
        """Close all sinks. The `error` that ended the run goes to the log file with its traceback and to W&B."""
        self._screen.close()
        if error is not None:
            self._log.write(f"stopped by {type(error).__name__}: {error}", error)
            self._notify_of_end(error)
        if self._wandb is not None:
            self._wandb.close(failed=error is not None)
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._notifier.close()
        for file in (self._metrics, self._tensors, self._events, self._log):
            if file is not None:
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def _notify_of_end(self, error: BaseException) -> None:
        """Notify that the run cannot continue, unless the user stopped it. With several ranks `ended` does it, except
        for an error with which all end alike (`RankGroup.judge`)."""
        asked_for = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 1) > 128
        if (self._alone or (self._rank == 0 and hasattr(error, "exit_code"))) and not asked_for:
            self._notifier.send(_event("failure", self._step, one_line(error), {"error": type(error).__name__}))

    def _say(self, text: str) -> None:
        self._log.write(text)
        if self._show_events:
            self._screen.line(Text(text, "dim"))

    def _alarm(self, rule: str) -> Callable[[str], None]:
        """Return a function that raises an alert of this rule: a part beside training does not work."""
        return lambda text: self.event("alert", self._step, text, rule=rule)

    def _warn(self, text: str) -> None:
        self._log.write(text)
        self._screen.line(Text(text, _ALARM))


def _event(kind: str, step: int, message: str, what: Mapping[str, Any]) -> dict[str, Any]:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"time": time, "step": step, "kind": kind, "message": message, **what}
