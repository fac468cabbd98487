"""Lets one process at a time use a run folder: it holds a `flock` on `.lock`, which the kernel releases when it dies,
for any reason. The file names its holder."""

import fcntl
import os
import platform
import time
from pathlib import Path
from typing import TextIO

from precision.errors import UserError
from trainer.checkpoint import OnEvent
from trainer.files import open_own


def take_lock(path: Path, on_event: OnEvent, patience: float) -> TextIO:
    """Lock the folder for this process, within `patience` seconds. Closing the file object releases the lock."""
    path.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(open_own(path / ".lock", os.O_RDWR), "r+")
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                owner = file.read().strip() or "another process"
                file.close()
                raise UserError(
                    f"run.name={path.name}: {path} is in use by {owner}; wait for it, or choose another run.name"
                ) from None
            time.sleep(0.2)
        except OSError as error:  # some network file systems cannot lock
            why = f"{path} cannot be locked ({error.strerror})"
            on_event("alert", 0, f"{why}: make sure that only one process trains in it")
            break
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def is_in_place(lock: TextIO, path: Path) -> bool:
    """Return whether the lock that this process holds is still the folder's."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(path / ".lock"))
    except FileNotFoundError:
        return False
