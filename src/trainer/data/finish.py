"""The last step of preparing data: join the packed shards, write prepared.json, remove temporary files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from precision.errors import UserError
from trainer.config.data import Stop
from trainer.data.bigram import bigram_loss
from trainer.data.bins import FORMAT, Bins, Shard
from trainer.data.packing import PackedShard, Packing
from trainer.data.prepared import BIGRAM, SIDECARS, SUMMARY, read_summary, sidecar_digests
from trainer.data.records import SkipLog, Skipped
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
    skipped = SkipLog(strict=False)
    for each in [*log.found.values(), *(each for shard in done for each in shard.skipped)]:
        before = skipped.found.get((each.path, each.why))
        count, first = (before.count, before.first) if before else (0, each.first)
        skipped.found[each.path, each.why] = Skipped(each.path, each.why, each.count + count, first)
    documents = {name: [0, 0] for name in packing.names}
    for shard in done:
        for name, counts in shard.documents.items():
            documents[name] = [a + b for a, b in zip(documents[name], counts, strict=True)]
    validation: dict[str, list[str]] = {}
    stamps = {name: each for shard in done for name, each in shard.stamps.items()}
    tokenizer_hash = file_hash(packing.tokenizer_path)
    for reader in readers:
        name = reader.part.name
        held_out = [packing.folder / shard.validation[name] for shard in done if name in shard.validation]
        if not (held_out and documents[name][0]):
            reasons = "; ".join(map(str, list(skipped.found.values())[:3]))
            why = f" (left out: {reasons})" if reasons else ""
            missing = "hold out" if not held_out else "train on"
            fix = "give more text, or change the fraction"
            if ends_early:
                fix = f"the mix ends where one source is used up; set data.stop={Stop.all_exhausted.value}, or {fix}"
            raise UserError(
                f"data.validation_fraction={packing.validation_fraction}: leaves nothing of {name} to {missing}, of "
                f"{documents[name][0] + bool(held_out)} or more documents{why}: {fix}"
            )
        groups, stem = _groups(held_out, most), f"validation-{name}" if len(readers) > 1 else "validation"
        validation[name] = [f"{stem}.{n:05d}.bin" for n in range(len(groups))] if len(groups) > 1 else [f"{stem}.bin"]
        facts = Shard.open(held_out[0], tokenizer_hash).sidecar
        for file, group in zip(validation[name], groups, strict=True):
            writer = ShardWriter(
                packing.folder / file,
                source=name,
                vocab_size=facts.vocab_size,
                end_of_text=facts.end_of_text,
                tokenizer_hash=facts.tokenizer_hash,
                source_fingerprint=facts.source_fingerprint,
            )
            for path in group:
                writer.append(Shard.open(path, tokenizer_hash))  # open one at a time: there may be thousands
            writer.close()
            stamps |= writer.stamps()
    train = [shard.train for shard in done if shard.train is not None]
    if len(train) == 1:
        stamps["train.bin"] = stamps[train[0]]
    held_out = [file for files in validation.values() for file in files]
    listed = [*(train if len(train) > 1 else ["train.bin"]), *held_out]
    add_verified(packing.folder, {name: stamps[name] for name in listed})
    splits = [Bins.open([packing.folder / name for name in names], tokenizer_hash) for names in (train, held_out)]
    listing = {
        "format": FORMAT,
        "key": key,
        "train": train if len(train) > 1 else ["train.bin"],
        "validation": {name: files if len(files) > 1 else files[0] for name, files in validation.items()},
        "documents": documents,
        "revisions": revisions,
        "skipped": [asdict(each) for each in skipped.found.values()],
        BIGRAM: bigram_loss(*splits),
    }
    write_signed(packing.folder / SUMMARY, {**listing, SIDECARS: _sidecars(packing.folder, train, held_out)})


def _groups(paths: Iterable[Path], most: int) -> list[list[Path]]:
    """Group consecutive files to about `most` bytes."""
    groups, size = list[list[Path]](), most
    for path in paths:
        if size >= most:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += path.stat().st_size
    return groups


def _sidecars(partial: Path, train: list[str], held_out: list[str]) -> dict[str, str]:
    """Return digests of the sidecars by the names that `tidy` gives them."""
    found = sidecar_digests(partial, [*train, *held_out])
    only = Path(train[0]).with_suffix(".json").name if len(train) == 1 else None
    return {"train.json" if name == only else name: digest for name, digest in found.items()}


def tidy(partial: Path) -> None:
    """Remove files that prepared.json does not name. Safe to repeat after a kill."""
    for pattern in ("held-*", "done-*.json", f".*{TEMPORARY}", REVISIONS, KEY):
        for path in partial.glob(pattern):
            path.unlink()
    if read_summary(partial)["train"] == ["train.bin"]:
        for path in partial.glob("train-*"):
            path.rename(partial / f"train{path.suffix}")
