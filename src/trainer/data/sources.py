"""Sources: each gives its text as an order of blocks, the same at every reading, and a fingerprint of its state.

    text, stdlib    a file is a document; the hash of its path decides whether it is held out. Of a source that is one
                    text file the last part is held out.
    files           jsonl: ranges of about a megabyte, cut at line ends; compressed files are read here, in order;
                    CSV: rows, read here; parquet: row groups; text: as above
    hf              `hub`: rows, read here by the library `datasets`

`mixed` makes one order of several sources. With weights, the next block always comes from the source that is furthest
behind its share, in bytes of text (without what is held out by `validation_path`): the shares are exact after every few
megabytes, and need no random numbers. Lines of JSON count for as much of their bytes as is text in the first
megabyte of their source. (The order in which documents are read does not matter for training: the loader shuffles
windows over everything. The library `datasets` has `interleave_datasets`, which draws documents at random, weighs long
and short ones alike, and supports only its own sources.)
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from precision.errors import UserError
from trainer.config.data import Format, Source, SourceConfig, Stop
from trainer.data.compressed import LONGEST_BYTES, TOO_LONG, is_packed, unpack_error, whole_lines
from trainer.data.corpus import Document, choose_held_out, divide, scan
from trainer.data.csv_files import rows_of
from trainer.data.records import (
    BLOCK_BYTES,
    EMPTY,
    Block,
    Lines,
    RowGroup,
    SkipLog,
    TextFile,
    check_column,
)

SUFFIXES = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), Format.jsonl),
    ".csv": Format.csv,
    ".tsv": Format.tsv,
    **dict.fromkeys((".parquet", ".pq"), Format.parquet),
    **dict.fromkeys((".txt", ".text", ".md"), Format.text),
}


class Reader(Protocol):
    """An open source."""

    part: SourceConfig
    fingerprint: str
    """Differs for another state of the source."""
    num_bytes: int
    """Approximate size of its text; 0 if unknown."""

    def pin(self, commit: str | None) -> str | None:
        """Read only state `commit` from now on. Return the state, if the source names it. Call it before reading."""
        ...

    def blocks(self, log: SkipLog) -> Iterator[Block]:
        """Yield all blocks."""
        ...

    def sample(self, num_bytes: int, log: SkipLog) -> Iterator[Block]:
        """Yield at least this much of it, if it has so much, from all over it, for the tokenizer."""
        ...


def open_source(part: SourceConfig) -> Reader:
    """Open a source. Raises UserError, one line, if there is nothing to read."""
    return _open(part) if part.held_out is None else TrainAndHeldOut(part, part.held_out)


def _open(part: SourceConfig) -> Reader:
    if part.source is Source.hf:
        from trainer.data.hf_datasets import Dataset

        return Dataset(part)
    return Files(part)


class TrainAndHeldOut:
    """A source that is trained on as a whole, and one that is held out as a whole. The latter comes first: a mixture
    may end before all of the text has been read."""

    def __init__(self, part: SourceConfig, held_out: SourceConfig) -> None:
        self.part, self._same = part, part.path == held_out.path
        self._train, self._held_out = _open(part), _open(held_out)
        if isinstance(self._train, Files) and isinstance(self._held_out, Files):
            self._train.leave_out(self._held_out)
        both = f"{self._train.fingerprint}\nheld out {self._held_out.fingerprint}"
        self.fingerprint = hashlib.sha256(both.encode()).hexdigest()
        sizes = self._train.num_bytes, self._held_out.num_bytes
        self.num_bytes = sum(sizes) if all(sizes) else 0

    def pin(self, commit: str | None) -> str | None:
        commit = self._train.pin(commit)
        self._held_out.pin(commit if self._same else None)
        return commit

    def blocks(self, log: SkipLog) -> Iterator[Block]:
        for held_out, source in ((True, self._held_out), (False, self._train)):
            for block in source.blocks(log):
                yield replace(block, held_out=held_out)

    def sample(self, num_bytes: int, log: SkipLog) -> Iterator[Block]:
        for block in self._train.sample(num_bytes, log):
            yield replace(block, held_out=False)


class Files:
    """The files of a folder. Holds out a share of them, unless the source has text of its own for that."""

    def __init__(self, part: SourceConfig) -> None:
        self.part = part
        self._corpus = corpus = scan(part)
        self.fingerprint = corpus.fingerprint
        self._kinds = {document.path: self._kind(document.path) for document in corpus.documents}
        known = not any(packed for _, packed in self._kinds.values())
        self.num_bytes = corpus.num_bytes if known else 0
        self._divided: int | None = None
        self._held_out: set[str] = set()
        if part.held_out is not None:
            return
        texts = [document for document in corpus.documents if self._kinds[document.path][0] is Format.text]
        if len(corpus.documents) == len(texts) == 1 and known:
            self._divided = self._divide(texts[0])
            return
        self._held_out = {document.path for document in choose_held_out(texts, part.validation_fraction)}
        if texts and len(self._held_out) == len(corpus.documents):
            fix = "lower it, or give the text as more files" if len(texts) > 1 else "unpack it"
            raise UserError(
                f"data.validation_fraction={part.validation_fraction}: leaves none of {len(texts)} file(s) of "
                f"{part.name} for training, and only a single, uncompressed file can be divided: {fix}"
            )

    def leave_out(self, other: Files) -> None:
        """Skip files that `other` reads. Raises UserError if none is left."""
        theirs = {other._corpus.root / document.path for document in other._corpus.documents}
        corpus = self._corpus
        kept = tuple(document for document in corpus.documents if corpus.root / document.path not in theirs)
        if not kept:
            raise UserError(
                f"{self.part.key}.validation_path={self.part.validation_path}: has every file of {self.part.path}: "
                "nothing is left to train on; give other text"
            )
        self._corpus = replace(corpus, documents=kept)
        self.fingerprint = self._corpus.fingerprint
        self.num_bytes = self._corpus.num_bytes if self.num_bytes else 0

    def _divide(self, text: Document) -> int:
        """Return where the held-out part of the only file begins."""
        fraction = self.part.validation_fraction
        try:
            begin = divide(self._corpus.root / text.path, text.num_bytes, fraction)
        except OSError as error:
            raise UserError(f"{self.part.key}.path: {text.path} cannot be read: {error.strerror}") from error
        if not 0 < begin < text.num_bytes:
            side = "training" if begin <= 0 else "validation"
            raise UserError(
                f"data.validation_fraction={fraction}: leaves nothing of {text.path}, {text.num_bytes:,} "
                f"bytes, for {side}: change it, or give more text"
            )
        return begin

    def _kind(self, path: str) -> tuple[Format, bool]:
        """Return the format of a file, and whether it is compressed."""
        if self.part.source is not Source.files:
            return Format.text, False
        name = Path(path)
        packed = is_packed(name)
        suffix = Path(name.stem).suffix if packed else name.suffix
        kind = SUFFIXES.get(suffix.lower()) if self.part.format is Format.auto else self.part.format
        if kind is None:
            raise UserError(
                f"{self.part.key}.format=auto: {path} has no suffix that tells its format: set "
                f"{self.part.key}.format=jsonl, csv, tsv, parquet or text, or leave it out by {self.part.key}.glob"
            )
        if packed and kind is Format.parquet:
            raise UserError(f"{self.part.key}.glob={self.part.glob}: {path} is compressed Parquet: unpack it")
        return kind, packed

    def pin(self, commit: str | None) -> None:
        """Do nothing: files have no commits, and the fingerprint identifies their state."""

    def blocks(self, log: SkipLog) -> Iterator[Block]:
        for path, why in self._corpus.missing:
            log.lost(self._label(path), why)
        for path in self._corpus.empty:
            log.add(self._label(path), EMPTY, "all of it")
        for document in self._corpus.documents:
            yield from self._blocks(document, log)

    def sample(self, num_bytes: int, log: SkipLog) -> Iterator[Block]:
        """Yield the beginnings of all files, or whole files that are documents, in the order of the hashes of their
        paths: random but fixed."""
        order = [d for d in sorted(self._corpus.documents, key=lambda d: d.position) if d.path not in self._held_out]
        taken = 0
        for number, document in enumerate(order):
            until = taken + (num_bytes - taken) / (len(order) - number)
            if self._kinds[document.path][0] is Format.text:
                until = num_bytes
            for block in self._blocks(document, log):
                if block.held_out:
                    continue
                room = max(int(until - taken), BLOCK_BYTES)
                if isinstance(block, RowGroup) and block.num_bytes > room:
                    rows = -(-block.num_rows * room // block.num_bytes)
                    block = replace(block, num_rows=rows, size=room)
                yield block
                taken += block.num_bytes
                if taken >= until:
                    break
            if taken >= num_bytes:
                return

    def _label(self, path: str) -> str:
        return path if self.part.key == "data" else f"{self.part.name}/{path}"

    def _blocks(self, document: Document, log: SkipLog) -> Iterator[Block]:
        path, label = self._corpus.root / document.path, self._label(document.path)
        kind, packed = self._kinds[document.path]
        if self._divided is not None:
            yield TextFile(path, 0, self._divided, label=label, held_out=False)
            yield TextFile(path, self._divided, document.num_bytes, label=label, held_out=True)
        elif kind is Format.text:
            held_out = document.path in self._held_out
            yield TextFile(path, 0, document.num_bytes, packed, label=label, held_out=held_out)
        elif kind is Format.parquet:
            yield from row_groups(path, label, self.part, log)
        elif kind in (Format.csv, Format.tsv):
            yield from rows_of(path, label, self.part, "," if kind is Format.csv else "\t", log)
        elif packed:
            yield from lines_of_packed(path, label, self.part, log)
        else:
            yield from line_ranges(path, label, self.part, log)


def line_ranges(path: Path, label: str, part: SourceConfig, log: SkipLog) -> Iterator[Block]:
    """Yield ranges of a file of lines, up to a line that is too long."""
    begin = 0
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            while begin < size:
                file.seek(min(begin + BLOCK_BYTES, size) - 1)
                if not file.readline(LONGEST_BYTES).endswith(b"\n") and file.tell() < size:
                    raise OSError(errno.EFBIG, f"a line is {TOO_LONG}")
                yield Lines(path, begin, file.tell(), part, label=label)
                begin = file.tell()
    except OSError as error:
        log.lost(label, f"cannot be read: {error.strerror}, after byte {begin}")


def lines_of_packed(path: Path, label: str, part: SourceConfig, log: SkipLog) -> Iterator[Block]:
    """Yield the lines of a compressed file. Of a damaged one, those before the damage."""
    begin = lines = 0
    try:
        for data in whole_lines(path):
            yield Lines(path, begin, begin + len(data), part, data, lines, label=label)
            begin, lines = begin + len(data), lines + data.count(b"\n")
    except OSError as error:
        log.lost(label, f"{unpack_error(error)}, after byte {begin} of its text")


def row_groups(path: Path, label: str, part: SourceConfig, log: SkipLog) -> Iterator[Block]:
    """Yield the row groups of a parquet file."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            meta, schema = file.metadata, file.schema_arrow
    except (OSError, pyarrow.ArrowException) as error:
        why = "cut off, or not Parquet" if isinstance(error, pyarrow.ArrowInvalid) else "cannot be read"
        log.lost(label, f"{why}: {str(error).splitlines()[0][:100]}")
        return
    check_column(part, label, schema.names, schema)
    column = next(i for i in range(meta.num_columns) if meta.schema.column(i).path == part.text_column)
    begin = 0
    for index in range(meta.num_row_groups):
        group = meta.row_group(index)
        size = group.column(column).total_uncompressed_size
        yield RowGroup(path, index, begin, group.num_rows, size, part.text_column, label=label)
        begin += group.num_rows


