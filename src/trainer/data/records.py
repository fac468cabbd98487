"""Documents: the common form of all sources, and what is left out on the way.

A source is an order of `Block`s of about a megabyte each, small enough to be passed to another process. A block is
either a place to read at (a range of bytes of a file, a row group), or the data itself if everything before it must be
read (compressed files, streams). A block yields its documents as `Piece`s of text, in order. Nothing else is known
about a source after that: the same documents give the same tokens, whatever file format they come from.

Whether a document is held out for validation is decided for each on its own, unless its block says so: if the hash of
its text, read as a number in [0, 1), is below `fraction`. So the split needs no seed and no list, and equal documents
are on one side.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from precision.errors import UserError, counted
from trainer.config.data import Source, SourceConfig
from trainer.data.compressed import BLOCK_BYTES, LONGEST_BYTES, TOO_LONG, unpack, unpack_error
from trainer.data.corpus import NOT_UTF8, TO_UTF8, lines_before, read_pieces, unreadable_reason

COUNTED_BYTES = 1 << 30
"""Lines of a file are counted for a message only up to this byte."""
EMPTY = "empty"
COLUMN = ".text_column"
NO_TEXT = "is not text"
ONE_VALUE = "one JSON value for the whole file instead of one object a line (jq -c '.[]' converts an array)"


class Piece(NamedTuple):
    """A document, or, of a long file, some of its lines."""

    text: str
    num_bytes: int
    """In UTF-8."""
    ends_document: bool


@dataclass(frozen=True)
class Skipped:
    """Documents that are not in the bins."""

    path: str
    why: str
    count: int
    """Number of documents. 0: a file, or the rest of one, whose documents cannot be counted."""
    first: str
    """Place of the first of them; of a file, the byte that is wrong, if one is."""

    def line(self) -> str:
        """Format it without brackets."""
        first = f"first at {self.first}" if self.count > 1 else self.first
        return f"{self._name}{', ' * bool(first)}{first}: {self.why}"

    @property
    def _name(self) -> str:
        """The path, printable if it is not UTF-8."""
        return self.path.encode(errors="backslashreplace").decode()

    def __str__(self) -> str:
        if not self.count:
            return f"{self._name} ({self.why}{self.first and f', {self.first}'})"
        first = "first at " if self.count > 1 else ""
        return f"{counted(self.count, 'document')} of {self._name} ({self.why}; {first}{self.first})"


@dataclass(frozen=True)
class Line:
    """A line of a file, described when printed: `line 3`, or by its byte if counting lines would take long."""

    block: Lines
    number: int
    """In its block, from 1."""
    byte: int

    def __str__(self) -> str:
        before = self.block.lines_before()
        return f"the line at byte {self.byte}" if before is None else f"line {before + self.number}"


Place = str | Line


@dataclass
class SkipLog:
    """Counts what is left out. strict: raise UserError for damage instead."""

    strict: bool
    found: dict[tuple[str, str], Skipped] = field(default_factory=dict)

    def add(self, path: str, why: str, where: Place = "", count: int = 1, which: str = "") -> None:
        """Record documents of `path` that are left out. where: in it. why: a fixed phrase. which: of the first one."""
        before = self.found.get((path, why))
        if before is not None:
            self.found[path, why] = replace(before, count=before.count + count)
            return
        first = f"{where}{which and f', {which}'}"
        if self.strict and why != EMPTY:
            raise UserError(
                f"data.skip_damaged=false: {path}{', ' * bool(first)}{first}: {why}: repair or remove it, or set "
                "data.skip_damaged=true to train without it"
            )
        self.found[path, why] = Skipped(path, why, count, first)

    def lost(self, path: str, why: str, where: str = "") -> None:
        """Record a file, or the rest of one, that cannot be read."""
        self.add(path, why, where, count=0)


@dataclass(frozen=True, kw_only=True)
class Block(ABC):
    """Some documents of a source."""

    label: str
    """Its file, or dataset, in messages."""
    held_out: bool | None = None
    """Whether all of its documents are; None: each by its hash."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Approximate bytes of text, used to cut shards and weigh sources. The same at each reading."""

    @abstractmethod
    def pieces(self, log: SkipLog) -> Iterator[Piece]:
        """Yield its documents in order. Unusable ones go to the log."""

    def holds_out(self, piece: Piece, fraction: float) -> bool:
        """Return whether one of its pieces is held out."""
        return position(piece.text) < fraction if self.held_out is None else self.held_out

    def _document(self, text: str | bytes, where: Place, log: SkipLog) -> Iterator[Piece]:
        """Yield one document, if it is usable."""
        if not text:
            log.add(self.label, EMPTY, where)
            return
        try:
            data, whole = (text.encode(), text) if isinstance(text, str) else (text, text.decode())
        except UnicodeDecodeError:
            log.add(self.label, NOT_UTF8, where)
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can contain
            log.add(self.label, "not Unicode text", where)
        else:
            yield Piece(whole, len(data), True)


