"""Prepare: from sources of text to a tokenizer and bins, once for each state of the sources.

    cache_dir/stdlib-1f0c.../   tokenizer.json  train.bin  train.json  validation.bin  validation.json  prepared.json

Large corpora have train-00000.bin, train-00001.bin, ... and validation.00000.bin, ...; several sources
validation-NAME.bin each. The folder's name is a hash of everything that determines its contents: the sources'
fingerprints and the settings. A changed source therefore has another name, and a run that still reads the old bins
keeps them. The folder is built under another name, shard by shard (`packing`), and renamed when complete, so that an
incomplete one is never used; after a kill the next process keeps the complete shards and continues. A file lock lets
one process build while others wait for it.

Damage (unreadable files, documents that are not text) is an error that names it; `data.skip_damaged=true` leaves it out
instead. What is left out is decided once, here, and recorded in prepared.json. A run resumes with the tokens that it
began with: with other ones, of a source that has changed, it is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from precision.errors import UserError
from trainer.config.data import DataConfig, Source, SourceConfig, Stop, check_data, source_configs
from trainer.config.paths import as_typed
from trainer.data.bins import FORMAT
from trainer.data.corpus import reads
from trainer.data.finish import KEY, REVISIONS, finish, tidy
from trainer.data.packing import PackedShard, Packing, PackJob, read_done
from trainer.data.prepared import SUMMARY, Prepared, open_prepared, open_several, read_summary
from trainer.data.records import EMPTY, SkipLog
from trainer.data.shard_writer import write_json
from trainer.data.sources import MixedBlock, Reader, mixed, open_source
from trainer.data.tokenizer import check_end_of_text, file_hash, load_tokenizer, num_entries, tokenizer_file
from trainer.data.tokenizer_sample import MEGABYTE, Progress, silent, train_on_sample
from trainer.data.verified import ALONE, check_whole
from trainer.data.workers import pack_all
from trainer.files import FULL, replace_file, sync_folder
from trainer.launch.device import host_cpus

WEIGHED = "by training text"  # what weights count: part of the key of a mix


def prepare(
    data: DataConfig, vocab_size: int, progress: Progress | None = None, folder: Path | None = None
) -> Prepared:
    """Run `find_or_build` and check all files, for a single process."""
    prepared = find_or_build(data, vocab_size, progress, folder)
    check_whole(prepared.shards, data.verify, ALONE)
    return prepared


def find_or_build(
    data: DataConfig, vocab_size: int, progress: Progress | None = None, folder: Path | None = None
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
        _check_entries(prepared.train.sidecar.vocab_size, vocab_size)
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
        built = _build_once(place, setting, readers, data, vocab_size, key, progress or silent)
    if folder is not None and read_summary(folder)["key"] != key:
        raise UserError(f"{folder}: contains different data, or an earlier state of the source: choose another --out")
    prepared = open_prepared(place, built)
    if not data.skip_damaged:
        _refuse_damaged(prepared)
    entries = prepared.train.sidecar.vocab_size
    _check_entries(entries, vocab_size)
    if entries < vocab_size and data.tokenizer is None:
        warnings.warn(f"model.vocab_size={vocab_size}: the text yields only {entries} tokenizer entries", stacklevel=2)
    return prepared


def _build_once(
    place: Path,
    setting: str,
    readers: Sequence[Reader],
    data: DataConfig,
    vocab_size: int,
    key: str,
    report: Progress,
) -> bool:
    """Build `place` unless another process does so meanwhile. Return whether this one did. setting: for messages."""
    lock = _lock(place, setting, report)
    try:
        if place.is_dir():
            return False
        _build(place, readers, data, vocab_size, key, report)
    except OSError as error:  # of writing: read errors are UserErrors already
        kept = any(_partial(place).glob("done-*.json"))
        if not kept:
            shutil.rmtree(_partial(place), ignore_errors=True)
        fix = "free space there" if error.errno in FULL else "correct that"
        raise UserError(
            f"{setting}: {place.name} cannot be written ({error.strerror or error}): {fix}"
            f"{', and it continues where it stopped' * kept}, or set another folder"
        ) from error
    finally:
        lock.release()
    return True


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


def _check_entries(entries: int, vocab_size: int) -> None:
    if entries > vocab_size:
        raise UserError(f"model.vocab_size={vocab_size}: the tokenizer has {entries} entries: set at least {entries}")


def _check_end(prepared: Prepared, end_of_text: str) -> None:
    """Check data.end_of_text: scripts that sample or export the model read it from the config."""
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    for shard in (*prepared.train.shards, *prepared.validation.shards):
        end = shard.sidecar.end_of_text
        if tokenizer.token_to_id(end_of_text) != end:
            theirs = str(tokenizer.id_to_token(end))
            raise UserError(
                f"data.end_of_text={end_of_text}: documents in {shard.path.parent} end with {theirs}: "
                f"set {as_typed('data.end_of_text', theirs)}"
            )


def _lock(folder: Path, setting: str, report: Progress) -> FileLock:
    """Return the acquired lock of `folder`, which the system releases if this process dies. setting: for messages."""
    lock = FileLock(f"{folder}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        Path(lock.lock_file).touch()  # if no file can be made (/proc), filelock would try forever
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report("waiting for another process that prepares the same data", 0, 0)
            lock.acquire()
    except OSError as error:
        raise UserError(f"{setting}: cannot be written ({error.strerror}): set a folder that can") from None
    return lock


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


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _build(
    folder: Path, readers: Sequence[Reader], data: DataConfig, vocab_size: int, key: str, report: Progress
) -> None:
    """Build `folder` from the sources, or continue the work of a dead process. The caller holds its lock."""
    partial = _partial(folder)
    # a stream has other blocks than a copy on the disk, and so other shards, of the same documents
    begun = " ".join([key, *(reader.part.name for reader in readers if reader.part.streaming)])
    if partial.is_dir() and not _is_begun_for(partial, key, begun):
        shutil.rmtree(partial)  # other data's, that was to have this name
    partial.mkdir(exist_ok=True)
    replace_file(partial / KEY, begun.encode())
    if not (partial / SUMMARY).is_file():
        revisions = _pin(partial, readers)
        tokenizer = _tokenizer(partial, readers, data, vocab_size, report)
        _check_entries(num_entries(tokenizer), vocab_size)
        if data.tokenizer is not None:
            check_end_of_text(tokenizer, data.end_of_text, "one of its special tokens")
        packing = Packing(
            folder=partial,
            tokenizer_path=partial / "tokenizer.json",
            end_of_text=data.end_of_text,
            validation_fraction=data.validation_fraction,
            skip_damaged=data.skip_damaged,
            names=tuple(reader.part.name for reader in readers),
            fingerprint=hashlib.sha256("\n".join(reader.fingerprint for reader in readers).encode()).hexdigest(),
        )
        done, log = _pack(packing, readers, data, report)
        for reader in readers:
            if open_source(reader.part).fingerprint != reader.fingerprint:
                shutil.rmtree(partial)
                raise UserError(
                    f"{reader.part.key}: files of {reader.part.path or 'the library'} changed while they were read: "
                    "start again when nothing writes to them"
                )
        ends_early = readers[0].part.weight is not None and data.stop is Stop.first_exhausted
        finish(packing, done, log, readers, key, revisions, data.shard_mb * MEGABYTE, ends_early)
    tidy(partial)
    os.rename(partial, folder)
    sync_folder(folder.parent)


def _is_begun_for(partial: Path, key: str, begun: str) -> bool:
    """Return whether a folder is complete for the data with this key, or (`begun`) was begun for it in the same way."""
    if (partial / SUMMARY).is_file():
        return read_summary(partial)["key"] == key
    return (partial / KEY).is_file() and (partial / KEY).read_text() == begun


def _pin(partial: Path, readers: Sequence[Reader]) -> dict[str, str]:
    """Return the commits of hub datasets, by source: those that this folder was begun with, or the current ones. Raises
    UserError for an unavailable commit: no folder mixes the text of two."""
    path = partial / REVISIONS
    begun = json.loads(path.read_text()) if path.is_file() else {}
    found = {reader.part.name: reader.pin(begun.get(reader.part.name)) for reader in readers}
    revisions = {name: commit for name, commit in found.items() if commit is not None}
    if revisions and not begun:
        write_json(path, revisions)
    return revisions


def _tokenizer(
    partial: Path, readers: Sequence[Reader], data: DataConfig, vocab_size: int, report: Progress
) -> Tokenizer:
    """Return the given tokenizer, or one trained before or now."""
    path = partial / "tokenizer.json"
    if not path.is_file():
        if data.tokenizer is not None:
            content = (given := tokenizer_file(data.tokenizer)).read_bytes()
            load_tokenizer(given)
        else:
            content = train_on_sample(readers, data, vocab_size, report).to_str(pretty=True).encode()
        replace_file(path, content)
    return load_tokenizer(path)


def _pack(
    packing: Packing, readers: Sequence[Reader], data: DataConfig, report: Progress
) -> tuple[list[PackedShard], SkipLog]:
    """Pack all shards. Return them, those of an earlier process included, and what was left out."""
    log, done, taken = SkipLog(strict=not data.skip_damaged), list[PackedShard](), 0
    weighed = readers[0].part.weight is not None

    def read(num_bytes: int) -> None:
        nonlocal taken
        taken += num_bytes
        sizes = [reader.num_bytes for reader in readers]
        report("packing the text", taken, 0 if weighed or not all(sizes) else max(sum(sizes), taken))

    def missing() -> Iterator[PackJob]:
        for job in _jobs(mixed(readers, data.stop, log), data.shard_mb * MEGABYTE):
            if (found := read_done(packing.folder, job.number)) is None:
                yield job
            else:
                done.append(found)
                read(job.num_bytes)

    read(0)
    packed = pack_all(packing, missing(), data.workers or host_cpus(), read)
    report("packing the text", taken, taken)
    return sorted([*done, *packed], key=lambda shard: shard.number), log


def _jobs(blocks: Iterable[MixedBlock], most: int) -> Iterator[PackJob]:
    """Yield shards of `most` bytes of text or some more."""
    job, size = PackJob(0, []), 0
    for each in blocks:
        job.blocks.append(each)
        size += each.block.num_bytes
        if size >= most:
            yield job
            job, size = PackJob(job.number + 1, []), 0
    if job.blocks:
        yield job
