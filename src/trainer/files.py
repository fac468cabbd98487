"""Files of a run folder that are whole at any moment."""

import json
import os
from pathlib import Path

from trainer.checkpoint import sync_folder


def trim(path: Path, last_step: int | None) -> int:
    """Drop the lines of a JSON-lines file that are later than `last_step`, or not whole. Returns how many; atomic."""
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _belongs(line, last_step)]
    if len(kept) < len(lines):
        replace_file(path, b"".join(kept))
    return len(lines) - len(kept)


def _belongs(line: bytes, last_step: int | None) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(entry, dict) and (last_step is None or entry.get("step", 0) <= last_step)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that there is the old one or the new one at any moment. OSError names it."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
