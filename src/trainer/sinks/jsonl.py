"""A JSON-lines file whose lines are always whole.

Each line leaves in one write to a file opened for appending: what was written survives the death of the process, and
a reader who follows the file (`tail -f`) never sees half a line. If a write fails half way (disk full), the half is
taken back.
"""

import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.rundir import trim


class JsonLines:
    """Appends objects to `path`, one a line. Any thread may write.

    A write that fails is not raised: training is worth more than a line about it. `warn` is told once.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._warned = False
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one object. NaN and the infinities, which JSON does not have, become null."""
        line = (json.dumps({key: _finite(value) for key, value in entry.items()}, allow_nan=False) + "\n").encode()
        with self._lock:
            end = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(line) != len(line):
                    raise OSError("no space for a whole line")
                return
            except OSError as error:
                os.ftruncate(self._file.fileno(), end)
                reason = error.strerror or str(error)
            tell, self._warned = not self._warned, True
        if tell:
            self._warn(f"{self._path} cannot be written ({reason}); lines are being lost")

    def trim(self, last_step: int) -> None:
        """Drop the lines that are later than `last_step`; as `write`, not raised if it fails."""
        with self._lock:
            self._file.close()
            try:
                trim(self._path, last_step)
                reason = ""
            except OSError as error:
                reason = error.strerror or str(error)
            self._file = self._path.open("ab", buffering=0)
        if reason:
            self._warn(f"{self._path} cannot be written ({reason}); lines later than step {last_step} stay in it")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
