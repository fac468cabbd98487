"""The folder of a run: its files, its lock, and the step to resume from.

    runs/NAME/  config.yaml  overrides.txt  environment.json     what produced this run
                precision_plan.txt  backends.json                format of each tensor and backend of each GEMM
                tokenizer.json                                   the text of the tokens
                metrics.jsonl  tensors.jsonl  events.jsonl  logs/rank0.log           the result
                checkpoints/
                recovery.json                                                        rewinds, if there were any

| `run.resume`      | the folder is new | killed before its first checkpoint | has a checkpoint             |
| ----------------- | ----------------- | ---------------------------------- | ---------------------------- |
| never             | start             | refused                            | refused                      |
| auto (with name)  | start             | start again in it                  | resume from the newest valid |
| PATH of a run     | refused           | refused                            | resume from its newest valid |
| PATH of a checkpoint |                |                                    | resume from that one         |

A resumption has the settings of `config.yaml`, which the command line changes (`own_settings`).
Resuming from step N makes the folder one course of events again: metric lines later than N are dropped, checkpoints
later than N taken out of use. Every refusal is a UserError in one line, and comes before anything is written.

One process trains in a folder at a time (`lock`). Rank 0 opens the folder and broadcasts its path. After a restart by
torchrun the earlier processes may still be ending: rank 0 waits for the lock.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml
from omegaconf import OmegaConf

from precision.errors import UserError, counted
from trainer.checkpoint import (
    DamagedCheckpoint,
    OnEvent,
    Verify,
    as_given,
    checkpoint_step,
    list_checkpoints,
    newest_checkpoint,
    read_meta,
    set_aside_after,
    verify_checkpoint,
    verify_on_all_ranks,
)
from trainer.config.paths import NO_PATHS, kept_tree, resuming
from trainer.config_diff import changes, printable_override, without_secrets
from trainer.digests import read_signed, signed, stamped
from trainer.files import FULL, delete_temporary, replace_file, trim
from trainer.run.environment import environment
from trainer.run.location import as_user_error, check_links, exists_already, locate, state_of
from trainer.run.lock import is_in_place, take_lock
from trainer.run.names import BACKENDS, CHECKPOINTS, CONFIG, EVENTS, METRICS, RECOVERY, TENSORS
from trainer.run.shared_disk import check_shared

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.launch.world import World

Check = Callable[[dict[str, Any], Path], None]
"""Called with (meta, path) of the checkpoint to resume from. Raises UserError if this config cannot resume from it."""

LOCK_SECONDS = 60.0
"""Seconds that a restarted run's processes wait for the earlier ones to end."""


@dataclass
class Note:
    """An event from opening the folder, for `events.jsonl`, which is opened later."""

    kind: str
    step: int
    message: str
    what: dict[str, Any] = field(default_factory=dict)


