"""Files read in order, compressed or not: a block at a time, or whole lines."""

from __future__ import annotations

import errno
import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCK_BYTES = 1 << 20
_PIECE_BYTES = 1 << 14  # of a block
LONGEST_BYTES = 1 << 28
"""Limit of a line, and of a compressed text file: each is in memory as a whole."""
TOO_LONG = f"longer than {LONGEST_BYTES >> 20} MiB"


def is_packed(path: Path) -> bool:
    """Return whether a file is compressed, by its name."""
    return path.suffix.lower() in (".gz", ".zst")


def unpack(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file, unpacked if it is a .gz or .zst, a block at a time. Raises OSError if they are
    damaged or truncated, after what can be read."""
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


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file about a block at a time, each to a line's end. Raises OSError if they cannot be read
    further, or have a line above LONGEST_BYTES, after the lines before."""
    rest = bytearray()  # of a line that continues in the next block
    for data in unpack(path):
        if cut := data.rfind(b"\n") + 1:
            yield bytes(rest + data[:cut])
            rest.clear()
        rest += data[cut:]
        if len(rest) > LONGEST_BYTES:
            raise OSError(errno.EFBIG, f"a line is {TOO_LONG}")
    if rest:
        yield bytes(rest)


@contextmanager
def _opened(path: Path) -> Iterator[Callable[[], bytes]]:
    """Open a file; yield a function that reads a piece. What it has of a piece is lost when it fails."""
    if not is_packed(path):
        with path.open("rb") as file:
            yield lambda: file.read(BLOCK_BYTES)
        return
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as file:
            yield lambda: file.read1(BLOCK_BYTES)
        return
    import pyarrow  # the library zstandard accepts a truncated file as complete

    with pyarrow.CompressedInputStream(str(path), "zstd") as stream:
        yield lambda: stream.read(_PIECE_BYTES)


def unpack_error(error: OSError) -> str:
    """Return in words why a file that may be compressed cannot be read."""
    if error.errno:
        return f"cannot be read: {error.strerror}"
    text = str(error.strerror or error)
    return "cut off" if "truncated" in text.lower() or text == "cut off" else f"cannot be unpacked: {text}"
