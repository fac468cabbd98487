"""Bins: all tokens of a split in one file, with a JSON sidecar that says what they are.

    train.bin    ids, little-endian uint16 (uint32 above 65536 entries):  E d d d d E d d E d d d E   (E: end of text)
    train.json   tokens, documents, dtype, SHA-256 of the ids, of the tokenizer.json, fingerprint of the source

The leading end-of-text makes the first token of the first document a target too. `Bins.open` checks size and SHA-256
(about a second a gigabyte), so that a truncated or altered file, or one of another tokenizer, is refused instead of
trained on.

Windows are read from the open file (one `pread` each, some microseconds) and not from a memory map: what a disk cannot
deliver, or what was cut off under a run, is an error that names the file here, and a SIGBUS without a word there. A
file that is deleted under a run stays readable until the run ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path

import numpy as np

from trainer.data.tokenizer import file_hash

FORMAT = 1  # of bin and sidecar; raised when either changes meaning


@dataclass(frozen=True)
class Sidecar:
    """What the ids of a bin are; field for field the JSON beside it."""

    format: int
    num_tokens: int
    num_documents: int
    num_text_bytes: int
    """UTF-8 bytes of the documents: with num_tokens, the compression."""
    num_skipped_files: int
    """Files of the whole source that are damaged and were left out."""
    dtype: str
    sha256: str
    vocab_size: int
    """Entries of the tokenizer: every id is below it."""
    end_of_text: int
    tokenizer_hash: str
    source_fingerprint: str


class DamagedShard(OSError):
    """A file of the data can no longer be read as it was when it was checked; the message names it and says why."""


class Bins:
    """One split, open for reading, and its `sidecar`."""

    def __init__(self, path: Path, sidecar: Sidecar, tokens: np.ndarray | None = None) -> None:
        """tokens [num_tokens], uint16 or uint32: to be used instead of what is in the file `path`."""
        self.path = path
        self.sidecar = sidecar
        self._tokens = tokens
        self._file = -1
        if tokens is None:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    @classmethod
    def open(cls, path: str | Path, tokenizer_hash: str) -> Bins:
        """Map `path` (NAME.bin, with NAME.json beside it) and check it.

        ValueError, naming the file, if it is missing, truncated or altered, or made with another tokenizer.
        """
        path = Path(path)
        fix = f"delete {path.parent} and prepare the data again"
        sidecar = _read_sidecar(path.with_suffix(".json"), fix)
        if sidecar.tokenizer_hash != tokenizer_hash:
            raise ValueError(
                f"bins {path}: packed with tokenizer {sidecar.tokenizer_hash[:12]}, "
                f"not with {tokenizer_hash[:12]}: {fix}"
            )
        dtype = _stored(sidecar.dtype)
        expected = sidecar.num_tokens * dtype.itemsize
        if not path.is_file():
            raise ValueError(f"bins {path}: the file is missing: {fix}")
        if path.stat().st_size != expected:
            raise ValueError(f"bins {path}: has {path.stat().st_size} bytes, its sidecar says {expected}: {fix}")
        if file_hash(path) != sidecar.sha256:
            raise ValueError(f"bins {path}: the contents are not those that its sidecar describes (SHA-256): {fix}")
        return cls(path, sidecar)

    @property
    def tokens(self) -> np.ndarray:
        """All tokens [num_tokens], uint16 or uint32, read at each call. DamagedShard as `gather`."""
        return self._read(0, self.num_tokens) if self._tokens is None else self._tokens

    @property
    def num_tokens(self) -> int:
        return self.sidecar.num_tokens

    def num_windows(self, sequence_length: int) -> int:
        """Windows of S+1 tokens at stride S: each has S targets that no other has."""
        return (self.num_tokens - 1) // sequence_length

    def gather(self, windows: np.ndarray, sequence_length: int) -> np.ndarray:
        """Tokens of the windows [B] -> int64 [B, S+1].

        DamagedShard, naming the file, if they cannot be read, are cut off, or are not of the vocabulary.
        """
        if self._tokens is not None:
            index = windows.astype(np.int64)[:, None] * sequence_length + np.arange(sequence_length + 1)
            return self._tokens[index].astype(np.int64)
        rows = [self._read(int(window) * sequence_length, sequence_length + 1) for window in windows]
        tokens = np.stack(rows).astype(np.int64)
        if tokens.max() >= self.sidecar.vocab_size:
            raise self._damaged(f"has the token {tokens.max()} and a vocabulary of {self.sidecar.vocab_size} entries")
        return tokens

    def _read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from number `start` on."""
        dtype = _stored(self.sidecar.dtype)
        position, missing, blocks = start * dtype.itemsize, count * dtype.itemsize, []
        while missing:
            try:
                block = os.pread(self._file, missing, position)
            except OSError as error:
                raise self._damaged(f"cannot be read at byte {position} ({error.strerror})") from error
            if not block:
                raise self._damaged(f"ends at byte {os.fstat(self._file).st_size}")
            blocks.append(block)
            position, missing = position + len(block), missing - len(block)
        return np.frombuffer(b"".join(blocks), dtype)

    def _damaged(self, why: str) -> DamagedShard:
        fix = f"delete {self.path.parent}, which is then prepared again, and go on with run.resume=auto"
        return DamagedShard(f"bins {self.path}: {why}; it was whole when the run began: {fix}")