class RunFolder:
    """A run's folder, locked for this process until `close()`.

    path: the folder. resumed_from: the checkpoint to resume from, None for a start. notes: events of the opening.
    """

    def __init__(
        self,
        parent: Path,
        name: str | None,
        resume: str,
        label: str,
        texts: Mapping[str, str],
        check: Check | None = None,
        patience: float = 0.0,
        verify: Verify = verify_checkpoint,
        locked: Callable[[Path], None] = lambda path: None,
    ) -> None:
        """Open the run `name` in `parent`. resume: never, auto or a path; see the table above.

        Without a name the run is named by time and `label`. `texts` are the files that record what produced the run, by
        name, `config.yaml` among them. patience: seconds to wait for a process that holds the lock. verify: of the
        checkpoints. locked: called with the folder before anything of it is read or written; may raise UserError.
        """
        self.notes: list[Note] = []
        self._is_made = resume in NO_PATHS and not (name is not None and os.path.exists(parent / name))
        with as_user_error(parent):
            self.path, checkpoint = locate(parent, name, resume, label)
        self.resumed_from: Path | None = None
        self._kept: dict[str, bytes] = {name: text.encode() for name, text in texts.items()}
        check_links(self.path)
        with ExitStack() as on_error:
            with as_user_error(parent):
                self._lock: TextIO | None = take_lock(self.path, self._note, patience)
            on_error.callback(self.close)
            delete_temporary(self.path)
            state = state_of(self.path)
            self._is_made &= state == "vacant"  # or another process has made it since we looked
            on_error.push(self.undo)
            if state == "foreign" or (state == "run" and resume == "never"):
                raise exists_already(self.path, state)
            locked(self.path)
            if state == "run":
                self.resumed_from = checkpoint or self._newest(must_exist=resume != "auto", verify=verify)
                if checkpoint is not None:
                    _verify(checkpoint, f"run.resume={resume}", verify)
            if self.resumed_from is None:
                if state == "vacant" and resume == "auto" and name is not None:
                    self._note("start", 0, f"nothing to resume: {self.path} is new")
                self._start(texts)
            else:
                if check is not None:
                    check(read_meta(self.resumed_from), self.resumed_from)
                self._resume(texts)
            on_error.pop_all()

    @classmethod
    def open(
        cls,
        config: "Config",
        overrides: Sequence[str],
        plan_text: str,
        backends: Mapping[str, Any],
        world: "World",
        check: Check | None = None,
    ) -> "RunFolder":
        """Open the folder that `config.run` names, and write what produced the run into it. backends: of its plan.

        A collective: rank 0 opens it, the others get an equal `RunFolder` without the lock. All verify. Raises
        UserError on all of them if one does not see rank 0's folder.
        """
        run, opened = config.run, []
        with ExitStack() as on_error:

            def first(verify: Verify) -> tuple[Path, Path | None]:
                texts = {
                    CONFIG: stamped(OmegaConf.to_yaml(OmegaConf.create(without_secrets(kept_tree(config), None)))),
                    "overrides.txt": "".join(f"{printable_override(override)}\n" for override in overrides),
                    "environment.json": json.dumps(environment(), indent=1) + "\n",
                    "precision_plan.txt": plan_text,
                    BACKENDS: signed(dict(backends)),
                }
                patience = LOCK_SECONDS if world.rank_group.launch.attempt else 0.0
                ours = cls(
                    Path(run.dir),
                    run.name,
                    run.resume,
                    config.precision.name,
                    texts,
                    check,
                    patience,
                    verify,
                    lambda path: check_shared(path, world),
                )
                on_error.callback(ours.close)
                opened.append(ours)
                return ours.path, ours.resumed_from

            if not world.is_first:
                check_shared(None, world)  # rank 0 calls it when it has locked the folder
            answer = verify_on_all_ranks(world, first, "opened")
            on_error.pop_all()
        return opened[0] if opened else cls._opened_by_another(*answer)

    @classmethod
    def _opened_by_another(cls, path: Path, resumed_from: Path | None) -> "RunFolder":
        run = cls.__new__(cls)
        run.path, run.resumed_from, run.notes, run._lock, run._is_made = path, resumed_from, [], None, False
        return run

    @property
    def first_step(self) -> int:
        """The step to resume from; 0 for a start."""
        return 0 if self.resumed_from is None else checkpoint_step(self.resumed_from) or 0

    @property
    def is_new(self) -> bool:
        """Whether the run starts at step 0."""
        return self.resumed_from is None

    def keep(self, path: Path) -> None:
        """Copy a file that the run needs into its folder, under its own name. Only rank 0 does."""
        if self._lock is None:
            return
        target, content = self.path / path.name, path.read_bytes()
        self._kept[path.name] = content
        if not target.is_file() or target.read_bytes() != content:
            replace_file(target, content)

    def recreate_if_deleted(self, step: int, on_event: OnEvent) -> None:
        """Create the folder again if it was deleted during the run, so that the run can resume from its next
        checkpoint.

        Raises an alert whether that works or not, and UserError if another run has taken its place.
        """
        try:
            if self._lock is None:
                return
            if not is_in_place(self._lock, self.path):  # `rm -rf NAME/*` leaves it
                lock = take_lock(self.path, on_event, 0.0)
                self._lock.close()
                self._lock = lock
                if (self.path / CONFIG).is_file():
                    what = f"{self.path} was deleted during the run, and is another run's now"
                    raise UserError(f"run.name={self.path.name}: {what}; start again under another run.name")
            if (self.path / CONFIG).is_file():
                return
            for name, content in self._kept.items():
                replace_file(self.path / name, content)
            what = "was deleted during the run; it is created again, without its former contents"
        except OSError as error:
            what = f"was deleted during the run, or cannot be accessed ({error.strerror or error})"
        on_event("alert", step, f"{self.path} {what}", rule="disk", path=str(self.path))

    def undo(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Remove a folder that this process has made, where a refusal or a full disk ends the start of its run."""
        if self._is_made and (isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in FULL)):
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Release the folder for other processes."""
        if self._lock is not None:
            self._lock.close()

    def _note(self, kind: str, step: int, message: str, **what: Any) -> None:
        self.notes.append(Note(kind, step, message, what))

    def _newest(self, must_exist: bool, verify: Verify) -> Path | None:
        """Return the newest valid checkpoint, or None if none was ever made."""
        folder = self.path / CHECKPOINTS
        found = newest_checkpoint(folder, self._note, check=verify)
        if found is None and list_checkpoints(folder):
            raise UserError(
                f"run.name={self.path.name}: every checkpoint of {self.path} is damaged ({self.notes[0].message}); "
                "start a new run under another run.name"
            )
        if found is None and must_exist:
            fix = f"start it again with {resuming(self.path)}"
            raise UserError(f"run.resume={self.path}: it has no checkpoint to resume from; {fix}")
        return found

    def _start(self, texts: Mapping[str, str]) -> None:
        if any((self.path / name).exists() for name in (METRICS, EVENTS)):
            self._note("resume", 0, f"{self.path} was stopped before its first checkpoint: starting again")
        for name in (METRICS, TENSORS, EVENTS, RECOVERY):
            (self.path / name).unlink(missing_ok=True)
        for name, text in texts.items():
            replace_file(self.path / name, text.encode())

    def _resume(self, texts: Mapping[str, str]) -> None:
        step = self.first_step
        aside = set_aside_after(self.path / CHECKPOINTS, step)
        if aside:
            names = ", ".join(path.name for path in aside)
            self._note("checkpoint", step, f"set aside, because the run resumes from step {step}: {names}")
        dropped = {
            name: trim(self.path / name, last) for name, last in ((METRICS, step), (TENSORS, step), (EVENTS, None))
        }
        if later := dropped[METRICS].later:
            self._note("resume", step, f"{counted(later, 'line')} later than step {step} dropped from {METRICS}")
        for name, (_, damaged) in dropped.items():
            if damaged:
                self._note("resume", step, f"{counted(damaged, 'damaged line')} dropped from {name}")
        try:
            changed = changes((self.path / CONFIG).read_bytes(), texts[CONFIG])
        except yaml.YAMLError:
            changed = f"{self.path / CONFIG} is damaged and cannot be compared"
        if changed:
            self._note("settings", step, f"other settings than before: {changed}")
        for name, text in texts.items():
            path = self.path / name
            if path.exists():
                _keep_before(path, step, text.encode())
            replace_file(path, text.encode())  # a run needs its config: it stays until it is replaced


def saved_backends(folder: Path | None, step: int | None = None) -> dict[str, Any] | None:
    """Return the backends chosen when the run in this folder began; None if it is new or did not record them. step:
    those in force then, before a resumption with another config."""
    path = None if folder is None else folder / BACKENDS
    if folder is not None and step is not None:
        kept = sorted(folder.glob("backends.before_step_*.json"), key=lambda path: (path.stem[:29], len(path.stem)))
        path = next((path for path in kept if int(path.stem[21:29]) >= step), folder / BACKENDS)
    if path is None or not path.is_file():
        return None
    return read_signed(path, ("gpu", "rows"), "remove it, and backends are chosen again")


def find_checkpoint(path: Path, key: str, on_event: OnEvent, verify: Verify = verify_checkpoint) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest valid one of the run folder. Verified by `verify`.

    Raises UserError, beginning with `key=path` (the config key it came from), if there is none or it is damaged.
    """
    if checkpoint_step(given := as_given(path)) is not None and given.is_dir():
        _verify(given, f"{key}={path}", verify)
        return given
    found = newest_checkpoint(path / CHECKPOINTS, on_event, check=verify)
    if found is None and list_checkpoints(path / CHECKPOINTS):
        raise UserError(f"{key}={path}: every checkpoint there is damaged; give another run")
    if found is None:
        raise UserError(f"{key}={path}: no checkpoint there; give a run folder or one of its {CHECKPOINTS}/step_*")
    return found


def _keep_before(path: Path, step: int, new: bytes) -> None:
    """Keep what a file of a run says up to a step from which the run resumes, as NAME.before_step_N, if that is not
    `new`. What it said after that step is no longer the run's history: such files are renamed, discarded_NAME."""
    name = re.compile(rf"{re.escape(path.stem)}\.before_step_(\d+)(?:-(\d+))?{re.escape(path.suffix)}")
    kept = [
        (int(found[1]), int(found[2] or 1), each)
        for each in path.parent.iterdir()
        if (found := name.fullmatch(each.name))
    ]
    later = [each for last, _, each in sorted(kept) if last > step]
    begins = path.with_stem(f"{path.stem}.before_step_{step:08d}")
    before = (later[0] if later else path).read_bytes()
    if before != new and not (later and begins.exists()):
        replace_file(_unused(begins), before)
    for each in [*later, path] if later else []:
        replace_file(_unused(each.with_name(f"discarded_{each.name}")), each.read_bytes())
        if each != path:
            each.unlink()


def _unused(path: Path) -> Path:
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate


def _verify(checkpoint: Path, setting: str, verify: Verify) -> None:
    try:
        verify(checkpoint)
    except DamagedCheckpoint as damage:
        raise UserError(
            f"{setting}: {damage}; name another checkpoint, or its run folder for the newest whole one"
        ) from None
