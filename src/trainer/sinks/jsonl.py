"""A JSON-lines file whose lines are always complete.

Each line is one write to a file opened for appending: written lines survive the death of the process, and a reader who
follows the file (`tail -f`) never sees half a line. If a write fails half way (disk full), the half is removed. A file
that was deleted during the run is created again.
"""

import io
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from precision.errors import counted
from trainer.files import open_own, thin, trim


class JsonLines:
    """Appends objects to `path`, one a line. Thread-safe.

    A failing write does not raise: training is worth more than a line about it. `warn` is called when writes begin to
    fail, and when they work again. limit: bytes beyond which half of the lines is dropped (`trainer.files.thin`); the
    first time, `say` is called.
    """

    def __init__(
        self,
        path: Path,
        warn: Callable[[str], None],
        limit: float = math.inf,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._path = path
        self._warn = warn
        self._limit, self._say = limit, say
        self._lost = 0
        self._first = b""
        self._file = _open(path)
        self._lock = threading.Lock()

    def write(self, entry: Mapping[str, Any], first: bool = False) -> None:
        """Append one object. NaN and the infinities, which JSON does not have, become null. first: a file that is
        created again begins with it."""
        text = json.dumps({key: finite_or_none(value) for key, value in entry.items()}, allow_nan=False)
        line = f"{text}\n".encode()
        news = None
        with self._lock:
            try:
                if self._append(line):
                    news = f"{self._path} was deleted or moved: a new one starts here"
                if self._lost:
                    news = f"{self._path} can be written again; {counted(self._lost, 'line')} lost"
                self._lost = 0
            except OSError as error:
                self._lost += 1
                if self._lost == 1:
                    news = f"{self._path} cannot be written ({error.strerror or error}); lines are being lost"
            else:
                with suppress(OSError):  # which the next line meets, too
                    self._thin()
            self._first = line if first else self._first
        if news is not None:
            self._warn(news)

    def _thin(self) -> None:
        """Drop half of the lines if the file exceeds its limit."""
        if os.fstat(self._file.fileno()).st_size <= self._limit:
            return
        if self._say is not None:
            self._say(f"{self._path} exceeds {self._limit:,} bytes: it keeps lines of fewer steps from now on")
            self._say = None
        with suppress(OSError):  # on a full disk: tried again at twice the size
            thin(self._path)
        if (size := self._path.stat().st_size) > self._limit * 3 / 4:
            self._limit = 2 * size

    def _append(self, line: bytes) -> bool:
        """Write a whole line, or raise OSError and write nothing. Return whether the file was missing and recreated."""
        if missing := self._reopen():
            self._file.write(self._first)
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError("no space for a whole line")
        except OSError:
            os.ftruncate(self._file.fileno(), size)
            raise
        return missing

    def _reopen(self) -> bool:
        """Open the path again if it has another file by now (`trim`, `thin`), or none. Return whether it had none."""
        found = None
        with suppress(FileNotFoundError):
            found = self._path.stat()
        if found is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        elif os.path.samestat(found, os.fstat(self._file.fileno())):
            return False
        new = _open(self._path)
        self._file.close()
        self._file = new
        return found is None

    def trim(self, last_step: int) -> None:
        """Drop the lines later than `last_step`; like `write`, it does not raise if it fails."""
        try:
            with self._lock:
                trim(self._path, last_step)
        except OSError as error:
            reason = error.strerror or error
            self._warn(f"{self._path} cannot be written ({reason}); lines later than step {last_step} stay in it")

    def close(self) -> None:
        self._file.close()


def _open(path: Path) -> io.FileIO:
    return io.FileIO(open_own(path), "ab")


def finite_or_none(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
