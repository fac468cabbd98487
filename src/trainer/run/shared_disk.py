"""Checks that all ranks see one run folder. With one on the disk of each node every checkpoint would fail."""

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from precision.errors import UserError, listed
from trainer.files import create, temporary_name

if TYPE_CHECKING:
    from trainer.launch.world import World

SHARED_SECONDS = 30.0
"""Seconds in which a network file system shows a new file to the other nodes."""


def check_shared(path: Path | None, world: "World", patience: float = SHARED_SECONDS) -> None:
    """Raise UserError, on all ranks, unless each sees the folder `path` of rank 0. A collective; path: None on the
    other ranks. patience: in seconds.

    Rank 0 makes a file for it. The lock would not do: a network file system may refuse to read what another node has
    locked, or write it to the server only when it is closed.
    """
    if not world.is_distributed:
        return

    def look(mark: Path) -> str:
        """Return where this rank has looked if it does not see the file."""
        deadline = time.monotonic() + patience
        while not (seen := _sees(mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return "" if seen else f"{mark.parent.absolute()} on {platform.node()}"

    def ask(everyone: Callable[[Path], list[str]]) -> tuple[Path, list[str]]:
        assert path is not None
        mark = temporary_name(path / "shared")
        create(mark).close()
        places = everyone(mark)
        mark.unlink(missing_ok=True)
        return path, places

    opened, places = world.coordinate(ask, look, "shared")
    if blind := [rank for rank, place in enumerate(places) if place]:
        raise UserError(
            f"run.dir={opened.parent}: rank {listed(blind, 1)} does not see the folder that rank 0 has opened "
            f"({places[blind[0]]}); every rank writes its part of a checkpoint there: start all ranks with one run.dir "
            "on a file system that all nodes share"
        )


def _sees(path: Path) -> bool:
    with suppress(OSError):
        os.listdir(path.parent.parent)  # NFS asks its server again
        return path.name in os.listdir(path.parent)
    return False
