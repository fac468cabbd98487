"""Saves the state of a run in the background.

    save      on the trainer's thread: take the tree apart, copy its tensors to host buffers (pinned if there is a GPU,
              kept from save to save), hand them to the writing thread, continue training
    write     into checkpoints/.writing_step_N: tensors through DCP, state.json, the manifest; everything fsync'ed
    rename    to checkpoints/step_N: here it becomes visible, whole or not at all
    delete    what exceeds `keep`: only now, so that there is always a whole one

Of many ranks, each copies and writes its own parts, in a file of its own; rank 0 also what all have alike. The writing
threads agree over a gloo group of theirs, which the trainers do not use: rank 0 plans, waits for every rank's file,
sees that it is there, writes the manifest and renames. So a rank that dies or fails before that leaves no checkpoint of
the step, and the ones before.

A failed save (disk full, folder not writable) costs that checkpoint and nothing else: it is an alert through
`on_event`, what was half written is removed, the ones before stay, and training continues; `wait()` raises it for those
who must know.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from precision.errors import UserError
from trainer.checkpoint.folder import (
    WRITING,
    OnEvent,
    checkpoint_name,
    delete_leftovers,
    delete_superseded,
    list_checkpoints,
    newest_checkpoint,
    set_aside_after,
    superseded,
)
from trainer.checkpoint.shard_view import ShardView
from trainer.checkpoint.staging import HostBuffers
from trainer.checkpoint.state_tree import split

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer.launch.world import World

WAIT = timedelta(hours=2)
"""How long a rank's writing thread waits for the slowest other one. A rank that dies ends the wait at once."""


class CheckpointError(OSError):
    """A checkpoint could not be written; the message names the path and the reason."""


