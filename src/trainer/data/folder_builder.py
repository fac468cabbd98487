"""Builds a folder of prepared data: a tokenizer, packed shards, validation files, and prepared.json, which lists them.

The folder is built under another name, FOLDER.partial, and renamed when complete, so that an incomplete one is never
used; after a kill the next process keeps the complete shards (`packing`) and continues. A file lock lets one process
build while others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from precision.errors import UserError
from trainer.config.data import DataConfig, Stop
from trainer.data.bigram import bigram_loss
from trainer.data.bins import FORMAT, Bins, Shard
from trainer.data.packing import PackedShard, Packing, PackJob, read_done
from trainer.data.prepared import BIGRAM, SIDECARS, SUMMARY, read_summary, sidecar_digests
from trainer.data.records import SkipLog
from trainer.data.shard_writer import ShardWriter, write_json
from trainer.data.sources import MixedBlock, Reader, mixed, open_source
from trainer.data.tokenizer import (
    check_end_of_text,
    check_entries,
    file_hash,
    load_tokenizer,
    num_entries,
    tokenizer_file,
)
from trainer.data.tokenizer_sample import MEGABYTE, Progress, train_on_sample
from trainer.data.verified import Stamp, add_verified
from trainer.data.workers import pack_all
from trainer.digests import write_signed
from trainer.files import FULL, TEMPORARY, replace_file, sync_folder
from trainer.launch.device import host_cpus

REVISIONS = "revisions.json"
KEY = "key"  # of the data that a folder is begun for


@dataclass(frozen=True)
class FolderBuilder:
    """A folder that is to have the data of `readers`."""

    folder: Path
    setting: str
    """The setting that names its place, in messages."""
    key: str
    """Of everything that determines its contents."""
    readers: Sequence[Reader]
    data: DataConfig
    vocab_size: int
    report: Progress

    @property
    def partial(self) -> Path:
        return self.folder.with_name(self.folder.name + ".partial")

    def build(self) -> bool:
        """Build it unless another process does so meanwhile. Return whether this one did."""
        lock = self._lock()
        try:
            if self.folder.is_dir():
                return False
            self._build()
        except OSError as error:  # of writing: read errors are UserErrors already
            kept = any(self.partial.glob("done-*.json"))
            if not kept:
                shutil.rmtree(self.partial, ignore_errors=True)
            fix = "free space there" if error.errno in FULL else "correct that"
            raise UserError(
                f"{self.setting}: {self.folder.name} cannot be written ({error.strerror or error}): {fix}"
                f"{', and it continues where it stopped' * kept}, or set another folder"
            ) from error
        finally:
            lock.release()
        return True

    def _lock(self) -> FileLock:
        """Return the acquired lock of the folder, which the system releases if this process dies."""
        lock = FileLock(f"{self.folder}.lock")
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            Path(lock.lock_file).touch()  # if no file can be made (/proc), filelock would try forever
            try:
                lock.acquire(timeout=0)
            except Timeout:
                self.report("waiting for another process that prepares the same data", 0, 0)
                lock.acquire()
        except OSError as error:
            raise UserError(f"{self.setting}: cannot be written ({error.strerror}): set a folder that can") from None
        return lock

    def _build(self) -> None:
        """Build the folder, or continue the work of a dead process."""
        partial = self.partial
        # a stream has other blocks than a copy on the disk, and so other shards, of the same documents
        begun = " ".join([self.key, *(reader.part.name for reader in self.readers if reader.part.streaming)])
        if partial.is_dir() and not self._is_begun(begun):
            shutil.rmtree(partial)  # other data's, that was to have this name
        partial.mkdir(exist_ok=True)
        replace_file(partial / KEY, begun.encode())
        if not (partial / SUMMARY).is_file():
            revisions = self._pin()
            self._make_tokenizer()
            packing = Packing(
                folder=partial,
                data=self.data,
                names=tuple(reader.part.name for reader in self.readers),
                fingerprint=hashlib.sha256("\n".join(each.fingerprint for each in self.readers).encode()).hexdigest(),
            )
            done, log = self._pack(packing)
            for reader in self.readers:
                if open_source(reader.part).fingerprint != reader.fingerprint:
                    shutil.rmtree(partial)
                    raise UserError(
                        f"{reader.part.key}: files of {reader.part.path or 'the library'} changed while they were "
                        "read: start again when nothing writes to them"
                    )
            self._finish(packing, done, log, revisions)
        for pattern in ("held-*", "done-*.json", f".*{TEMPORARY}", REVISIONS, KEY):
            for path in partial.glob(pattern):
                path.unlink()
        os.rename(partial, self.folder)
        sync_folder(self.folder.parent)

    def _is_begun(self, begun: str) -> bool:
        """Return whether the partial folder is complete for this data, or was begun for it in the same way."""
        if (self.partial / SUMMARY).is_file():
            return read_summary(self.partial)["key"] == self.key
        return (self.partial / KEY).is_file() and (self.partial / KEY).read_text() == begun

    def _pin(self) -> dict[str, str]:
        """Return the commits of hub datasets, by source: those that this folder was begun with, or the current ones.
        Raises UserError for an unavailable commit: no folder mixes the text of two."""
        path = self.partial / REVISIONS
        begun = json.loads(path.read_text()) if path.is_file() else {}
        found = {reader.part.name: reader.pin(begun.get(reader.part.name)) for reader in self.readers}
        revisions = {name: commit for name, commit in found.items() if commit is not None}
        if revisions and not begun:
            write_json(path, revisions)
        return revisions

    def _make_tokenizer(self) -> None:
        """Copy the given tokenizer, or train one, unless that was done before."""
        path, given = self.partial / "tokenizer.json", self.data.tokenizer
        if not path.is_file():
            if given is not None:
                content = (file := tokenizer_file(given)).read_bytes()
                load_tokenizer(file)
            else:
                trained = train_on_sample(self.readers, self.data, self.vocab_size, self.report)
                content = trained.to_str(pretty=True).encode()
            replace_file(path, content)
        tokenizer = load_tokenizer(path)
        check_entries(num_entries(tokenizer), self.vocab_size)
        if given is not None:
            check_end_of_text(tokenizer, self.data.end_of_text, "one of its special tokens")

    def _pack(self, packing: Packing) -> tuple[list[PackedShard], SkipLog]:
        """Pack all shards. Return them, those of an earlier process included, and what was left out."""
        data, readers = self.data, self.readers
        log, done, taken = SkipLog(strict=not data.skip_damaged), list[PackedShard](), 0
        weighed = readers[0].part.weight is not None

        def read(num_bytes: int) -> None:
            nonlocal taken
            taken += num_bytes
            sizes = [reader.num_bytes for reader in readers]
            self.report("packing the text", taken, 0 if weighed or not all(sizes) else max(sum(sizes), taken))

        def missing() -> Iterator[PackJob]:
            for job in _jobs(mixed(readers, data.stop, log), data.shard_mb * MEGABYTE):
                if (found := read_done(packing.folder, job.number)) is None:
                    yield job
                else:
                    done.append(found)
                    read(job.num_bytes)

        read(0)
        packed = pack_all(packing, missing(), data.workers or host_cpus(), read)
        self.report("packing the text", taken, taken)
        return sorted([*done, *packed], key=lambda shard: shard.number), log

    def _finish(self, packing: Packing, done: list[PackedShard], log: SkipLog, revisions: dict[str, str]) -> None:
        """Join the held-out shards of each source, and write prepared.json. Raises UserError if there is nothing to
        train or validate on."""
        folder, names, tokenizer_hash = packing.folder, packing.names, file_hash(packing.tokenizer_path)
        skipped = SkipLog(strict=False)
        for each in (*log.found.values(), *(each for shard in done for each in shard.skipped)):
            skipped.add(each.path, each.why, each.first, each.count)
        documents = {
            name: [sum(shard.documents.get(name, (0, 0))[i] for shard in done) for i in (0, 1)] for name in names
        }
        stamps = {name: each for shard in done for name, each in shard.stamps.items()}
        validation: dict[str, list[str]] = {}
        for name in names:
            parts = [folder / shard.validation[name] for shard in done if name in shard.validation]
            if not (parts and documents[name][0]):
                raise self._nothing_left(name, documents[name][0], bool(parts), skipped)
            stem = f"validation-{name}" if len(names) > 1 else "validation"
            joined = _join(parts, stem, self.data.shard_mb * MEGABYTE, tokenizer_hash)
            validation[name] = [file for file in joined if file.endswith(".bin")]
            stamps |= joined
        train = [shard.train for shard in done if shard.train is not None]
        if len(train) == 1:  # a kill from here to prepared.json costs the work on this shard
            stamps["train.bin"] = stamps[train[0]]
            for suffix in (".bin", ".json"):
                (folder / train[0]).with_suffix(suffix).rename(folder / f"train{suffix}")
            train = ["train.bin"]
        held_out = [file for files in validation.values() for file in files]
        add_verified(folder, {name: stamps[name] for name in (*train, *held_out)})
        splits = [Bins.open([folder / name for name in names], tokenizer_hash) for names in (train, held_out)]
        listing = {
            "format": FORMAT,
            "key": self.key,
            "train": train,
            "validation": {name: files if len(files) > 1 else files[0] for name, files in validation.items()},
            "documents": documents,
            "revisions": revisions,
            "skipped": [asdict(each) for each in skipped.found.values()],
            BIGRAM: bigram_loss(*splits),
            SIDECARS: sidecar_digests(folder, [*train, *held_out]),
        }
        write_signed(folder / SUMMARY, listing)

    def _nothing_left(self, name: str, num_train: int, has_held_out: bool, skipped: SkipLog) -> UserError:
        """Return the error for a source of which nothing is trained on, or nothing held out."""
        reasons = "; ".join(map(str, list(skipped.found.values())[:3]))
        why = f" (left out: {reasons})" if reasons else ""
        missing = "train on" if has_held_out else "hold out"
        fix = "give more text, or change the fraction"
        if self.readers[0].part.weight is not None and self.data.stop is Stop.first_exhausted:
            fix = f"the mix ends where one source is used up; set data.stop={Stop.all_exhausted.value}, or {fix}"
        return UserError(
            f"data.validation_fraction={self.data.validation_fraction}: leaves nothing of {name} to {missing}, of "
            f"{num_train + has_held_out} or more documents{why}: {fix}"
        )


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


def _join(parts: Sequence[Path], stem: str, most: int, tokenizer_hash: str) -> dict[str, Stamp]:
    """Join shards to files of about `most` bytes. Return the stamps of these and their sidecars, by name."""
    groups, size = list[list[Path]](), most
    for path in parts:
        if size >= most:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += path.stat().st_size
    like, stamps = Shard.open(parts[0], tokenizer_hash).sidecar, dict[str, Stamp]()
    for number, group in enumerate(groups):
        name = f"{stem}.{number:05d}.bin" if len(groups) > 1 else f"{stem}.bin"
        writer = ShardWriter(parts[0].with_name(name), like)
        for path in group:
            writer.append(Shard.open(path, tokenizer_hash))  # open one at a time: there may be thousands
        stamps |= writer.close()
    return stamps
