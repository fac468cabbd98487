"""Files that are whole at any moment, and names that are on the disk."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def trim(path: Path, last_step: int | None) -> int:
    """Drop the lines of a JSON-lines file that are later than `last_step`, or not whole. Returns how many; atomic."""
    if not path.exists():
        return 0
    with path.open("rb") as file:  # line by line: tensors.jsonl may have gigabytes
        dropped = sum(not _belongs(line, last_step) for line in file)
        if dropped:
            file.seek(0)
            replace_file(path, (line for line in file if _belongs(line, last_step)))
    return dropped


def _belongs(line: bytes, last_step: int | None) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(entry, dict) and (last_step is None or entry.get("step", 0) <= last_step)


def replace_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file, in one piece or several, so that there is the old one or the new one at any moment. OSError names
    it."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # on a full disk, what is there of it would be in the way
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(path: Path) -> None:
    """Wait until the names in the folder (creations, renames, deletions) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
