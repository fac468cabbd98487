"""The folder that `run.{name,dir,resume}` mean, and whether a run may use it. Writes nothing, except for an unnamed new
run.

Every refusal is a UserError in one line.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, ENOTDIR, EROFS
from pathlib import Path
from typing import TYPE_CHECKING

from precision.errors import UserError
from trainer.checkpoint import as_given, checkpoint_step, list_checkpoints
from trainer.files import refuse_link
from trainer.run.names import CHECKPOINTS, CONFIG, EVENTS, LOGS

if TYPE_CHECKING:
    from trainer.config import RunConfig

LONGEST = 255  # bytes in a folder's name
OWN_FOLDERS = LOGS, "profile", "tensorboard", "wandb"
"""Folders of a run beside its checkpoints."""


def check_place(run: "RunConfig") -> Path | None:
    """Raise now what `RunFolder.open` would refuse because of the folder alone. Writes nothing.

    Returns the folder, which need not exist; None for an unnamed new run, which gets an unused name.
    """
    if run.name is None and run.resume == "never":
        return None
    with as_user_error(Path(run.dir)):
        return locate(Path(run.dir), run.name, run.resume, "")[0]


def check_writable(run: "RunConfig") -> None:
    """Raise UserError if the folder of a new run cannot be made, as far as that can be seen without writing."""
    if run.resume not in ("never", "auto"):
        return
    parent = Path(run.dir)
    with as_user_error(parent):
        nearest = next(folder for folder in (parent, *parent.parents) if os.path.lexists(folder))
        if not nearest.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(nearest))
        if not os.access(nearest, os.W_OK | os.X_OK):
            why = EROFS if os.statvfs(nearest).f_flag & os.ST_RDONLY else EACCES
            raise OSError(why, os.strerror(why), str(nearest))


def check_name(name: str | None) -> None:
    """Raise UserError for a run.name that no folder can have, or that contains several."""
    if name is not None and not re.fullmatch(r"[^-./\\\s][^/\\\s]*", name):
        raise UserError(
            f"run.name={name}: must be a plain folder name, without slashes or spaces and not starting with a dot or -"
        )
    if name is not None and (size := len(os.fsencode(name))) > LONGEST:
        raise UserError(f"run.name={name[:20]}...: {size} bytes, and a folder's name has at most {LONGEST}; shorten it")


def will_resume(run: "RunConfig") -> bool:
    """Return whether `RunFolder.open` will resume from a checkpoint of the run, or refuse. Writes nothing."""
    if run.resume == "never":
        return False
    folder = check_place(run)
    return folder is not None and bool(list_checkpoints(folder / CHECKPOINTS))


def locate(parent: Path, name: str | None, resume: str, label: str) -> tuple[Path, Path | None]:
    """Return the run's folder, and the checkpoint if `resume` names one. Creates the folder of an unnamed run."""
    if resume in ("never", "auto"):
        check_name(name)
        if name is None:
            if resume == "auto":
                raise UserError(
                    "run.resume=auto: run.name is not set; set it, or give the run's folder as run.resume=PATH"
                )
            words = re.sub(r"[^\w.-]+", "-", label)  # precision.name may be any text
            return _make_unique(parent, f"{time.strftime('%Y%m%d-%H%M%S')}-{words}"), None
        path = parent / name
        if path.is_symlink() and not path.exists():
            what = f"{path} is a link to {path.readlink()}, which is not there"
            raise UserError(f"run.name={name}: {what}; make that folder, or choose another run.name")
        state = state_of(path)
        if resume == "auto":
            _check_config(path, f"run.name={name}")
        if state == "foreign" or (state == "run" and resume == "never"):
            raise exists_already(path, state)
        return path, None
    path, checkpoint = named_by(resume)
    if name is not None and (parent / name).resolve() != path.resolve():
        key, value = ("run.name", name) if name != path.absolute().name else ("run.dir", parent)
        raise UserError(
            f"{key}={value}: run.resume={resume} continues in {path}; leave {key} out, "
            "or start a new run from its weights with run.init_from"
        )
    return path, checkpoint


def named_by(resume: str, restarted: bool = False) -> tuple[Path, Path | None]:
    """Return the run folder that a path in `run.resume` names, and the checkpoint if it names one. restarted: by
    torchrun; the run has resumed from that checkpoint and may have deleted it since."""
    target = as_given(Path(resume))
    checkpoint = target if checkpoint_step(target) is not None and target.parent.name == CHECKPOINTS else None
    path = target if checkpoint is None else checkpoint.parent.parent
    _check_config(path, f"run.resume={resume}")
    if not (restarted or os.path.isdir(target)) or not os.path.isfile(path / CONFIG):
        raise UserError(
            f"run.resume={resume}: must be never, auto, or the path of a run folder or of a checkpoint in one"
        )
    return path, checkpoint


def _check_config(path: Path, setting: str) -> None:
    """Raise UserError for a run folder that lacks its config; its checkpoints have it, too."""
    if list_checkpoints(path / CHECKPOINTS) and (path / EVENTS).exists() and not (path / CONFIG).exists():
        fix = "make an empty one, and the settings of its newest checkpoint are used"
        raise UserError(f"{setting}: {path / CONFIG} is missing; {fix}")


def check_links(path: Path) -> None:
    """Raise UserError for links in the run folder `path` through which a run would write outside its own files.

    Its files and folders may not be links. `checkpoints` and the checkpoints in it may, since people move them
    elsewhere when a disk is full, with two exceptions: a link planted by another user (as Linux defines it for /tmp by
    `fs.protected_symlinks`: its owner is neither the reader nor the folder's owner), and a link into another run's
    checkpoints.
    """
    for own in (*path.glob("*.jsonl"), *path.glob(f"{LOGS}/*.log"), *(path / name for name in OWN_FOLDERS)):
        refuse_link(own)
    checkpoints = path / CHECKPOINTS
    for link in (checkpoints, *list_checkpoints(checkpoints)):
        if link.is_symlink() and (maker := link.lstat().st_uid) not in (os.geteuid(), link.parent.stat().st_uid):
            raise UserError(f"{link}: is a link that another user (uid {maker}) made; remove it, or make it yourself")
    run = checkpoints.resolve().parent
    if run != path.resolve() and state_of(run) == "run":
        raise UserError(f"{checkpoints}: is a link into the run {run}, which has its own checkpoints; remove it")


def state_of(path: Path) -> str:
    """Return `vacant` (missing, or empty except for hidden files), `run` (a run folder) or `foreign`."""
    if not path.exists():
        return "vacant"
    if not path.is_dir():
        return "foreign"
    if (path / CONFIG).is_file():
        return "run"
    return "foreign" if any(not entry.name.startswith(".") for entry in path.iterdir()) else "vacant"


def exists_already(path: Path, state: str) -> UserError:
    if state == "foreign":
        return UserError(f"run.name={path.name}: {path} exists and is not a run folder; choose another run.name")
    return UserError(f"run.name={path.name}: {path} exists; choose another run.name, or resume it: run.resume=auto")


@contextmanager
def as_user_error(parent: Path) -> Iterator[None]:
    """Turn an error in creating or reading a folder into a UserError that names run.dir."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or parent} cannot be used ({error.strerror or error})"
        raise UserError(f"run.dir={parent}: {what}; set a folder that can be written") from error


def _make_unique(parent: Path, name: str) -> Path:
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return path
