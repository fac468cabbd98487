"""The folder of a run's checkpoints: its contents, the checkpoint to resume from, and leftovers of a killed process.

    step_00000200/            visible: complete when it was renamed into place
    .writing_step_00000400/   being written, or left by a kill
    .deleting_step_00000100/  being deleted, or left by a kill
    step_00000600.set_aside/  out of use (damaged, or later than the checkpoint resumed from), kept for inspection

Only names of the first form count as checkpoints. Renames are atomic: a process killed at any moment leaves each
checkpoint under exactly one of these names.
"""

import json
import os
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from precision.errors import UserError
from trainer.checkpoint.manifest import STATE, DamagedCheckpoint, verify
from trainer.files import sync_folder

if TYPE_CHECKING:
    from trainer.launch.world import World

T = TypeVar("T")
Verify = Callable[[Path], None]
"""Raises DamagedCheckpoint unless the checkpoint at a path is complete and unchanged."""


class OnEvent(Protocol):
    """Receives events of checkpoints; `Sinks.event` is one."""

    def __call__(self, kind: str, step: int, message: str, **what: Any) -> None: ...


WRITING = ".writing_"
_DELETING = ".deleting_"
_ASIDE = ".set_aside"
_NAME = re.compile(r"step_(\d{8,})")


def checkpoint_name(step: int) -> str:
    """Return the name, such as `step_00000200`: names sort as their steps do."""
    return f"step_{step:08d}"


def checkpoint_step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint folder, or None for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def as_given(path: Path) -> Path:
    """Return a path that a user gave. That of a checkpoint ends in its name and its run's folders, also where the user
    is in one of them or gave a link."""
    resolved = path.resolve()
    is_plain = checkpoint_step(path) is not None and len(path.parts) > 1
    return path if is_plain or checkpoint_step(resolved) is None else resolved


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all visible checkpoints, oldest first, valid or not. Empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := checkpoint_step(path)) is not None]
    return [path for _, path in sorted(found)]


def verify_checkpoint(path: Path) -> None:
    """Raise DamagedCheckpoint unless `verify` passes and the step in the folder's name is the saved step."""
    verify(path)
    _check_name(path)


def _check_name(path: Path) -> None:
    named, saved = checkpoint_step(path), json.loads((path / STATE).read_text())["step"]
    if named is not None and named != saved:
        fix = f"rename it to {checkpoint_name(saved)}"
        raise DamagedCheckpoint(f"{path} holds step {saved} under the name of step {named}; {fix}")


def verify_on_all_ranks(world: "World", ask: Callable[[Verify], T], named: str) -> T:
    """Return on every rank what `ask(check)` returns on rank 0. `check` is `verify_checkpoint` by all ranks, each of
    which reads its share of the files, or UserError where only some ranks see it. A collective; named: as for
    `World.gather`."""

    def part(path: Path) -> tuple[str, str]:
        """Return the damage, and where this rank has looked if it sees no such folder."""
        try:
            verify(path, share=(world.rank, world.size))
        except DamagedCheckpoint as damage:
            return str(damage), "" if path.is_dir() else f"{path.absolute()} on {platform.node()}"
        return "", ""

    def first(everyone: Callable[[Path], list[tuple[str, str]]]) -> T:
        def check(path: Path) -> None:
            damages, places = zip(*everyone(path), strict=True)
            if any(places) and not places[0]:
                rank, place = next(each for each in enumerate(places) if each[1])
                why = f"rank {rank} does not see this checkpoint ({place})"
                raise UserError(f"{path}: {why}; all nodes need it on a file system that they share")
            if any(damages):
                raise DamagedCheckpoint(next(filter(None, damages)))
            _check_name(path)

        return ask(check)

    return world.coordinate(first, part, named)


def newest_checkpoint(
    folder: Path, on_event: OnEvent, before: int | None = None, check: Verify = verify_checkpoint
) -> Path | None:
    """Return the newest checkpoint that verifies (`check`), of a step below `before` if given. Damaged ones are
    reported through `on_event` and skipped."""
    for path in reversed(list_checkpoints(folder)):
        if before is not None and (checkpoint_step(path) or 0) >= before:
            continue
        try:
            check(path)
        except DamagedCheckpoint as damage:
            on_event("checkpoint", checkpoint_step(path) or 0, f"damaged checkpoint skipped: {damage}", path=str(path))
            continue
        return path
    return None


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Take every checkpoint later than `step` out of use, by renaming it. Returns the new names.

    Called when a run resumes from `step`: later checkpoints belong to an abandoned course of the run, or are damaged,
    and no later resume may pick them. Each is deleted when a new checkpoint of its step is saved.
    """
    aside = []
    for path in list_checkpoints(folder):
        if (checkpoint_step(path) or 0) > step:
            target = path.with_name(path.name + _ASIDE)
            delete_checkpoint(target)
            aside.append(path.rename(target))
    if aside:
        sync_folder(folder)
    return aside


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint folder, if it exists. A kill half way leaves nothing that looks like a checkpoint. Of a link,
    only the link is deleted: the user moved its target there."""
    if os.path.lexists(path):
        doomed = path.with_name(_DELETING + path.name)
        _remove(doomed)
        path.rename(doomed)
        _remove(doomed)


def _remove(path: Path) -> None:
    """Remove a folder, file or link, if it exists. Never follows a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def superseded(found: list[Path], keep: int, before: int | None = None) -> list[Path]:
    """Return all but the `keep` newest of checkpoints, oldest first (0: keeps all). The newest one of a step below
    `before`, if given, stays in any case."""
    needed = [path for path in found if before is not None and (checkpoint_step(path) or 0) < before][-1:]
    return [path for path in found[:-keep] if path not in needed] if keep else []


def delete_superseded(folder: Path, step: int, keep: int, before: int | None = None) -> None:
    """Delete the `superseded` checkpoints and the one of `step` that was set aside. Call it when `step` is visible."""
    delete_checkpoint(folder / (checkpoint_name(step) + _ASIDE))
    for path in superseded(list_checkpoints(folder), keep, before):
        delete_checkpoint(path)


def delete_leftovers(folder: Path) -> None:
    """Delete what a killed process left half written or half deleted; hold the run's lock."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith((WRITING, _DELETING)):
            _remove(path)
