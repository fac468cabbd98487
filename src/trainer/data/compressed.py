"""Compressed files, read a block at a time."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCK_BYTES = 1 << 20
_PIECE_BYTES = 1 << 14  # of a block


def is_packed(path: Path) -> bool:
    """Return whether a file is compressed, by its name."""
    return path.suffix.lower() in (".gz", ".zst")


def unpack(path: Path) -> Iterator[bytes]:
    """Yield the contents of a .gz or .zst file, a block at a time. Raises OSError if they are damaged or truncated,
    after what can be read."""
    held = bytearray()
    try:
        with _opened(path) as read:
            while piece := read():
                held += piece
                if len(held) >= BLOCK_BYTES:
                    yield bytes(held)
                    held.clear()
    except (EOFError, zlib.error, OSError) as error:
        if held:
            yield bytes(held)
        if isinstance(error, OSError):
            raise
        raise OSError("cut off" if isinstance(error, EOFError) else str(error)) from error
    if held:
        yield bytes(held)


@contextmanager
def _opened(path: Path) -> Iterator[Callable[[], bytes]]:
    """Open a compressed file; yield a function that reads a piece. What it has of a piece is lost when it fails."""
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as file:
            yield lambda: file.read1(BLOCK_BYTES)
        return
    import pyarrow  # the library zstandard accepts a truncated file as complete

    with pyarrow.CompressedInputStream(str(path), "zstd") as stream:
        yield lambda: stream.read(_PIECE_BYTES)


def unpack_error(error: Exception) -> str:
    """Return in words why a file that may be compressed cannot be read."""
    if isinstance(error, OSError) and error.errno:
        return f"cannot be read: {error.strerror}"
    text = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
    return "cut off" if "truncated" in text.lower() or text == "cut off" else f"cannot be unpacked: {text}"