def position(text: str) -> float:
    """Return the hash of a document as a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


@dataclass(frozen=True)
class Range(Block):
    """The bytes [begin, end) of a file."""

    path: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Lines(Range):
    """JSON objects, one a line: bytes of a file, unpacked."""

    part: SourceConfig
    data: bytes | None = None
    """These bytes, if they had to be read already."""
    num_before: int | None = None
    """Number of lines before them, if it is known."""

    def pieces(self, log: SkipLog) -> Iterator[Piece]:
        data = self.data
        try:
            if data is None:
                with self.path.open("rb") as file:
                    file.seek(self.begin)
                    data = file.read(self.num_bytes)
        except OSError as error:
            log.lost(self.label, f"cannot be read: {error.strerror}")
            return
        place = self.begin
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():  # else no document: an empty one is {"text": ""}
                yield from self._parsed(line, Line(self, number, place), log)
            place += len(line) + 1

    def _parsed(self, line: bytes, where: Line, log: SkipLog) -> Iterator[Piece]:
        label, column = self.label, self.part.text_column
        try:
            record = json.loads(line.decode().removeprefix("\ufeff"))  # some programs begin a file with this mark
        except UnicodeDecodeError:
            log.add(label, NOT_UTF8, where)
            return
        except (ValueError, RecursionError):
            starts = where.byte == 0 and (line.lstrip().startswith(b"[") or line.strip() == b"{")
            log.add(label, ONE_VALUE if starts else "not JSON", where)
            return
        if not isinstance(record, dict):
            is_array = where.byte == 0 and isinstance(record, list)
            log.add(label, ONE_VALUE if is_array else "not a JSON object", where)
        elif column not in record:
            has = ", ".join(list(record)[:9])
            log.add(label, f"no key {column}, which {self.part.key}{COLUMN} names", where, which=f"which has {has}")
        elif record[column] is not None and not isinstance(record[column], str):
            log.add(label, f"the value of {column} {NO_TEXT}", where)
        else:
            yield from self._document(record[column] or "", where, log)

    def lines_before(self) -> int | None:
        """Return the number of lines of the file before this block, for a message; None far into a large file, which
        would have to be read again."""
        if self.num_before is not None:
            return self.num_before
        return None if self.begin > COUNTED_BYTES else lines_before(self.path, self.begin)


@dataclass(frozen=True)
class Rows(Block):
    """Texts of rows that had to be read already, and the number of each. None: a row without text."""

    values: Sequence[bytes | None]
    numbers: Sequence[int]
    unit: str = "row"
    """What is numbered: rows, or the lines that they begin in."""

    @property
    def num_bytes(self) -> int:
        return sum(len(value) for value in self.values if value)

    def pieces(self, log: SkipLog) -> Iterator[Piece]:
        for number, value in zip(self.numbers, self.values, strict=True):
            yield from self._document(value or "", f"{self.unit} {number}", log)


@dataclass(frozen=True)
class RowGroup(Block):
    """A row group of a parquet file, or its first `num_rows` rows."""

    path: Path
    index: int
    begin: int
    """Rows before it."""
    num_rows: int
    size: int
    """Bytes of its text column."""
    column: str

    @property
    def num_bytes(self) -> int:
        return self.size

    def pieces(self, log: SkipLog) -> Iterator[Piece]:
        import pyarrow
        from pyarrow import parquet

        row, end = self.begin, self.begin + self.num_rows
        try:  # a group may be as large as its file: read it piece by piece
            with parquet.ParquetFile(self.path, buffer_size=BLOCK_BYTES, pre_buffer=False) as file:
                batches = file.iter_batches(1024, [self.index], [self.column], use_threads=False)
                while row < end and (batch := next(batches, None)) is not None:
                    values = as_bytes(batch.column(self.column)[: end - row])
                    numbers = range(row, row + len(values))
                    yield from Rows(values, numbers, label=self.label).pieces(log)
                    row = numbers.stop
        except (OSError, pyarrow.ArrowException):
            log.add(self.label, "the row group cannot be read", f"row {row}", end - row)


def check_column(part: SourceConfig, label: str, names: Sequence[str], schema) -> None:
    """Raise UserError if the text column is missing or is not text."""
    column, key = part.text_column, f"{part.key}{COLUMN}"
    if column not in names:
        other = f", or leave it out by {part.key}.glob" if part.source is Source.files else ""
        raise UserError(f"{key}={column}: {label} has no such column: {_choice(part, names, schema is None)}{other}")
    if list(names).count(column) > 1:
        raise UserError(f"{key}={column}: {label} has several columns of that name: rename all but one")
    kind = str(schema.field(column).type) if schema is not None else "string"
    nested = any(word in kind for word in ("list", "struct", "map", "union"))
    if nested or not any(word in kind for word in ("string", "binary")):
        raise UserError(f"{key}={column}: this column of {label} is {kind}, not text: set another")


def _choice(part: SourceConfig, names: Sequence[str], in_first_row: bool) -> str:
    if any("\udc80" <= letter <= "\udcff" for letter in "".join(names)):
        return f"its first row is {NOT_UTF8}; {TO_UTF8}"
    if len(names) == 1 and ";" in names[0]:
        return f"its first row is {names[0]}; separate columns with commas, or with tabs and {part.key}.format=tsv"
    row = ", the names in its first row" if in_first_row else ""
    return f"set one of {', '.join(names)}{row}"


def as_bytes(column) -> list[bytes | None]:
    """Return a column of texts, of any of Arrow's types for them, as bytes, not yet checked to be UTF-8."""
    import pyarrow

    return column.cast(pyarrow.large_binary()).to_pylist()


