"""The last step of preparing data: join the packed shards, write prepared.json, remove temporary files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from precision.errors import UserError
from trainer.config.data import Stop
from trainer.data.bigram import bigram_loss
from trainer.data.bins import FORMAT, Bins, Shard
from trainer.data.packing import PackedShard, Packing
from trainer.data.prepared import BIGRAM, SIDECARS, SUMMARY, sidecar_digests
from trainer.data.records import SkipLog
from trainer.data.shard_writer import ShardWriter
from trainer.data.sources import Reader
from trainer.data.tokenizer import file_hash
from trainer.data.verified import add_verified
from trainer.digests import write_signed
from trainer.files import TEMPORARY

REVISIONS = "revisions.json"
KEY = "key"  # of the data that a folder is begun for


def finish(
    packing: Packing,
    done: list[PackedShard],
    log: SkipLog,
    readers: Sequence[Reader],
    key: str,
    revisions: dict[str, str],
    most: int,
    ends_early: bool,
) -> None:
    """Write validation files of about `most` bytes for each source, and prepared.json. ends_early: where a source of a
    mixture was used up. Raises UserError if there is nothing to train or validate on."""
    folder, tokenizer_hash = packing.folder, file_hash(packing.tokenizer_path)
    skipped = SkipLog(strict=False)
    for each in (*log.found.values(), *(each for shard in done for each in shard.skipped)):
        skipped.add(each.path, each.why, each.first, each.count)
    documents = {
        name: [sum(shard.documents.get(name, (0, 0))[i] for shard in done) for i in (0, 1)] for name in packing.names
    }
    stamps = {name: each for shard in done for name, each in shard.stamps.items()}
    validation: dict[str, list[str]] = {}
    for name in packing.names:
        parts = [folder / shard.validation[name] for shard in done if name in shard.validation]
        if not (parts and documents[name][0]):
            raise _nothing_left(name, documents[name][0], bool(parts), packing.validation_fraction, skipped, ends_early)
        written = _joined(parts, f"validation-{name}" if len(readers) > 1 else "validation", most, tokenizer_hash)
        validation[name] = [writer.path.name for writer in written]
        for writer in written:
            stamps |= writer.stamps()
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
        "key": key,
        "train": train,
        "validation": {name: files if len(files) > 1 else files[0] for name, files in validation.items()},
        "documents": documents,
        "revisions": revisions,
        "skipped": [asdict(each) for each in skipped.found.values()],
        BIGRAM: bigram_loss(*splits),
        SIDECARS: sidecar_digests(folder, [*train, *held_out]),
    }
    write_signed(folder / SUMMARY, listing)


def _nothing_left(
    name: str, num_train: int, has_held_out: bool, fraction: float, skipped: SkipLog, ends_early: bool
) -> UserError:
    """Return the error for a source of which nothing is trained on, or nothing held out."""
    reasons = "; ".join(map(str, list(skipped.found.values())[:3]))
    why = f" (left out: {reasons})" if reasons else ""
    missing = "train on" if has_held_out else "hold out"
    fix = "give more text, or change the fraction"
    if ends_early:
        fix = f"the mix ends where one source is used up; set data.stop={Stop.all_exhausted.value}, or {fix}"
    return UserError(
        f"data.validation_fraction={fraction}: leaves nothing of {name} to {missing}, of {num_train + has_held_out} "
        f"or more documents{why}: {fix}"
    )


def _joined(parts: Sequence[Path], stem: str, most: int, tokenizer_hash: str) -> list[ShardWriter]:
    """Join shards to files of about `most` bytes. Return their closed writers."""
    groups, size = list[list[Path]](), most
    for path in parts:
        if size >= most:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += path.stat().st_size
    like, written = Shard.open(parts[0], tokenizer_hash).sidecar, []
    for number, group in enumerate(groups):
        name = f"{stem}.{number:05d}.bin" if len(groups) > 1 else f"{stem}.bin"
        writer = ShardWriter(parts[0].with_name(name), like)
        for path in group:
            writer.append(Shard.open(path, tokenizer_hash))  # open one at a time: there may be thousands
        writer.close()
        written.append(writer)
    return written


def tidy(partial: Path) -> None:
    """Remove files that prepared.json does not name. Safe to repeat after a kill."""
    for pattern in ("held-*", "done-*.json", f".*{TEMPORARY}", REVISIONS, KEY):
        for path in partial.glob(pattern):
            path.unlink()
