"""The console: a live line on a terminal, plain lines everywhere else.

On a terminal (rich):          In a file, a pipe, CI:

    step  20/200  loss 5.4321 ...     step  20/200  loss 5.4321  lm 5.1234  ...  12,345 tok/s  0:01:10 left
    step  40/200  loss 4.9876 ...     step  40/200  loss 4.9876  lm 4.7012  ...  12,410 tok/s  0:01:02 left
    ━━━━━━━╺━━━━  41/200  loss ...    (one line each logging interval)

The lines are the same. Only the terminal has a progress bar below them, which rich's own thread redraws four times a
second.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

COLUMNS = (
    ("loss/total", "loss", "{:.4f}"),
    ("loss/lm", "lm", "{:.4f}"),
    ("loss/validation", "validation", "{:.4f}"),
    ("optim/grad_norm", "norm", "{:.2f}"),
    ("optim/lr", "lr", "{:.1e}"),
)
"""Metrics shown in a line, if they are logged: key, label, format."""

LABEL = 18
"""Width of the labels of a header or a summary."""
_RATE = "perf/tokens_per_second"
LONGEST = 1e9  # seconds that are shown as left: a run without an end may have more than a timedelta
_SKIPPED = "recovery/skipped_steps"


class Screen:
    """Displays lines and progress. The base class shows nothing, for ranks without the terminal."""

    def line(self, text: Text) -> None:
        """Show a line above the progress."""

    def row(self, label: str, value: str) -> None:
        """Show a label and its value above the progress."""

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""

    def progress(self, step: int) -> None:
        """Show that `step` is done. Cheap enough for every step."""

    def activity(self, what: str) -> None:
        """Show the activity between two steps until the next metrics. Cheap, too."""

    def close(self) -> None:
        """Restore the terminal."""


def open_screen(enabled: bool, first_step: int, max_steps: int, console: Console | None = None) -> Screen:
    """Return the live screen on a terminal, plain lines elsewhere; if not `enabled`, only warnings and the summary."""
    console = console or Console(file=cast(TextIO, BestEffortStream(sys.stdout)), highlight=False)
    if enabled and console.is_terminal and not console.is_dumb_terminal:
        return LiveScreen(console, first_step, max_steps)
    return PlainScreen(console, max_steps, enabled)


def metrics_line(values: Mapping[str, Any], max_steps: int, most: int | None = None) -> Text:
    """Return one line for the metrics of a step: `step  20/200  loss 5.4321  ...`. Labels are dim, values that are not
    finite red.

    most: maximal length in characters. Columns beyond it are left out, the last one first, but never the first or the
    speed.
    """
    columns = [column for column in COLUMNS if values.get(column[0]) is not None]
    line = _line(values, max_steps, columns)
    while most is not None and line.cell_len > most and len(columns) > 1:
        columns.pop()
        line = _line(values, max_steps, columns)
    return line


def _line(values: Mapping[str, Any], max_steps: int, columns: Sequence[tuple[str, str, str]]) -> Text:
    width = len(str(max_steps))
    line = Text(f"step {values['step']:>{width}}/{max_steps}", style="bold")
    line.stylize("not bold", 0, 4)
    for key, label, form in columns:
        line.append(f"  {label} ", "not bold dim")
        line.append(form.format(values[key]), "not bold" if math.isfinite(values[key]) else "bold red")
    if (rate := values.get(_RATE)) is not None:
        line.append(f"  {rate:,.0f}", "not bold").append(" tok/s", "not bold dim")
    if skipped := values.get(_SKIPPED):
        line.append(f"  {skipped} skipped", "not bold yellow")
    return line


class BestEffortStream:
    """A stream that a run may outlive: if its reader, terminal or disk fails, further output is discarded. (rich would
    end the process, on one rank of many.)"""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._leave(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._leave(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _leave(self, error: OSError) -> None:
        logging.getLogger("trainer").info(
            "the terminal cannot be written to (%s): further output is only in this file", error.strerror
        )
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # buffered output goes there too, instead of raising at exit
        os.close(nowhere)


class PlainScreen(Screen):
    """Lines only: a bar, redrawn, would drown them. Long ones are not wrapped: a file or another program reads them."""

    def __init__(self, console: Console, max_steps: int, enabled: bool = True) -> None:
        self._console = console
        self._max_steps = max_steps
        self._enabled = enabled
        self._since: tuple[int, float] | None = None  # the first line: the time before it is mostly compilation
        self._last = 0

    def line(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def row(self, label: str, value: str) -> None:
        self.line(Text(f"{label:<{LABEL}} ", "dim").append(value, "not dim bold") if label or value else Text())

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Show the metrics of a step, and the remaining time at the speed since the first line, or since a rewind."""
        if not self._enabled:
            return
        line = metrics_line(values, self._max_steps)
        if _RATE in values:
            step, now = values["step"], time.monotonic()
            again = step <= self._last  # after a rewind: steps that were trained twice took time twice
            first, began = self._since = (step, now) if again or self._since is None else self._since
            self._last = step
            if step > first:
                seconds = min((now - began) / (step - first) * (self._max_steps - step), LONGEST)
                line.append(f"  {timedelta(seconds=round(seconds))} left", "not bold dim")
        self.line(line)


class LiveScreen(Screen):
    """Lines above a progress bar that stays at the bottom of the terminal."""

    def __init__(self, console: Console, first_step: int, max_steps: int) -> None:
        self._max_steps = max_steps
        self._progress = Progress(
            BarColumn(bar_width=30, style="grey30", complete_style="cyan", finished_style="green"),
            TextColumn("[bold]{task.completed}[/]/{task.total}"),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(),
            TextColumn("left", style="dim"),
            console=console,
            refresh_per_second=4,
            transient=True,  # narrower than the terminal: an echoed ^C must not begin a new line
        )
        self._now = "starting"
        self._task = self._progress.add_task("", total=max_steps, completed=first_step, now=self._now)
        stderr = sys.stderr
        self._progress.start()  # from here on rich replaces stdout and stderr, and prints above the bar
        self._streams = (stderr, sys.stderr)
        _move_log_handlers(*self._streams)

    def line(self, text: Text) -> None:
        self._progress.console.print(text)

    def row(self, label: str, value: str) -> None:
        """Show a label and its value, which wraps in a column of its own."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=LABEL, style="dim")
        grid.add_column(style="bold", overflow="fold")
        grid.add_row(label, Text(value))
        self._progress.console.print(grid)

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Show the metrics of a step above the bar, and the main ones in it."""
        console = self._progress.console
        console.print(metrics_line(values, self._max_steps, console.width), no_wrap=True, overflow="ellipsis")
        now: list[str] = []
        if (loss := values.get("loss/total")) is not None:
            now.append(f"[dim]loss[/] {loss:.4f}")
        if (rate := values.get(_RATE)) is not None:
            now.append(f"{rate:,.0f} [dim]tok/s[/]")
        self._now = "  ".join(now) or self._now
        self._progress.update(self._task, now=self._now)
        self.progress(values["step"])

    def progress(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def activity(self, what: str) -> None:
        self._progress.update(self._task, now=what)

    def close(self) -> None:
        """Remove the bar; the lines stay."""
        stderr, redirected = self._streams
        _move_log_handlers(redirected, stderr)
        self._progress.stop()


def _move_log_handlers(before: TextIO, after: TextIO) -> None:
    """Give logging handlers (torch has one) the current stderr: they keep the one of their creation."""
    for logger in logging.Logger.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") is before:
                handler.setStream(after)