@dataclass(frozen=True)
class TextFile(Range):
    """A file that is a document, or a part of one."""

    packed: bool = False
    """gz or zst: read as a whole."""

    def pieces(self, log: SkipLog) -> Iterator[Piece]:
        if self.packed:
            yield from self._unpacked(log)
            return
        if wrong := unreadable_reason(self.path):
            log.lost(self.label, *wrong)
            return
        waiting: str | None = None
        try:
            for text in read_pieces(self.path, self.begin, self.end):
                if waiting is not None:
                    yield Piece(waiting, len(waiting.encode()), False)
                waiting = text
        except (OSError, UnicodeDecodeError) as error:  # it was readable a moment ago
            why = getattr(error, "strerror", None) or "no longer UTF-8 text"
            raise UserError(f"data: {self.path} cannot be read ({why}): start again when it is complete") from error
        if waiting is None:
            log.add(self.label, EMPTY, "all of it")
        else:
            yield Piece(waiting, len(waiting.encode()), True)

    def _unpacked(self, log: SkipLog) -> Iterator[Piece]:
        data = bytearray()
        try:
            for block in unpack(self.path):
                data += block
                if len(data) > LONGEST_BYTES:
                    log.lost(self.label, f"{TOO_LONG} unpacked: unpack the file")
                    return
        except OSError as error:
            log.lost(self.label, unpack_error(error))
            return
        yield from self._document(bytes(data.removeprefix(BOM_UTF8)), "all of it", log)
