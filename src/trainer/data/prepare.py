"""Prepare: from a folder of text to a tokenizer and two bins, once for each state of the source.

    cache_dir/stdlib-1f0c.../   tokenizer.json  train.bin  train.json  validation.bin  validation.json  left_out.json

The folder's name is a hash of everything that the contents depend on: the source's fingerprint and the settings. A
changed source therefore has another name, and a run that still reads the old bins keeps them. The folder is built under
another name and renamed when complete, so that one killed halfway is never taken for a whole one; a file lock lets one
process build while others wait for it.

A file that is damaged (not UTF-8 text, unreadable, a link to nothing) is an error that names it, unless
`data.skip_damaged` allows to leave it out. What is left out is decided once, here, and stands in left_out.json and in
the fingerprint of the bins: a run that goes on has the same tokens in the same order, whatever has become of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from trainer.data.bins import FORMAT, Bins, write_bins
from trainer.data.config import DataConfig, check_data
from trainer.data.corpus import Corpus, Damage, Document, read_pieces, scan, split, whats_wrong
from trainer.data.tokenizer import encode_pieces, end_of_text_id, file_hash, load_tokenizer, train_tokenizer

BATCH_CHARACTERS = 1 << 23  # encoded at once: bounds the memory (some 100 bytes a token), and feeds all cores
REPORT_SECONDS = 0.2
LEFT_OUT = "left_out.json"

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all (0 where that is not known)."""


@dataclass(frozen=True)
class Prepared:
    """A corpus ready for training."""

    folder: Path
    train: Bins
    validation: Bins
    tokenizer_path: Path
    tokenizer_hash: str
    """SHA-256 of tokenizer.json."""
    built: bool
    """Whether this call made it; False when it was found in the cache."""
    left_out: tuple[Damage, ...] = ()
    """Files of the source that are damaged, so that their text is not here."""


def prepare(data: DataConfig, vocab_size: int, progress: Progress | None = None) -> Prepared:
    """The bins and tokenizer of `data` for a model of `vocab_size` entries: from the cache, or built now.

    Safe to call from several processes at once. ValueError, one line, for settings that cannot work, a source without
    text, damaged files (unless `data.skip_damaged`), and a cache whose files are not what they were when written.
    """
    check_data(data, vocab_size)
    report = progress or _silent
    corpus = scan(data)
    folder = Path(data.cache_dir) / f"{data.source.value}-{_key(data, vocab_size, corpus)}"
    built = False
    if not folder.is_dir():
        lock = _lock(folder, data.cache_dir, report)
        try:
            if not folder.is_dir():
                _build(folder, corpus, data, vocab_size, report)
                built = True
        except OSError as error:  # of writing: what cannot be read has been told
            shutil.rmtree(_partial(folder), ignore_errors=True)
            raise ValueError(
                f"data.cache_dir={data.cache_dir}: {folder.name} cannot be written ({error.strerror or error}): "
                "free space there, or set another folder"
            ) from error
        finally:
            lock.release()
    prepared = _open(folder, built)
    if prepared.left_out and not data.skip_damaged:
        raise _refusal(corpus.root, prepared.left_out, f", and delete {folder}")
    entries = prepared.train.sidecar.vocab_size
    if entries > vocab_size:
        raise ValueError(f"model.vocab_size={vocab_size}: the tokenizer has {entries} entries: set at least {entries}")
    if entries < vocab_size and data.tokenizer is None:
        warnings.warn(f"model.vocab_size={vocab_size}: the text gives a tokenizer of only {entries}", stacklevel=2)
    return prepared


def _silent(what: str, done: int, total: int) -> None:
    """Progress for a caller who asked for none."""


def _lock(folder: Path, cache_dir: str, report: Progress) -> FileLock:
    """The acquired lock of `folder`. The system releases it when its process dies."""
    lock = FileLock(f"{folder}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report("waiting for another process that prepares the same data", 0, 0)
            lock.acquire()
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={cache_dir}: cannot be written ({error.strerror}): set a folder that can"
        ) from None
    return lock