def write_bins(
    path: Path,
    pieces: Iterable[tuple[np.ndarray, bool]],
    *,
    vocab_size: int,
    end_of_text: int,
    num_text_bytes: int,
    num_skipped_files: int,
    tokenizer_hash: str,
    source_fingerprint: str,
) -> Sidecar:
    """Write NAME.bin and NAME.json, and have the disk hold both before returning.

    A piece is (ids, whether they end a document): the end-of-text token goes between documents and before the first.
    """
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    end = np.array([end_of_text])
    digest = hashlib.sha256()
    num_tokens = num_documents = 0
    with path.open("wb") as file:
        for ids, ends_document in chain([(end, False)], pieces):
            for part in (ids, end) if ends_document else (ids,):
                block = part.astype(_stored(dtype)).tobytes()
                file.write(block)
                digest.update(block)
                num_tokens += len(part)
            num_documents += ends_document
        file.flush()
        os.fsync(file.fileno())
    sidecar = Sidecar(
        format=FORMAT,
        num_tokens=num_tokens,
        num_documents=num_documents,
        num_text_bytes=num_text_bytes,
        num_skipped_files=num_skipped_files,
        dtype=dtype,
        sha256=digest.hexdigest(),
        vocab_size=vocab_size,
        end_of_text=end_of_text,
        tokenizer_hash=tokenizer_hash,
        source_fingerprint=source_fingerprint,
    )
    with path.with_suffix(".json").open("w") as file:
        file.write(json.dumps(asdict(sidecar), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return sidecar


def _stored(dtype: str) -> np.dtype:
    return np.dtype(dtype).newbyteorder("<")


def _read_sidecar(path: Path, fix: str) -> Sidecar:
    """ValueError, naming the file, unless it is a sidecar of this format, field for field."""
    if not path.is_file():
        raise ValueError(f"bins sidecar {path}: the file is missing: {fix}")
    try:
        values = json.loads(path.read_text())
        sidecar = Sidecar(**values)
    except (ValueError, TypeError):
        raise ValueError(f"bins sidecar {path}: cannot be read: {fix}") from None
    types = {"int": int, "str": str}
    good = all(type(values[field.name]) is types[str(field.type)] for field in fields(Sidecar))
    if not good or sidecar.dtype not in ("uint16", "uint32") or sidecar.num_tokens < 1:
        raise ValueError(f"bins sidecar {path}: has a value that makes no sense: {fix}")
    if sidecar.format != FORMAT:
        raise ValueError(f"bins sidecar {path}: has format {sidecar.format}, this version reads {FORMAT}: {fix}")
    return sidecar