class MixedBlock(NamedTuple):
    """A block of a mixture."""

    source: str
    """Name of its source."""
    block: Block
    again: bool
    """Whether the source has already been read to its end once."""


def mixed(readers: Sequence[Reader], stop: Stop, log: SkipLog) -> Iterator[MixedBlock]:
    """Yield one order of all sources: one after the other, or by their weights."""
    if readers[0].part.weight is None:
        for reader in readers:
            for block in reader.blocks(log):
                yield MixedBlock(reader.part.name, block, False)
        return
    streams = [reader.blocks(log) for reader in readers]
    taken, shares = [0.0] * len(readers), [0.0] * len(readers)
    ended: set[int] = set()
    while True:
        source = min(range(len(readers)), key=lambda i: (taken[i] / (readers[i].part.weight or 1.0), i))
        part, block = readers[source].part, next(streams[source], None)
        if block is None:
            ended.add(source)
            if stop is Stop.first_exhausted or len(ended) == len(readers):
                return
            if not taken[source]:
                raise UserError(f"{part.key}.path={part.path}: has no text to repeat: leave it out of data.mix")
            streams[source] = readers[source].blocks(SkipLog(strict=False))
            continue
        if not block.held_out:
            shares[source] = shares[source] or _share_of_text(block)
            taken[source] += block.num_bytes * shares[source]
        yield MixedBlock(part.name, block, source in ended)


def _share_of_text(block: Block) -> float:
    """Return the share of a block's bytes that is text of documents, where other keys stand beside it; 1 if it has
    none."""
    if not isinstance(block, Lines):
        return 1.0
    text = sum(piece.num_bytes for piece in block.pieces(SkipLog(strict=False)))
    return text / block.num_bytes if text else 1.0