def _key(data: DataConfig, vocab_size: int, corpus: Corpus) -> str:
    """16 hex digits over everything that the folder's contents depend on."""
    parts = {
        "format": FORMAT,
        "source": corpus.fingerprint,
        "validation_fraction": data.validation_fraction,
        "end_of_text": data.end_of_text,
        "tokenizer": file_hash(Path(data.tokenizer)) if data.tokenizer else [vocab_size, data.tokenizer_sample_mb],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _open(folder: Path, built: bool) -> Prepared:
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ValueError(f"tokenizer {tokenizer_path}: the file is missing: delete {folder} and prepare the data again")
    tokenizer_hash = file_hash(tokenizer_path)
    train = Bins.open(folder / "train.bin", tokenizer_hash)
    validation = Bins.open(folder / "validation.bin", tokenizer_hash)
    return Prepared(folder, train, validation, tokenizer_path, tokenizer_hash, built, _left_out(folder, train))


def _left_out(folder: Path, bins: Bins) -> tuple[Damage, ...]:
    """What left_out.json says; a number of nameless files where an older version has left out some."""
    path = folder / LEFT_OUT
    try:
        return tuple(Damage(**entry) for entry in json.loads(path.read_text()))
    except FileNotFoundError:
        return (Damage("?", "not UTF-8 text"),) * bins.sidecar.num_skipped_files
    except (ValueError, TypeError):
        raise ValueError(f"{path}: cannot be read: delete {folder} and prepare the data again") from None


def _refusal(root: Path, damaged: Sequence[Damage], also: str = "") -> ValueError:
    more = f" and {len(damaged) - 1} more file(s)" if len(damaged) > 1 else ""
    return ValueError(
        f"data.skip_damaged=false: below {root}, {damaged[0]}{more} cannot be used: repair or remove what is damaged"
        f"{also}; or set data.skip_damaged=true to train without it"
    )


def _partial(folder: Path) -> Path:
    """Where `folder` is built."""
    return folder.with_name(folder.name + ".partial")


def _build(folder: Path, corpus: Corpus, data: DataConfig, vocab_size: int, report: Progress) -> None:
    """Make `folder` from the corpus. The caller holds its lock, so that a partial one is a dead process's."""
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()

    wrong = {document.path: whats_wrong(corpus.root / document.path) for document in corpus.documents}
    readable = [document for document in corpus.documents if wrong[document.path] is None]
    if not readable:
        raise ValueError(
            f"data.glob={data.glob}: none of {len(corpus.documents)} file(s) below {corpus.root} is UTF-8 text: "
            "convert them, or name others"
        )
    damaged = [*corpus.missing, *(Damage(path, why) for path, why in wrong.items() if why is not None)]
    if damaged and not data.skip_damaged:
        raise _refusal(corpus.root, damaged)
    fingerprint = corpus.fingerprint
    if damaged:
        listing = json.dumps([asdict(damage) for damage in damaged], indent=1)
        (partial / LEFT_OUT).write_text(listing + "\n")
        names = "\0".join(damage.path for damage in damaged)
        fingerprint = hashlib.sha256(f"{fingerprint}\0{names}".encode("utf-8", "surrogateescape")).hexdigest()
    train, validation = split(readable, data.validation_fraction)

    tokenizer_path = partial / "tokenizer.json"
    if data.tokenizer is None:
        tokenizer = _train_tokenizer(corpus.root, train, data, vocab_size, report)
        tokenizer_path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    else:
        shutil.copyfile(data.tokenizer, tokenizer_path)
        tokenizer = load_tokenizer(tokenizer_path)
    for name, documents in (("train", train), ("validation", validation)):
        num_bytes = sum(document.num_bytes for document in documents)
        pieces = _pieces(corpus.root, documents, f"packing the {name} files", num_bytes, report)
        write_bins(
            partial / f"{name}.bin",
            encode_pieces(tokenizer, pieces, BATCH_CHARACTERS),
            vocab_size=tokenizer.get_vocab_size(),
            end_of_text=end_of_text_id(tokenizer, data.end_of_text),
            num_text_bytes=num_bytes,
            num_skipped_files=len(damaged),
            tokenizer_hash=file_hash(tokenizer_path),
            source_fingerprint=fingerprint,
        )
    if scan(data).fingerprint != corpus.fingerprint:
        raise ValueError(
            f"data: files below {corpus.root} changed while they were read: start again when they are still"
        )
    os.rename(partial, folder)


def _train_tokenizer(
    root: Path, train: list[Document], data: DataConfig, vocab_size: int, report: Progress
) -> Tokenizer:
    """Train on the first files in the order of their hashes, which is random but fixed, up to the sample's size."""
    sample, size = [], 0
    for document in sorted(train, key=lambda document: document.position):
        if size >= data.tokenizer_sample_mb * 1_000_000:
            break
        sample.append(document)
        size += document.num_bytes
    pieces = _pieces(root, sample, "training the tokenizer", size, report)
    return train_tokenizer((text for text, _ in pieces), vocab_size, data.end_of_text)


def _pieces(
    root: Path, documents: list[Document], what: str, total: int, report: Progress
) -> Iterator[tuple[str, bool]]:
    """(text, whether it ends its document) of all documents in order; reports a few times a second and at the end."""
    done = 0
    next_report = 0.0
    for document in documents:
        waiting: str | None = None
        try:
            for piece in read_pieces(root / document.path):
                if waiting is not None:
                    yield waiting, False
                waiting = piece
        except (OSError, UnicodeDecodeError) as error:  # it was whole a moment ago
            why = getattr(error, "strerror", None) or "not UTF-8 text any more"
            raise ValueError(
                f"data: {root / document.path} cannot be read ({why}): start again when it is whole"
            ) from error
        yield waiting or "", True
        done += document.num_bytes
        if done == total or time.monotonic() >= next_report:
            report(what, done, total)
            next_report = time.monotonic() + REPORT_SECONDS
