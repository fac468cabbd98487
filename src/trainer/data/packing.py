"""Packing: turns the blocks of one shard into files of tokens. Processes share this work.

    train-00007.bin  train-00007.json  held-00007-web.bin  held-00007-web.json  ...  done-00007.json

A shard is consecutive blocks of the source, some `shard_mb` of text: its content does not depend on the process that
packs it, or when. The last of its files marks it as done and lists its content and what was left out: after a kill,
shards with this file are complete, and the others are packed again from their first document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from precision.errors import UserError
from trainer.config.data import DataConfig
from trainer.data.bins import FORMAT, Sidecar, dtype_for
from trainer.data.records import Piece, SkipLog, Skipped
from trainer.data.shard_writer import ShardWriter
from trainer.data.sources import MixedBlock
from trainer.data.tokenizer import encode_pieces, end_of_text_id, file_hash, load_tokenizer, num_entries
from trainer.data.verified import Stamp, stamp
from trainer.digests import read_signed, write_signed

BATCH_CHARACTERS = 1 << 22  # encoded at once: bounds the memory (some 100 bytes a token), and keeps all cores busy


@dataclass(frozen=True)
class Packing:
    """Common settings of all shards of a corpus."""

    folder: Path
    data: DataConfig
    names: tuple[str, ...]
    """Names of the sources."""
    fingerprint: str

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"


class PackJob(NamedTuple):
    """A shard to pack."""

    number: int
    blocks: list[MixedBlock]

    @property
    def num_bytes(self) -> int:
        return sum(taken.block.num_bytes for taken in self.blocks)


@dataclass(frozen=True)
class PackedShard:
    """A packed shard."""

    number: int
    num_bytes: int
    train: str | None
    """Name of its file, or None if everything was held out or left out."""
    validation: dict[str, str]
    """Name of the source -> name of the file."""
    documents: dict[str, list[int]]
    """Name of the source -> training documents and their bytes."""
    skipped: tuple[Skipped, ...]
    stamps: dict[str, Stamp]
    """Name of a file or sidecar -> its stamp when it was written."""


class Packer:
    """Packs shards one after the other."""

    def __init__(self, packing: Packing, on_read: Callable[[int], None]) -> None:
        """on_read: called for each block with its bytes of text."""
        self._how = packing
        self._on_read = on_read
        self._tokenizer: Tokenizer = load_tokenizer(packing.tokenizer_path)
        vocab_size = num_entries(self._tokenizer)
        self._empty = Sidecar(
            format=FORMAT,
            source="+".join(packing.names),
            num_tokens=0,
            num_documents=0,
            num_text_bytes=0,
            dtype=dtype_for(vocab_size),
            sha256="",
            vocab_size=vocab_size,
            end_of_text=end_of_text_id(self._tokenizer, packing.data.end_of_text),
            tokenizer_hash=file_hash(packing.tokenizer_path),
            source_fingerprint=packing.fingerprint,
        )

    def pack(self, work: PackJob) -> PackedShard:
        """Write the shard's files. Raises UserError for damaged text, unless that is allowed."""
        how, log = self._how, SkipLog(strict=not self._how.data.skip_damaged)
        writers: dict[str, ShardWriter] = {}
        documents = {name: [0, 0] for name in how.names}
        train, held = f"train-{work.number:05d}", f"held-{work.number:05d}"
        try:
            texts = self._texts(work, log)
            for ids, (name, piece, held_out) in encode_pieces(self._tokenizer, texts, BATCH_CHARACTERS):
                stem, source = (f"{held}-{name}", name) if held_out else (train, self._empty.source)
                if stem not in writers:
                    writers[stem] = ShardWriter(how.folder / f"{stem}.bin", replace(self._empty, source=source))
                writers[stem].add(ids, piece.ends_document, piece.num_bytes)
                if not held_out:
                    documents[name][0] += piece.ends_document
                    documents[name][1] += piece.num_bytes
            stamps = {name: each for writer in writers.values() for name, each in writer.close().items()}
        except BaseException:
            for each in writers.values():
                each.abandon()
            raise
        done = PackedShard(
            number=work.number,
            num_bytes=work.num_bytes,
            train=f"{train}.bin" if train in writers else None,
            validation={name: f"{held}-{name}.bin" for name in how.names if f"{held}-{name}" in writers},
            documents={name: counts for name, counts in documents.items() if counts[0]},
            skipped=tuple(log.found.values()),
            stamps=stamps,
        )
        write_signed(how.folder / f"done-{work.number:05d}.json", asdict(done))
        return done

    def _texts(self, work: PackJob, log: SkipLog) -> Iterator[tuple[str, tuple[str, Piece, bool]]]:
        for name, block, again in work.blocks:
            # what a repetition leaves out is counted already
            for piece in block.pieces(SkipLog(strict=False) if again else log):
                held_out = block.holds_out(piece, self._how.data.validation_fraction)
                if not (again and held_out):
                    yield piece.text, (name, piece, held_out)
            self._on_read(block.num_bytes)


def read_done(folder: Path, number: int) -> PackedShard | None:
    """Return a shard that was packed before and whose files are unchanged, or None."""
    path = folder / f"done-{number:05d}.json"
    try:
        values = read_signed(path, [field.name for field in fields(PackedShard)], "it is packed again")
        stamps = {name: (size, time, sha256) for name, (size, time, sha256) in values["stamps"].items()}
        whole = all(stamp(folder / name, each[2]) == each for name, each in stamps.items())
        skipped = tuple(Skipped(**each) for each in values["skipped"])
        return PackedShard(**{**values, "skipped": skipped, "stamps": stamps}) if whole else None
    except (UserError, OSError):
        return None
