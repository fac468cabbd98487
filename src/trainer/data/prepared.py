"""Prepared data: a folder with a tokenizer and bins, opened and checked, or several of them as one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from precision.errors import UserError
from trainer.config.data import TOKENIZER, SourceConfig
from trainer.config.paths import as_typed
from trainer.data.bigram import bigram_loss
from trainer.data.bins import Bins, Shard
from trainer.data.records import Skipped
from trainer.data.tokenizer import file_hash
from trainer.digests import accept, accepting, read_signed

SUMMARY = "prepared.json"
KEYS = ("format", "key", "train", "validation", "documents", "revisions", "skipped")
"""Keys of prepared.json."""
SIDECARS = "sidecars"
"""Its key for the digests of the sidecars, by their names."""
BIGRAM = "bigram_loss"
"""Its key for the loss of the bigram model. Without it (prepared by an older version, or edited): `add_bigram`."""


@dataclass(frozen=True)
class Prepared:
    """A corpus ready for training."""

    folder: Path
    train: Bins
    tokenizer_hash: str
    """SHA-256 of tokenizer.json."""
    built: bool
    """Whether this call built it; False if it was found in the cache."""
    validations: tuple[tuple[str, Bins], ...]
    """Name and held-out text of each source."""
    documents: dict[str, tuple[int, int]]
    """Training documents of each source and their bytes, by its name."""
    skipped: tuple[Skipped, ...] = ()
    """Text of the sources that was left out, and why."""
    bigram_loss: float | None = None
    """Loss of a bigram model of these tokens (`bigram`), nats a token; for several folders the mean over their held-out
    tokens, each with the model of its own text. None if prepared.json has none."""

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER

    @cached_property
    def validation(self) -> Bins:
        """Held-out text of all sources together."""
        return Bins.join([bins for _, bins in self.validations])

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All files of tokens."""
        return (*self.train.shards, *self.validation.shards)

    @property
    def left_out(self) -> tuple[Skipped, ...]:
        """Damaged files that were left out, wholly or from some point on."""
        return tuple(each for each in self.skipped if not each.count)


def read_summary(folder: Path) -> dict:
    """Return the content of prepared.json."""
    fix = f"delete {folder} and prepare the data again, if it is prepared data"
    return read_signed(folder / SUMMARY, KEYS, fix)


def sidecar_digests(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the sidecar of each of these shards, by its name."""
    names = [Path(file).with_suffix(".json").name for file in files]
    return {name: file_hash(folder / name) for name in names if (folder / name).is_file()}


def _held_out(facts: dict) -> dict[str, list[str]]:
    """Return the validation files of each source. prepared.json has a single name if there is one."""
    return {name: [files] if isinstance(files, str) else files for name, files in facts["validation"].items()}


def _shards(facts: dict) -> list[str]:
    return [*facts["train"], *(file for files in _held_out(facts).values() for file in files)]


def accept_prepared(folder: Path) -> None:
    """Sign prepared.json and the sidecars as they are now. Raises UserError if it is not a file of `prepare`."""
    try:
        content = json.loads((folder / SUMMARY).read_text())
        sidecars = sidecar_digests(folder, _shards(content))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / SUMMARY}: is not a list of shards; prepare the data again") from None
    accept(folder / SUMMARY, **{SIDECARS: sidecars, BIGRAM: None})


def add_bigram(folder: Path) -> float:
    """Compute the missing loss of the bigram model and add it to prepared.json. Raises UserError if that fails."""
    prepared = open_prepared(folder)
    loss = bigram_loss(prepared.train, prepared.validation)
    try:
        accept(folder / SUMMARY, **{BIGRAM: loss})
    except OSError as error:
        raise UserError(f"{folder / SUMMARY}: cannot be written ({error.strerror}): make the folder writable") from None
    return loss


def _check_sidecars(folder: Path, facts: dict) -> None:
    """Raise UserError, naming the file, for a sidecar that differs from the listed one."""
    found = sidecar_digests(folder, _shards(facts))
    for name, digest in facts.get(SIDECARS, {}).items():
        if found.get(name, digest) != digest:  # `Bins.open` reports a missing one
            raise UserError(
                f"bins sidecar {folder / name}: was altered (its SHA-256 is not the one in {SUMMARY}); delete "
                f"{folder} and prepare the data again, or accept an edit with `{accepting(folder / SUMMARY)}`"
            )


def open_prepared(folder: Path, built: bool = False) -> Prepared:
    """Open a folder and check what it lists, except the tokens (`check_whole`). Raises UserError, naming the file, for
    changed files."""
    tokenizer_path = folder / TOKENIZER
    if not tokenizer_path.is_file():
        raise UserError(f"tokenizer {tokenizer_path}: the file is missing: delete {folder} and prepare the data again")
    tokenizer_hash = file_hash(tokenizer_path)
    facts = read_summary(folder)
    _check_sidecars(folder, facts)
    return Prepared(
        folder=folder,
        train=Bins.open([folder / name for name in facts["train"]], tokenizer_hash),
        tokenizer_hash=tokenizer_hash,
        built=built,
        validations=tuple(
            (name, Bins.open([folder / file for file in files], tokenizer_hash))
            for name, files in _held_out(facts).items()
        ),
        documents={name: (count, size) for name, (count, size) in facts["documents"].items()},
        skipped=tuple(Skipped(**each) for each in facts["skipped"]),
        bigram_loss=facts.get(BIGRAM),
    )


def open_several(sources: Sequence[SourceConfig]) -> Prepared:
    """Open several prepared folders as one."""
    for part in sources:
        if not (Path(str(part.path)) / SUMMARY).is_file():
            raise UserError(
                f"{part.key}.path={part.path}: no {SUMMARY} in it, so prepare_data.py did not make it: give "
                "a folder that it made, or read text with data=text or data=files"
            )
    found = [open_prepared(Path(str(part.path))) for part in sources]
    if len(found) == 1:
        return found[0]
    for part, each in zip(sources, found, strict=True):
        if each.tokenizer_hash != found[0].tokenizer_hash:
            raise UserError(
                f"{part.key}.path={part.path}: prepared with tokenizer {each.tokenizer_hash[:12]}, {sources[0].path} "
                f"with {found[0].tokenizer_hash[:12]}: prepare one again with "
                f"{as_typed('data.tokenizer', str(found[0].tokenizer_path))}"
            )

    def named(part: SourceConfig, name: str, alone: bool) -> str:
        return part.name if alone else f"{part.name}-{name}"

    both = list(zip(sources, found, strict=True))
    held_out = tuple(
        (named(part, name, len(each.validations) == 1), bins) for part, each in both for name, bins in each.validations
    )
    documents = {
        named(part, name, len(each.documents) == 1): counts
        for part, each in both
        for name, counts in each.documents.items()
    }
    losses = [each.bigram_loss for each in found if each.bigram_loss is not None]
    weights = [each.validation.num_tokens for each in found]
    return replace(
        found[0],
        train=Bins.join([each.train for each in found]),
        validations=held_out,
        documents=documents,
        skipped=tuple(skipped for each in found for skipped in each.skipped),
        bigram_loss=float(np.average(losses, weights=weights)) if len(losses) == len(found) else None,
    )
