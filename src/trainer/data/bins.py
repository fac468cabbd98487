"""Bins: all tokens of a split in files (shards), each with a JSON sidecar that describes it.

    train.bin    ids, little-endian uint16 (uint32 above 65536 entries):  E d d d d E d d E d d d E   (E: end of text)
    train.json   tokens, documents, dtype, SHA-256 of the ids, of the tokenizer.json, name and fingerprint of the source

A shard begins and ends with end-of-text: it is complete on its own, and the first token of its first document is a
target too. `Bins` is one shard or several, read as one stream, in which the end of a shard and the beginning of the
next are the same token.

Windows are read from the open files (one `pread` each, some microseconds), not from a memory map: if a disk fails or a
file is truncated during a run, this raises an error that names the file, instead of a SIGBUS without a message. A file
that is deleted during a run stays readable until the run ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from precision.errors import UserError, counted

FORMAT = 2  # of bin and sidecar; incremented when either changes meaning
SPARE_FILES = 256  # kept free for a process beside the shards
BLOCK_BYTES = 1 << 24  # read at once to hash a shard


@dataclass(frozen=True)
class Sidecar:
    """Description of the ids of a bin; field for field the JSON beside it."""

    format: int
    source: str
    """Name of the source, or names of the mixed sources."""
    num_tokens: int
    num_documents: int
    num_text_bytes: int
    """UTF-8 bytes of the documents: with num_tokens, the compression."""
    dtype: str
    sha256: str
    vocab_size: int
    """Entries of the tokenizer: every id is less."""
    end_of_text: int
    tokenizer_hash: str
    source_fingerprint: str


class DamagedShard(OSError):
    """A file of the data can no longer be read as it was when it was checked. The message names it and the reason."""


class Shard:
    """One file of tokens, open for reading, and its `sidecar`."""

    def __init__(self, path: Path, sidecar: Sidecar) -> None:
        self.path = path
        self.sidecar = sidecar
        self.descriptor = os.open(path, os.O_RDONLY)
        """Descriptor of the open file."""
        weakref.finalize(self, os.close, self.descriptor)

    @classmethod
    def open(cls, path: Path, tokenizer_hash: str) -> Shard:
        """Open a shard. Raises UserError, naming the file, if it is missing, truncated, or of another tokenizer."""
        fix = f"delete {path.parent} and prepare the data again"
        sidecar = read_sidecar(path.with_suffix(".json"), fix)
        if sidecar.tokenizer_hash != tokenizer_hash:
            raise UserError(
                f"bins {path}: packed with tokenizer {sidecar.tokenizer_hash[:12]}, "
                f"not with {tokenizer_hash[:12]}: {fix}"
            )
        expected = sidecar.num_tokens * stored(sidecar.dtype).itemsize
        if not path.is_file():
            raise UserError(f"bins {path}: the file is missing: {fix}")
        if path.stat().st_size != expected:
            raise UserError(f"bins {path}: has {path.stat().st_size} bytes, its sidecar says {expected}: {fix}")
        return cls(path, sidecar)

    def sha256(self) -> str:
        """Hash the open file, read whole. Raises OSError if it cannot be read."""
        digest, position = hashlib.sha256(), 0
        while block := os.pread(self.descriptor, BLOCK_BYTES, position):
            digest.update(block)
            position += len(block)
        return digest.hexdigest()

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from number `start` on, uint16 or uint32.

        Raises DamagedShard if they cannot be read, are truncated, or are not in the vocabulary.
        """
        dtype = stored(self.sidecar.dtype)
        position, missing, blocks = start * dtype.itemsize, count * dtype.itemsize, []
        while missing:
            try:
                block = os.pread(self.descriptor, missing, position)
            except OSError as error:
                raise self.damaged(f"cannot be read at byte {position} ({error.strerror})") from error
            if not block:
                raise self.damaged(f"ends at byte {os.fstat(self.descriptor).st_size}")
            blocks.append(block)
            position, missing = position + len(block), missing - len(block)
        tokens = np.frombuffer(b"".join(blocks), dtype)
        if count and (largest := int(tokens.max())) >= self.sidecar.vocab_size:
            raise self.damaged(f"has the token {largest} and a vocabulary of {self.sidecar.vocab_size} entries")
        return tokens

    def damaged(self, why: str) -> DamagedShard:
        """Return the error that reports damage."""
        again = "prepare it again (a start does so in data.cache_dir)"
        fix = f"delete {self.path.parent}, {again}, and resume with run.resume=auto"
        return DamagedShard(f"bins {self.path}: {why}; it was whole when the run began: {fix}")


