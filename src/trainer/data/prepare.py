"""Prepare: from sources of text to a tokenizer and bins, once for each state of the sources.

    cache_dir/stdlib-1f0c.../   tokenizer.json  train.bin  train.json  validation.bin  validation.json  prepared.json

Large corpora have train-00000.bin, train-00001.bin, ... and validation.00000.bin, ...; several sources
validation-NAME.bin each. The folder's name is a hash of everything that determines its contents: the sources'
fingerprints and the settings. A changed source therefore has another name, and a run that still reads the old bins
keeps them. `folder_builder` builds it.

Damage (unreadable files, documents that are not text) is an error that names it; `data.skip_damaged=true` leaves it out
instead. What is left out is decided once, here, and recorded in prepared.json. A run resumes with the tokens that it
began with: with other ones, of a source that has changed, it is refused.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from precision.errors import UserError
from trainer.config.data import DataConfig, Source, SourceConfig, check_data, source_configs
from trainer.config.paths import as_typed
from trainer.data.bins import FORMAT
from trainer.data.corpus import reads
from trainer.data.folder_builder import KEY, FolderBuilder
from trainer.data.prepared import SUMMARY, Prepared, open_prepared, open_several, read_summary
from trainer.data.records import EMPTY
from trainer.data.sources import Reader, open_source
from trainer.data.tokenizer import check_entries, file_hash, load_tokenizer, tokenizer_file
from trainer.data.tokenizer_sample import Progress, silent
from trainer.data.verified import check_whole

WEIGHED = "by training text"  # what weights count: part of the key of a mix


def prepare(data: DataConfig, vocab_size: int, progress: Progress = silent, folder: Path | None = None) -> Prepared:
    """Run `find_or_build` and check all files, for a single process."""
    prepared = find_or_build(data, vocab_size, progress, folder)
    check_whole(prepared.shards, data.verify)
    return prepared


def find_or_build(
    data: DataConfig, vocab_size: int, progress: Progress = silent, folder: Path | None = None
) -> Prepared:
    """Return the bins and tokenizer of `data` for a model of `vocab_size` entries: from the cache, or built now.

    folder: where to put them instead of the cache. Safe to call from several processes at once, which then share
    `check_whole`: it finds files that were altered. Raises UserError, one line, for settings that cannot work, a source
    without text, damage (unless `data.skip_damaged`), and sidecars that have changed since they were written.
    """
    check_data(data, vocab_size)
    sources = source_configs(data)
    if sources[0].source is Source.bins:
        prepared = open_several(sources)
        if data.tokenizer is not None and file_hash(tokenizer_file(data.tokenizer)) != prepared.tokenizer_hash:
            raise UserError(
                f"data.tokenizer={data.tokenizer}: {prepared.folder} was prepared with another: set null to use that"
            )
        check_entries(prepared.train.sidecar.vocab_size, vocab_size)
        _check_end(prepared, data.end_of_text)
        return prepared
    readers = [open_source(part) for part in sources]
    key = _key(data, vocab_size, readers)
    setting = f"data.cache_dir={data.cache_dir}" if folder is None else str(folder)
    place = folder or Path(data.cache_dir) / f"{'mix' if data.mix else data.source.value}-{key}"
    if folder is not None and folder.exists() and not (folder / SUMMARY).is_file():
        raise UserError(f"{folder}: exists and is not prepared data: choose a folder that does not exist")
    built = False
    if not place.is_dir():
        _check_outside(place, sources, setting)
        built = FolderBuilder(place, setting, key, readers, data, vocab_size, progress).build()
    if folder is not None and read_summary(folder)["key"] != key:
        raise UserError(f"{folder}: contains different data, or an earlier state of the source: choose another --out")
    prepared = open_prepared(place, built)
    if not data.skip_damaged:
        _refuse_damaged(prepared)
    entries = prepared.train.sidecar.vocab_size
    check_entries(entries, vocab_size)
    if entries < vocab_size and data.tokenizer is None:
        warnings.warn(f"model.vocab_size={vocab_size}: the text yields only {entries} tokenizer entries", stacklevel=2)
    return prepared


def _refuse_damaged(prepared: Prepared) -> None:
    """Raise UserError if damaged text was left out."""
    damaged = [each for each in prepared.skipped if each.why != EMPTY]
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise UserError(
            f"data.skip_damaged=false: {damaged[0]}{more} cannot be used: repair or remove what is damaged, and delete "
            f"{prepared.folder}; or set data.skip_damaged=true to train without it"
        )


def _check_outside(place: Path, sources: Sequence[SourceConfig], setting: str) -> None:
    """Raise UserError if files of `place` would be text of a source, which would change while it is read."""
    files = [place.resolve() / name for name in (SUMMARY, "tokenizer.json", "train.bin", KEY)]
    for part in (each for source in sources for each in (source, source.held_out) if each is not None):
        if any(reads(part, file) for file in files):
            raise UserError(
                f"{setting}: its files would be text of {part.path_key}={part.path}; choose a folder outside of that"
            )


def _check_end(prepared: Prepared, end_of_text: str) -> None:
    """Check data.end_of_text: scripts that sample or export the model read it from the config."""
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    for shard in prepared.shards:
        end = shard.sidecar.end_of_text
        if tokenizer.token_to_id(end_of_text) != end:
            theirs = str(tokenizer.id_to_token(end))
            raise UserError(
                f"data.end_of_text={end_of_text}: documents in {shard.path.parent} end with {theirs}: "
                f"set {as_typed('data.end_of_text', theirs)}"
            )


def _key(data: DataConfig, vocab_size: int, readers: Sequence[Reader]) -> str:
    """Return 16 hex digits over everything that determines the folder's contents."""
    columns = [
        [reader.part.name, reader.part.weight, reader.part.text_column, reader.part.format.value] for reader in readers
    ]
    if data.mix:  # else the name is that of the source
        columns = [[*row, reader.part.source.value, WEIGHED] for row, reader in zip(columns, readers, strict=True)]
    parts_of_it = {
        "format": FORMAT,
        "sources": [reader.fingerprint for reader in readers],
        "columns": columns,
        "stop": data.stop.value if readers[0].part.weight is not None else None,
        "validation_fraction": data.validation_fraction,
        "shard_mb": data.shard_mb,
        "end_of_text": data.end_of_text,
        "tokenizer": file_hash(tokenizer_file(data.tokenizer))
        if data.tokenizer
        else [vocab_size, data.tokenizer_sample_mb],
    }
    return hashlib.sha256(json.dumps(parts_of_it, sort_keys=True).encode()).hexdigest()[:16]
