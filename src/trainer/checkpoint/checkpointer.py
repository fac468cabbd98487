"""Saves the state of a run in the background, and reads it back.

    save      on the trainer's thread: take the tree apart, copy its tensors to host buffers (pinned if there is a GPU,
              kept from save to save), hand them to the writing thread, go on training
    write     into checkpoints/.writing_step_N: tensors through DCP, state.json, the manifest; everything fsync'ed
    rename    to checkpoints/step_N: here it becomes visible, whole or not at all
    delete    what exceeds `keep`: only now, so that there is always a whole one

A failed save (disk full, folder not writable) costs that checkpoint and nothing else: it is reported through
`on_event`, what was half written is removed, the ones before stay, and training goes on; `wait()` raises it for those
who must know.
"""

import json
import shutil
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from trainer.checkpoint.folder import (
    WRITING,
    OnEvent,
    checkpoint_name,
    delete_leftovers,
    delete_superseded,
    newest_checkpoint,
)
from trainer.checkpoint.manifest import FileDigest, seal, sync_folder, verify, write_file
from trainer.checkpoint.staging import HostBuffers
from trainer.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from trainer.checkpoint.tree import join, split

STATE = "state.json"

# DCP says so even when it is told that there is only one process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(OSError):
    """A checkpoint could not be written; the message names the path and the reason."""


class Checkpointer:
    """Writes checkpoints of one run into `folder` (`RUN/checkpoints`), the `keep` newest of which stay (0: all).

    `on_event` hears of every checkpoint saved, failed or found damaged; it is called from the writing thread too.
    What a killed process left half written is deleted here, so hold the run's lock.
    """

    def __init__(self, folder: Path, keep: int, on_event: OnEvent) -> None:
        if keep < 0:
            raise ValueError(f"checkpoint.keep={keep}: how many checkpoints stay, 1 or more, or 0 for all")
        self.folder = folder
        self._keep = keep
        self._on_event = on_event
        self._buffers = HostBuffers()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        delete_leftovers(folder)

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Save `state` (a tree of tensors and JSON scalars, see `tree`) as the checkpoint of `step`.

        Returns when the tensors have been copied: they may change from here on. Waits for the save before, if that is
        still being written, because it occupies the buffers. `meta` is JSON for people and tools: it can be read
        without any tensor. A step that is saved already is not saved again: in one run, a step has one state.

        Raises TypeError or ValueError for a state that cannot be saved. Errors of the disk are not raised here, see
        `wait`.
        """
        if self._pending is not None:
            error = self._pending.exception()  # waits
            if error is not None and not isinstance(error, CheckpointError):
                raise error
        if (self.folder / checkpoint_name(step)).is_dir():
            return
        skeleton, tensors = split(state)
        text = json.dumps({"step": step, "meta": meta, "state": skeleton}, indent=1)
        self._pending = self._thread.submit(self._write, step, self._buffers.copy(tensors), text)

    def wait(self) -> None:
        """Return when the last save is on the disk. Raises its error (CheckpointError), once, if it is not."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies; damaged ones are named through `on_event` and passed over."""
        return newest_checkpoint(self.folder, self._on_event)

    def close(self) -> None:
        """Finish what is being written and release the buffers. Raises as `wait` does."""
        self._thread.shutdown()
        self._buffers.release()
        self.wait()

    def _write(self, step: int, tensors: dict[str, Tensor], text: str) -> None:
        start = time.perf_counter()
        path = self.folder / checkpoint_name(step)
        temporary = self.folder / (WRITING + path.name)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            files = save_tensors(temporary, tensors)
            files[STATE] = write_file(temporary / STATE, text)
            seal(temporary, files)
            temporary.rename(path)
            sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = f"step {step} could not be written to {path}: {error.strerror or error}"
            self._on_event("checkpoint", step, reason, path=str(path), failed=True)
            raise CheckpointError(
                f"checkpoint of {reason}; earlier checkpoints are intact, free space or set run.dir"
            ) from error
        seconds = time.perf_counter() - start
        size = sum(digest.bytes for digest in files.values())
        try:
            delete_superseded(self.folder, step, self._keep)
        except OSError as error:
            message = f"old checkpoints in {self.folder} could not be deleted: {error}"
            self._on_event("checkpoint", step, message, path=str(self.folder), failed=True)
        message = f"saved {path.name} ({size / 2**20:.1f} MiB in {seconds:.1f} s)"
        self._on_event("checkpoint", step, message, path=str(path), bytes=size, seconds=round(seconds, 3))


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> dict[str, FileDigest]:
    """Write tensors by name into `folder` through DCP (one process). Returns the digests of the files written."""
    writer = SafetensorsWriter(folder)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp_save(tensors, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as failure:
        raise _cause(failure) from failure
    return writer.files


def read_meta(path: Path) -> dict[str, Any]:
    """The `meta` that the checkpoint `path` was saved with. Does not verify: `read` and `newest_checkpoint` do."""
    return json.loads((path / STATE).read_text())["meta"]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (state, meta) of the checkpoint folder `path`, its tensors on the CPU, bit for bit as they were saved.

    Verified before anything is believed, and nothing is unpickled. Raises DamagedCheckpoint, naming the file.
    """
    verify(path)
    reader = SafetensorsReader(path)
    tensors = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in reader.read_metadata().state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp_load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as failure:
        raise _cause(failure) from failure
    saved = json.loads((path / STATE).read_text())
    return join(saved["state"], tensors), saved["meta"]


def _cause(failure: CheckpointException) -> BaseException:
    """DCP wraps the error of each rank; with one process there is one."""
    return next(iter(failure.failures.values()))[0]