class Bins:
    """One split, open for reading, and the `sidecar` of the whole split."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        first = self.shards[0]
        # the first token of a later shard is the last of the previous one
        sizes = [shard.sidecar.num_tokens - (number > 0) for number, shard in enumerate(self.shards)]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self.path = first.path
        """The file, or a pattern that matches all of them."""
        self.sidecar = first.sidecar
        if len(self.shards) > 1:
            self.path = first.path.with_name(f"{re.split('[-.]', first.path.stem)[0]}-*.bin")
            sides = [shard.sidecar for shard in self.shards]
            self.sidecar = replace(
                first.sidecar,
                source="+".join(dict.fromkeys(name for side in sides for name in side.source.split("+"))),
                num_tokens=int(self._starts[-1]),
                num_documents=sum(side.num_documents for side in sides),
                num_text_bytes=sum(side.num_text_bytes for side in sides),
                dtype="uint32" if any(side.dtype == "uint32" for side in sides) else "uint16",
                sha256=hashlib.sha256("\n".join(side.sha256 for side in sides).encode()).hexdigest(),
            )

    @classmethod
    def open(cls, paths: Sequence[Path], tokenizer_hash: str) -> Bins:
        """Open `paths` (NAME.bin, with NAME.json beside it), in order.

        Raises UserError, naming the file, if one is missing or truncated, or made with another tokenizer.
        """
        _allow_open_files(len(paths))
        with ThreadPoolExecutor(min(8, len(paths))) as pool:
            return cls(list(pool.map(lambda path: Shard.open(path, tokenizer_hash), paths)))

    @classmethod
    def join(cls, bins: Sequence[Bins]) -> Bins:
        """Concatenate the shards of several bins. A single one is returned as it is."""
        return bins[0] if len(bins) == 1 else cls([shard for part in bins for shard in part.shards])

    @property
    def tokens(self) -> np.ndarray:
        """All tokens [num_tokens], uint16 or uint32, read at each call. Raises DamagedShard as `gather` does."""
        return self.read(0, self.num_tokens)

    @property
    def num_tokens(self) -> int:
        return self.sidecar.num_tokens

    def num_windows(self, sequence_length: int) -> int:
        """Return the number of windows of S+1 tokens at stride S: each has S targets that no other has."""
        return (self.num_tokens - 1) // sequence_length

    def check_length(self, sequence_length: int, batch: int = 1) -> None:
        """Raise UserError if there is no window at all, or fewer than a batch has."""
        num_windows = self.num_windows(sequence_length)
        if num_windows == 0:
            raise UserError(
                f"trainer.sequence_length={sequence_length}: {self.path} has only {self.num_tokens} tokens, a sequence "
                f"takes {sequence_length + 1}: lower it, or give more text"
            )
        if num_windows < batch:
            raise UserError(
                f"trainer.global_batch_size={batch}: {self.path} has only {counted(num_windows, 'sequence')} of "
                f"{sequence_length} tokens: lower it, or give more text"
            )

    def gather(self, windows: np.ndarray, sequence_length: int) -> np.ndarray:
        """Return the tokens of the windows [B], int64 [B, S+1].

        Raises DamagedShard, naming the file, if they cannot be read, are truncated, or are not in the vocabulary.
        """
        rows = [self.read(int(window) * sequence_length, sequence_length + 1) for window in windows]
        return np.stack(rows).astype(np.int64)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens of the stream from number `start` on, uint16 or uint32."""
        pieces = []
        while count:
            number, place = self._place(start)
            shard = self.shards[number]
            here = min(count, shard.sidecar.num_tokens - place)
            pieces.append(shard.read(place, here))
            start, count = start + here, count - here
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _place(self, position: int) -> tuple[int, int]:
        """Return the shard of a token of the stream, and the token's position in it."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return number, position - int(self._starts[number]) + (number > 0)


def dtype_for(vocab_size: int) -> str:
    """Return the dtype that holds all ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def stored(dtype: str) -> np.dtype:
    """Return the file's dtype for ids of a dtype."""
    return np.dtype(dtype).newbyteorder("<")


def read_sidecar(path: Path, fix: str) -> Sidecar:
    """Read a sidecar. Raises UserError, naming the file, unless it has this format, field for field."""
    if not path.is_file():
        raise UserError(f"bins sidecar {path}: the file is missing: {fix}")
    try:
        values = json.loads(path.read_text())
        version = values.get("format")
        sidecar = Sidecar(**values) if version == FORMAT else None
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"bins sidecar {path}: cannot be read: {fix}") from None
    if sidecar is None:
        raise UserError(f"bins sidecar {path}: has format {version}, this version reads {FORMAT}: {fix}")
    types = {"int": int, "str": str}
    good = all(type(values[field.name]) is types[str(field.type)] for field in fields(Sidecar))
    if not good or sidecar.dtype not in ("uint16", "uint32") or sidecar.num_tokens < 1:
        raise UserError(f"bins sidecar {path}: has a value that makes no sense: {fix}")
    return sidecar


def _allow_open_files(count: int) -> None:
    """Raise this process's limit by `count` open files. Raises UserError if the system refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + count + SPARE_FILES  # other bins may be open already
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise UserError(
            f"data: {wanted} files must be open at a time, and a process may hold {hard}: raise that limit (ulimit "
            "-Hn), or prepare the data in larger shards (data.shard_mb)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
