"""Files and folders that are complete at any moment, and names that are on the disk."""

import errno
import json
import os
import re
import secrets
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from precision.errors import UserError

SOURCE = Path(__file__).resolve().parents[1]
"""The folder of Octet's own packages."""
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""Errors of writing to a full disk."""
TEMPORARY = ".new"
"""Suffix of files that are not complete yet."""
_LONGEST_LINE = 1 << 20
"""Bytes that hold a line of metrics."""
_STEP = re.compile(rb'\{"step": (\d{1,18})\b')


class Trimmed(NamedTuple):
    """Numbers of dropped lines."""

    later: int
    damaged: int


def trim(path: Path, last_step: int | None) -> Trimmed:
    """Drop the lines of a JSON-lines file that are later than `last_step`, or damaged. Atomic."""
    if not path.exists():
        return Trimmed(0, 0)
    with path.open("rb") as file:  # line by line: tensors.jsonl may have gigabytes
        counts = Counter(_belongs(line, last_step) for line in file)
        dropped = Trimmed(counts[False], counts[None])
        if any(dropped):
            file.seek(0)
            replace_file(path, (line for line in file if _belongs(line, last_step)))
    return dropped


def thin(path: Path) -> None:
    """Drop half of the lines of a JSON-lines file that begin with a step, and spread the rest evenly over the steps.
    Atomic. Lines of similar length are counted separately, so that long ones, which come less often, stay in part."""
    with path.open("rb") as file:
        lines = [(len(line).bit_length(), int(found[1]) if (found := _STEP.match(line)) else None) for line in file]
        counts = Counter(kind for kind, step in lines if step is not None)
        end = max((step for _, step in lines if step is not None), default=0) + 1
        kept = {  # the last line of each of counts / 2 equal ranges of steps
            (number, None) if step is None else (kind, step * counts[kind] // (2 * end)): number
            for number, (kind, step) in enumerate(lines)
        }
        numbers = set(kept.values())
        file.seek(0)
        replace_file(path, (line for number, line in enumerate(file) if number in numbers))


def _belongs(line: bytes, last_step: int | None) -> bool | None:
    """Return whether a line is no later than `last_step`, or None if it is damaged."""
    entry = parse_line(line) if line.endswith(b"\n") else None
    return None if entry is None else last_step is None or entry.get("step", 0) <= last_step


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of a JSON-lines file, or None if it is damaged: no JSON object, or an invalid
    step."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    step = entry.get("step", 0)
    return entry if type(step) is int and 0 <= step < 1 << 63 else None


def parse_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file that have a step. Damaged and incomplete lines are skipped."""
    with path.open("rb") as file:
        yield from (entry for line in file if (entry := parse_line(line)) is not None and "step" in entry)


def last_step_in(path: Path) -> int | None:
    """Return the step in the last line of a run's JSON-lines file, or None without a file or step."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _LONGEST_LINE, 0))
        lines = file.read().splitlines()
    entry = parse_line(lines[-1]) if lines else None
    return None if entry is None else entry.get("step")


def temporary_name(path: Path) -> Path:
    """Return a hidden name beside `path` that no other program can foresee."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")


def create(path: Path) -> BinaryIO:
    """Create a file and open it for writing. Raises FileExistsError if the name exists, even as a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def refuse_link(path: Path) -> None:
    """Raise UserError if `path` is a link: a run would write the file that it points to."""
    if path.is_symlink():
        raise UserError(f"{path}: is a link, and a run writes only to its own files and folders; remove it")


def open_own(path: Path, flags: int = os.O_WRONLY | os.O_APPEND) -> int:
    """Return a descriptor of a run's own file, which is created if missing. Raises UserError if it is a link."""
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


def delete_temporary(folder: Path) -> None:
    """Delete what `replace_file` leaves in a folder when it is killed. The caller has exclusive use of the folder."""
    for path in folder.glob(f".*{TEMPORARY}"):
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file, in one piece or several, so that the old or the new one always exists. Raises OSError naming it."""
    temporary = temporary_name(path)
    try:
        with create(temporary) as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # on a full disk, the partial file would be in the way
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_new(out: Path) -> Path:
    """Return the folder into which `new_folder` writes what becomes `out`. Raises UserError if either exists."""
    if os.path.lexists(out) or out.name in ("", ".."):
        raise UserError(f"{out}: exists; choose another folder, or remove this one")
    partial = out.with_name(out.name + ".partial")
    if os.path.lexists(partial):
        why = "exists: another program is writing it, or was killed while it did"
        raise UserError(f"{partial}: {why}; remove it, or choose another folder than {out}")
    return partial


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, OUT.partial. It is renamed to `out` at the end, and removed on failure."""
    partial = check_new(out)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_folder(partial)
        partial.rename(out)
        sync_folder(out.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in FULL:  # which does not name the file
            raise OSError(error.errno, error.strerror, str(out)) from error
        raise


def sync_folder(path: Path) -> None:
    """Wait until the names in the folder (creations, renames, deletions) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def script(name: str) -> str:
    """Return the path of a program of this repository, as the current folder names it."""
    path = SOURCE.parent / name
    return name if Path(name).exists() or not path.exists() else shlex.quote(str(path))
