"""Reads a checkpoint, whichever ranks wrote it, into the state of the ranks that resume.

A resuming run has its tensors already, perhaps sharded over other ranks than those that saved. They are filled in
place, each rank's part from the boxes that overlap it: a rank reads only what it holds, and holds nothing twice. State
without a tensor to fill is returned as new tensors on the CPU.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from precision.errors import UserError
from trainer.checkpoint.folder import verify_checkpoint
from trainer.checkpoint.manifest import STATE
from trainer.checkpoint.shard_view import ShardView
from trainer.checkpoint.state_tree import join, split
from trainer.checkpoint.storage import SavedTensors


def read_meta(path: Path) -> dict[str, Any]:
    """Return the `meta` of the checkpoint `path`. Does not verify: `read` and `newest_checkpoint` do."""
    return json.loads((path / STATE).read_text())["meta"]


def read_values(path: Path, branch: str) -> Any:
    """Return a branch without tensors of the state in the checkpoint `path`. Does not verify, as `read_meta`."""
    return join(json.loads((path / STATE).read_text())["state"][branch], {})


def saved_shapes(path: Path) -> dict[str, torch.Size]:
    """Return the shapes of the whole tensors in the checkpoint `path`, by their paths in its state."""
    saved = SavedTensors(path)
    return {name: saved.shape(name) for name in saved.names()}


def read(
    path: Path, into: Mapping[str, Any] | None = None, *, rest: bool = True, verified: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (state, meta) of the checkpoint folder `path`, its tensors on the CPU, bit for bit as saved.

    into: branches of the state, by name, whose tensors and `ShardView`s are filled in place; they are left out of the
    result. rest: whether to return the other branches. verified: the caller has verified the folder.

    Verifies before it uses anything, and unpickles nothing. Raises DamagedCheckpoint, naming the file, and UserError if
    the branches in `into` have other tensors than those that were saved; then nothing was filled. No collective: each
    rank reads for itself.
    """
    if not verified:
        verify_checkpoint(path)
    into = into or {}
    saved = SavedTensors(path)
    targets = {name: x if isinstance(x, ShardView) else ShardView.whole(x) for name, x in split(into)[1].items()}
    branches = {name: name.split("/", 1)[0] in into for name in saved.names()}
    for name in (*targets, *(name for name, ours in branches.items() if ours)):
        if name not in targets or name not in saved or targets[name].shape != saved.shape(name):
            branch, _, plain = name.partition("/")
            if branch == "optimizer" and name.rsplit("/", 1)[0].replace(branch, "model", 1) in saved:
                why = "the checkpoint is of another optimizer; use that run's optim.name, or take its weights with"
                raise UserError(f"{plain}: {why} run.init_from")
            raise UserError(f"{plain or name}: the checkpoint is of another model; use that run's model.*")
    fresh = {
        name: torch.empty(saved.shape(name), dtype=saved.dtype(name))
        for name, ours in branches.items()
        if rest and not ours
    }
    saved.fill({name: ShardView.whole(tensor) for name, tensor in fresh.items()} | targets)
    text = json.loads((path / STATE).read_text())
    branches_wanted = {key: value for key, value in text["state"].items() if rest and key not in into}
    return join(branches_wanted, fresh), text["meta"]
