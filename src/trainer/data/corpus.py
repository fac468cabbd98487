"""The corpus: the files that are documents, the side of the split of each, and their text.

A document is a file. The SHA-256 of its path inside the folder, read as a number in [0, 1), decides its side: below
`validation_fraction` it is validation. So the split needs no seed and no list, and does not change when other files
come or go. (The file with the smallest hash is always validation, so that a small corpus has some.)

The fingerprint identifies a state of the source. It covers each file's path, size and modification time, as make and
rsync do: listing a folder is fast at any size, and a needless rebuild (a touched file) costs little.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path

from precision.errors import UserError
from trainer.config.data import Source, SourceConfig

NOT_UTF8 = "not UTF-8 text"
TO_UTF8 = "convert it: iconv -f ENCODING -t UTF-8 FILE > NEW"
PIECE_BYTES = 1 << 20  # longer files are read in pieces of about this size, cut at line ends
LONGEST_LINE = 1 << 22  # bytes; a longer line is cut, or a file without lines would fill the memory


@dataclass(frozen=True)
class Document:
    """One file of the corpus."""

    path: str
    """Relative to the corpus folder, with forward slashes."""
    num_bytes: int
    mtime_ns: int

    @property
    def position(self) -> float:
        """Hash of the path as a number in [0, 1)."""
        return int.from_bytes(hashlib.sha256(self.path.encode("utf-8", "surrogateescape")).digest()[:6], "big") / 2**48


@dataclass(frozen=True)
class Corpus:
    """The files of a folder that are documents, sorted by path."""

    root: Path
    documents: tuple[Document, ...]
    missing: tuple[tuple[str, str], ...] = ()
    """Paths of missing entries (broken links, folders that cannot be listed), and why they are missing."""
    empty: tuple[str, ...] = ()
    """Files without a byte."""

    @property
    def num_bytes(self) -> int:
        return sum(document.num_bytes for document in self.documents)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the folder's path, each file's path, size and modification time, and what is missing."""
        digest = hashlib.sha256(f"{self.root}\n".encode("utf-8", "surrogateescape"))
        for document in self.documents:
            line = f"{document.path}\0{document.num_bytes}\0{document.mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        for path, _ in self.missing:
            digest.update(f"{path}\0missing\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def scan(part: SourceConfig) -> Corpus:
    """List the corpus. Raises UserError if no file of it has text."""
    root = _root(part)
    if root.is_file():
        status = root.stat()
        if not status.st_size:
            raise UserError(f"{part.path_key}={part.path}: an empty file: give one with text")
        return Corpus(root.parent, (Document(root.name, status.st_size, status.st_mtime_ns),))
    documents, missing, empty = [], [], []

    def unlisted(error: OSError) -> None:
        path = Path(error.filename)
        where = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
        missing.append((where, f"a folder that cannot be listed: {error.strerror}"))

    for folder, names in walk(root, part.exclude, part.source is not Source.stdlib, unlisted):
        inside = Path(folder).relative_to(root).parts
        for name in names:
            if not _is_listed(part, [*inside, name]):
                continue
            path = "/".join([*inside, name])
            try:
                status = os.stat(os.path.join(folder, name))
            except OSError as error:
                missing.append((path, f"a dangling link: {error.strerror}"))
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size:
                documents.append(Document(path, status.st_size, status.st_mtime_ns))
            elif stat.S_ISREG(status.st_mode):
                empty.append(path)
    if missing and not documents:
        why = f"no text can be read; {missing[0][0]}: {missing[0][1]}: correct that"
        raise UserError(f"{part.path_key}={part.path}: {why}")
    if not documents:
        fix = f"check {part.key}.glob and data.exclude"
        if part.source is Source.stdlib:
            fix = "train on a folder with data=text data.path=FOLDER"
        raise UserError(f"{part.key}.glob={part.glob}: no file with text matches below {root}: {fix}")
    documents.sort(key=attrgetter("path"))
    return Corpus(root, tuple(documents), tuple(sorted(missing)), tuple(sorted(empty)))


def walk(
    root: Path, exclude: Sequence[str], links: bool = True, on_error: Callable[[OSError], None] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Yield the folders below `root`, with the names of their files; none that is hidden, and no folder in `exclude`.
    A folder that several paths lead to is read once, under the path without links if `root` has one. links: also
    folders behind links."""
    seen: set[tuple[int, int]] = set()
    place = Path(os.path.realpath(root))

    def is_reached_here(path: str) -> bool:
        """Return whether a folder is no link to one that is reached without it."""
        if not os.path.islink(path):
            return True
        real = Path(os.path.realpath(path))
        return not (real.is_relative_to(place) and _is_entered(real.relative_to(place).parts, exclude))

    for folder, folders, names in os.walk(root, onerror=on_error, followlinks=links):
        status = os.stat(folder)
        if (identity := (status.st_dev, status.st_ino)) in seen:
            folders.clear()
            continue
        seen.add(identity)
        entered = sorted(name for name in folders if _is_entered([name], exclude))
        folders[:] = [name for name in entered if is_reached_here(os.path.join(folder, name))]
        yield folder, [name for name in names if not name.startswith(".")]


def reads(part: SourceConfig, path: Path) -> bool:
    """Return whether a file at `path`, a resolved one, is or would be of a source."""
    root = _root(part)
    inside = path.relative_to(root).parts if path.is_relative_to(root) and path != root else ()
    if not inside or any(name.startswith(".") for name in inside):
        return False
    if part.source is Source.hf:
        return True
    return _is_entered(inside[:-1], part.exclude) and _is_listed(part, inside)


def choose_held_out(documents: Sequence[Document], validation_fraction: float) -> list[Document]:
    """Return the documents that are held out, in the given order. The one with the smallest hash always is, so that a
    small corpus has a validation text."""
    first = min((document.position for document in documents), default=0.0)
    return [each for each in documents if each.position < validation_fraction or each.position == first]


def unreadable_reason(path: Path) -> tuple[str, str] | None:
    """Return why a file cannot be a document (it cannot be read, or is not UTF-8 text), and the place in it; None if it
    can. Reads it in blocks."""
    decoder, end = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                end += len(block)
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        byte = end - len(error.object) + error.start
        where = f"byte {byte} in line {1 + lines_before(path, byte)}"
        return "cut off within a character" if error.reason == "unexpected end of data" else NOT_UTF8, where
    except OSError as error:
        return f"cannot be read: {error.strerror}", ""
    return None


def lines_before(path: Path, byte: int) -> int:
    """Return the number of lines of a file that end before a byte."""
    lines, left = 0, byte
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 1 << 20))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def divide(path: Path, num_bytes: int, validation_fraction: float) -> int:
    """Return the byte at which the held-out last part of a file begins: after the first line end that follows the
    training share of the text; without one, at a character. `num_bytes` if there is no such part."""
    begin = num_bytes - int(num_bytes * validation_fraction)
    with path.open("rb") as file:
        file.seek(max(begin - 1, 0))
        line = file.readline(LONGEST_LINE)
        if line.endswith(b"\n") and begin - 1 + len(line) < num_bytes:
            return begin - 1 + len(line)
        file.seek(begin)
        ahead = file.read(4)
        return begin + next((i for i, byte in enumerate(ahead) if byte & 0xC0 != 0x80), len(ahead))


def read_pieces(path: Path, begin: int, end: int) -> Iterator[str]:
    """Yield the text of the bytes [begin, end) of a file without its byte order mark, line ends untouched, in pieces of
    whole lines (to LONGEST_LINE). Most files are one piece."""
    decoder = codecs.getincrementaldecoder("utf-8-sig" if begin == 0 else "utf-8")()
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end and (piece := file.read(min(PIECE_BYTES, end - begin))):
            piece += file.readline(min(LONGEST_LINE, end - begin - len(piece)))
            begin += len(piece)
            if text := decoder.decode(piece, final=begin == end):
                yield text


def _root(part: SourceConfig) -> Path:
    return Path(sysconfig.get_path("stdlib") if part.source is Source.stdlib else str(part.path)).resolve()


def _is_listed(part: SourceConfig, parts: Sequence[str]) -> bool:
    """Return whether the glob names a file, by the parts of its path inside the folder."""
    patterns = (pattern.strip().split("/") for pattern in part.glob.split("|"))
    return not parts[-1].startswith(".") and any(_matches(list(parts), pattern) for pattern in patterns)


def _is_entered(folders: Sequence[str], exclude: Sequence[str]) -> bool:
    """Return whether none of these names of folders is hidden or one of `data.exclude`."""
    return not any(name.startswith(".") or any(fnmatchcase(name, pattern) for pattern in exclude) for name in folders)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (bool(parts) and _matches(parts[1:], pattern))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
