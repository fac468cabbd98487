"""Training a tokenizer on a sample of the sources' training text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer

from precision.errors import UserError
from trainer.config.data import DataConfig, Source, SourceConfig, check_data, source_configs
from trainer.data.corpus import NOT_UTF8, TO_UTF8
from trainer.data.records import COLUMN, NO_TEXT, ONE_VALUE, SkipLog
from trainer.data.sources import Reader, open_source
from trainer.data.tokenizer import train_tokenizer

MEGABYTE = 1_000_000

Progress = Callable[[str, int, int], None]
"""Called with the current activity, the bytes done and the bytes in total (0 if unknown)."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that shows nothing."""


def new_tokenizer(data: DataConfig, vocab_size: int, progress: Progress = silent) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` entries on a sample of the training text of `data`."""
    check_data(data, vocab_size)
    for part in source_configs(data):
        if part.source is Source.bins:
            raise UserError(f"{part.key}.source=bins: has no text to train on: name the text it was prepared from")
    readers = [open_source(part) for part in source_configs(data)]
    return train_on_sample(readers, data, vocab_size, progress)


def train_on_sample(readers: Sequence[Reader], data: DataConfig, vocab_size: int, report: Progress) -> Tokenizer:
    return train_tokenizer(_sample(readers, data, report), vocab_size, data.end_of_text)


def _sample(readers: Sequence[Reader], data: DataConfig, report: Progress) -> Iterator[str]:
    """Yield a sample of training text, each source by its weight. Raises UserError if there is none."""
    what, taken, log = "training the tokenizer", 0, SkipLog(strict=False)
    num_bytes = data.tokenizer_sample_mb * MEGABYTE
    weights = [reader.part.weight or 1.0 for reader in readers]
    for reader, weight in zip(readers, weights, strict=True):
        left = share = max(int(num_bytes * weight / sum(weights)), 1)
        for block in reader.sample(share, log):
            for piece in block.pieces(log):
                if not block.holds_out(piece, data.validation_fraction):
                    taken, left = taken + piece.num_bytes, left - piece.num_bytes
                    yield piece.text
                if left <= 0 and not piece.ends_document:
                    break  # within a long file
            report(what, min(taken, num_bytes), 0)
    if not taken:
        where = " and ".join(str(reader.part.path) for reader in readers)
        found = log.found.values()
        found = [each for each in found if each.why == ONE_VALUE] or list(found)  # its other lines are not JSON either
        reasons = "; ".join(each.line() for each in found[:3])
        fix = f"{reasons}; {_fix(found[0].why, readers[0].part)}" if found else "give more text, or a data.tokenizer"
        raise UserError(f"data: no text to train a tokenizer on in {where}: {fix}")
    report(what, taken, taken)


def _fix(why: str, part: SourceConfig) -> str:
    """Return the fix for text of which nothing is usable. part: its source."""
    if why == NOT_UTF8:
        return TO_UTF8
    return f"set {part.key}{COLUMN}" if COLUMN in why or why.endswith(NO_TEXT) else "correct that"
