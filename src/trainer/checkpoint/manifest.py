"""The manifest, which proves that a checkpoint folder is complete.

`manifest.json`, written last, lists every file of the folder with its size and SHA-256, and carries a digest of that
list:

    {"files": {"rank00000.safetensors": {"bytes": 81234, "sha256": "..."}, ...}, "format": 1, "sha256": "..."}

`verify` compares sizes first (a truncated file is found without reading anything), then contents. It checks every file,
the manifest included: the manifest must be, byte for byte, the text that its content serialises to. It ignores files
that are not listed (a network file system may leave some).

Durability: a file's bytes are on the disk when `os.fsync` of the file returns, its *name* when `os.fsync` of the folder
does. Both are needed before a rename may announce the folder.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from precision.errors import UserError
from trainer.files import sync_folder

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1
NO_FILE = errno.EISDIR, errno.ENOTDIR, errno.ELOOP
"""Errors of reading a folder, in what is no folder, or a link to itself."""
_PIECE_BYTES = 1 << 24
_THREADS = 8


class DamagedCheckpoint(UserError):
    """A checkpoint folder differs from what was saved. The message names the file and the problem."""


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hexadecimal) of one file."""

    bytes: int
    sha256: str


def write_file(path: Path, text: str) -> FileDigest:
    """Write `text` (UTF-8) to `path`, wait until it is on the disk, return its digest."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(len(data), hashlib.sha256(data).hexdigest())


def write_manifest(folder: Path, files: dict[str, FileDigest]) -> None:
    """Write the manifest of `files` (by name within the folder) and sync the folder: from here on it verifies."""
    write_file(folder / MANIFEST, _manifest_text({name: asdict(digest) for name, digest in files.items()}))
    sync_folder(folder)


def verify(folder: Path, only: str | None = None, share: tuple[int, int] = (0, 1)) -> None:
    """Check that every file of the checkpoint, or `only` one, is as saved. Raises DamagedCheckpoint, naming the file.

    share: (number, count): of `count` about equal shares of the files, this one.
    """
    listed = _read_manifest(folder / MANIFEST)
    largest_first = sorted(listed, key=lambda name: (-listed[name]["bytes"], name))
    files = {name: listed[name] for name in largest_first[share[0] :: share[1]] if only in (None, name)}
    for name, expected in files.items():
        path = folder / name
        with _reading(path):
            size = path.stat().st_size
        if size != expected["bytes"]:
            raise DamagedCheckpoint(f"{path} has {size} bytes instead of {expected['bytes']}")
    with ThreadPoolExecutor(max_workers=_THREADS) as threads:  # hashing releases the GIL
        digests = threads.map(_sha256, [folder / name for name in files])
        for name, digest in zip(files, digests, strict=True):
            if digest != files[name]["sha256"]:
                raise DamagedCheckpoint(f"{folder / name} was altered (its SHA-256 is not the saved one)")


def _manifest_text(files: dict[str, dict[str, Any]]) -> str:
    listing = json.dumps(files, sort_keys=True)
    content = {"files": files, "format": FORMAT, "sha256": hashlib.sha256(listing.encode()).hexdigest()}
    return json.dumps(content, sort_keys=True, indent=1) + "\n"


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    try:
        with _reading(path):
            text = path.read_text()
    except UnicodeDecodeError:
        raise DamagedCheckpoint(f"{path} was altered (it is not text)") from None
    try:
        content = json.loads(text)
    except ValueError:
        raise DamagedCheckpoint(f"{path} was truncated or altered (it is not JSON)") from None
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or text != _manifest_text(files):
        raise DamagedCheckpoint(f"{path} was altered (it does not match its own digest) or is of another format")
    return files


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with _reading(path), path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise DamagedCheckpoint for a path without a file or a failing disk. Other errors are not the checkpoint's."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except OSError as error:
        if error.errno not in (errno.EIO, *NO_FILE):
            raise
        why = "it is no file" if error.errno in NO_FILE else "the disk fails"
        raise DamagedCheckpoint(f"{path} cannot be read: {why} ({error.strerror})") from error