class Checkpointer:
    """Writes checkpoints of one run into `folder` (`RUN/checkpoints`), the `keep` newest of which stay (0: all).

    `on_event` hears of every checkpoint saved, failed or found damaged; it is called from the writing thread too.
    What a killed process left half written is deleted here, so hold the run's lock. world: who saves; with several
    ranks all of them make one (a collective), and rank 0's hears of events.
    """

    def __init__(self, folder: Path, keep: int, on_event: OnEvent, world: "World | None" = None) -> None:
        if keep < 0:
            raise UserError(f"checkpoint.keep={keep}: how many checkpoints stay, 1 or more, or 0 for all")
        self.folder = folder
        self._keep = keep
        self._on_event = on_event
        self._buffers = HostBuffers()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._last = -1
        self._last_reported = ""
        self._group: ProcessGroup | None = None
        self._is_first, self._attempt = True, ""
        if world is not None and world.many:
            import torch.distributed as dist

            self._group = cast("ProcessGroup", dist.new_group(backend="gloo", timeout=WAIT))
            self._is_first = world.is_first
            # ranks of a run that was killed may be writing still
            self._attempt = world.share(f".{time.time_ns():x}")
        if self._is_first:
            delete_leftovers(folder)

    def announce(self, step: int, before: int | None = None) -> None:
        """A run resumes from `step`: say if the next save will delete more than the one checkpoint that it replaces,
        because `keep` was larger before. before: as for `save`."""
        found = list_checkpoints(self.folder)
        doomed = superseded([*found, self.folder / checkpoint_name(step + 1)], self._keep, before)
        if self._is_first and len(doomed) > 1:
            which = f"{len(doomed)} checkpoints, {doomed[0].name} to {doomed[-1].name}"
            self._on_event("checkpoint", step, f"checkpoint.keep={self._keep}: the next save deletes {which}")

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Get the host memory that saves of `state` need now, so that the first one holds training up no longer than
        the others."""
        self._buffers.reserve(self._own(split(state)[1])[1])

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        meta: Mapping[str, Any],
        began: float | None = None,
        before: int | None = None,
    ) -> None:
        """Save `state` (a tree of tensors, `ShardView`s and JSON scalars, see `tree`) as the checkpoint of `step`.

        Returns when the tensors have been copied: they may change from here on. Waits for the save before, if that is
        still being written, because it occupies the buffers. `meta` is JSON for people and tools: it can be read
        without any tensor. A step that is saved already is not saved again: in one run, a step has one state.
        began: when training stopped for it (`time.perf_counter`), if that was before the call. before: the newest
        checkpoint of a step below it stays, even beyond `keep`, until the next save.

        All ranks call it for the same steps, with states of the same names; what is not a `ShardView`, rank 0's is
        saved. No rank waits for another one here.

        Raises TypeError or UserError for a state that cannot be saved. Errors of the disk are not raised here, see
        `wait`.
        """
        began = time.perf_counter() if began is None else began
        if self._pending is not None:
            error = self._pending.exception()  # waits
            if error is not None and not isinstance(error, CheckpointError):
                raise error
            self._last = self._last if error is None else -1
        if step == self._last or (self._group is None and os.path.isdir(self.folder / checkpoint_name(step))):
            return
        skeleton, tensors = split(state)
        text = json.dumps({"step": step, "meta": meta, "state": skeleton}, indent=1)
        parts, own = self._own(tensors)
        copies = self._buffers.copy(own)
        held = time.perf_counter() - began
        staged = {name: replace(parts[name], data=copy) for name, copy in copies.items()}
        self._last = step
        self._pending = self._thread.submit(self._write, step, staged, text, held, before)

    def wait(self) -> None:
        """Return when the last save is on the disk. Raises its error (CheckpointError), once, if it is not."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except CheckpointError:
                self._last = -1  # it may be tried again
                raise

    def settle(self) -> None:
        """Return when nothing is being written any more, successful or not."""
        if self._pending is not None:
            self._pending.exception()

    def go_back(self, step: int) -> None:
        """The run resumes from the checkpoint of `step`: later ones are taken out of use, and may be saved again."""
        self._last = step
        if self._is_first:
            set_aside_after(self.folder, step)

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies; damaged ones are named through `on_event` and passed over."""
        return newest_checkpoint(self.folder, self._on_event)

    def close(self) -> None:
        """Finish what is being written and release the buffers. Raises as `wait` does."""
        self._thread.shutdown()
        self._buffers.release()
        self.wait()

    def _own(self, tensors: Mapping[str, Tensor | ShardView]) -> tuple[dict[str, ShardView], dict[str, Tensor]]:
        """What this rank writes: the parts, and the tensors that they are kept in."""
        parts = {
            name: x if isinstance(x, ShardView) else ShardView.whole(x, self._is_first) for name, x in tensors.items()
        }
        parts = {name: part for name, part in parts.items() if part.writes and not part.is_empty}
        return parts, {name: part.data for name, part in parts.items()}

    def _write(self, step: int, parts: dict[str, ShardView], text: str, held: float, before: int | None) -> None:
        from trainer.checkpoint.dcp import CheckpointWriter, save_parts

        start = time.perf_counter()
        path = self.folder / checkpoint_name(step)
        temporary = self.folder / f"{WRITING}{path.name}{self._attempt}"
        try:
            files = save_parts(CheckpointWriter(temporary, path, text), parts, self._group)
        except OSError as error:
            reason = f"step {step} could not be written to {path}: {error.strerror or error}"
            if self._is_first:
                shutil.rmtree(temporary, ignore_errors=True)
                if reason != self._last_reported:  # by the attempt before
                    self._on_event("alert", step, reason, rule="checkpoint", path=str(path), failed=True)
                self._last_reported = reason
            raise CheckpointError(
                f"checkpoint of {reason}; earlier checkpoints are intact, free space or set run.dir"
            ) from error
        if not self._is_first:
            return
        seconds = time.perf_counter() - start
        size = sum(digest.bytes for digest in files.values())
        try:
            delete_superseded(self.folder, step, self._keep, before)
        except OSError as error:
            message = f"old checkpoints in {self.folder} could not be deleted: {error}"
            self._on_event("alert", step, message, rule="disk", path=str(self.folder), failed=True)
        what = {"path": str(path), "bytes": size, "seconds": round(seconds, 3), "held_seconds": round(held, 4)}
        message = f"saved {path.name} ({size / 2**20:.1f} MiB in {seconds:.1f} s; training waited {held:.2f} s)"
        self._on_event("checkpoint", step, message, **what)
