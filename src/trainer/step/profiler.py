"""Profiles a window of steps: `profile.steps=[10, 12]`.

Two files in the run's folder, for existing viewers:

    profile/trace_step10-12.json.gz     timeline of CPU and GPU: chrome://tracing or https://ui.perfetto.dev
    profile/memory_step10-12.pickle     every allocation on the GPU with its origin: https://pytorch.org/memory_viz

With several ranks, one of each per rank: trace_step10-12_rank0.json.gz, trace_step10-12_rank1.json.gz, ...

Recording slows the steps of the window down, and writing takes a while after it; other steps are unaffected. Choose
steps well after the first, in which blocks are compiled. A run that resumes or ends within the window records the part
that it runs.
"""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.config import ProfileConfig

QUIET = "6"  # Kineto's log level: above the lines that it prints at each start and stop
MAX_ALLOCATIONS = 200_000  # newest events in a memory snapshot; up to a few KB each


class Profiler:
    """Records the window. folder: the run's. on_event(kind, step, message, **what): called when the files are written.
    rank: this one's, None if it is the only one."""

    def __init__(
        self, config: ProfileConfig, folder: Path, device: torch.device, on_event: Callable[..., None], rank: int | None
    ):
        self._window = range(config.steps[0], config.steps[1] + 1) if config.steps else range(0)
        self._folder, self._on_event = folder / "profile", on_event
        self._suffix = "" if rank is None else f"_rank{rank}"
        self._cuda = device.type == "cuda"
        self._memory = config.memory
        self._profile: profile | None = None
        self._span: record_function | None = None
        self._first = self._last = 0

    def begin(self, step: int) -> None:
        """Start recording if the window begins with `step`. Call it before a step."""
        if self._profile is None:
            if step not in self._window:
                return
            self._start(step)
        self._last = step  # below the window's first after a rewind within it
        self._span = record_function(f"step {step}")
        self._span.__enter__()

    def end(self, step: int) -> None:
        """Write the files if `step` ends the window, which takes seconds. Call it after a step."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        if self._profile is not None and self.writes_after(step):
            self._write(self._profile)

    def writes_after(self, step: int) -> bool:
        """Whether `end(step)` writes the files of a recorded window."""
        return len(self._window) > 0 and step == self._window[-1]

    def close(self) -> None:
        """Write an unfinished window at the end of the run, also after an error."""
        try:
            self.end(self._last)
            if self._profile is not None:
                self._write(self._profile)
        except RuntimeError as error:  # after a GPU fault there is nothing to write
            self._report(error)

    def _report(self, error: Exception) -> None:
        message = f"steps {self._first} to {self._last} were recorded, but: {str(error).splitlines()[0]}"
        self._on_event("profile", self._last, message, failed=True)

    def _start(self, step: int) -> None:
        self._first = step
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        if self._cuda:
            torch.cuda.synchronize()  # pending work belongs to the step before
            if self._memory:
                torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_ALLOCATIONS)
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        self._profile = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profile.start()

    def _write(self, recorded: profile) -> None:
        self._profile = None
        if self._cuda:
            torch.cuda.synchronize()
        recorded.stop()
        try:
            self._save(recorded)
        except OSError as error:  # training is worth more
            self._report(error)
        finally:
            if self._cuda and self._memory:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _save(self, recorded: profile) -> None:
        self._folder.mkdir(exist_ok=True)
        window = f"step{self._first}-{self._last}{self._suffix}"
        names = [f"trace_{window}.json.gz"]
        with TemporaryDirectory(dir=self._folder) as new:  # torch would write through a link of that name
            recorded.export_chrome_trace(f"{new}/{names[0]}")
            if self._cuda and self._memory:
                names.append(f"memory_{window}.pickle")
                torch.cuda.memory._dump_snapshot(f"{new}/{names[1]}")
            paths = [Path(new, name).rename(self._folder / name) for name in names]
        message = f"steps {self._first} to {self._last} recorded: {', '.join(path.name for path in paths)}"
        if self._memory and not self._cuda:
            message += "; no memory snapshot, which there is of a GPU only"
        self._on_event("profile", self._last, message, paths=[str(path) for path in paths])
