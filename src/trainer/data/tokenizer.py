"""Byte-level BPE: text is UTF-8 bytes, bytes are merged pairwise into the `vocab_size` most useful strings.

Every text has an encoding (256 entries are the single bytes) and decodes to itself. Words are split as in GPT-2, so
that merges do not cross word boundaries; a run of blanks is a word, which suits source code. Training counts words and
merges the most frequent pair, ties broken by the pair's ids: the same text gives the same tokenizer.json, byte for
byte, whatever the number of threads. Source: Sennrich et al. 2016 (arXiv:1508.07909); bytes and splitting: GPT-2
(2019).

The end-of-text token follows each document. Text that happens to spell it is encoded as ordinary characters.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from precision.errors import UserError
from trainer.config.data import TOKENIZER, is_on_hub

Flag = TypeVar("Flag")
LONGEST_WORD = 1024
"""Bytes of a word in training; longer words are cut. Time grows with the square of the length."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, end_of_text: str) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` entries (fewer if the text has no more pairs to merge)."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    check_end_of_text(tokenizer, end_of_text, "for example <|endoftext|>")
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json, with truncation and padding disabled. Raises UserError for another file."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        reason = str(error).splitlines()[0]
        raise UserError(f"tokenizer {path}: cannot be read ({reason}): give a tokenizer.json of `tokenizers`") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_file(tokenizer: str) -> Path:
    """Return the tokenizer.json of `data.tokenizer`: a file, one in a folder, or the copy of one on the hub. The hub's
    cache comes first: later starts need no network and use the same file.

    Raises UserError if it does not exist or cannot be fetched.
    """
    if not is_on_hub(tokenizer):
        return Path(tokenizer) / TOKENIZER if Path(tokenizer).is_dir() else Path(tokenizer)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without a network it warns at each attempt
    name, _, revision = tokenizer.partition("@")
    try:
        with suppress(LocalEntryNotFoundError):
            return Path(hf_hub_download(name, TOKENIZER, revision=revision or None, local_files_only=True))
        return Path(hf_hub_download(name, TOKENIZER, revision=revision or None))
    except LocalEntryNotFoundError:  # an EntryNotFoundError, too
        why = "the hub cannot be reached, and its cache here does not have it: give a tokenizer.json, or its folder"
    except EntryNotFoundError:
        why = f"it has no {TOKENIZER}: give one that has, or convert its tokenizer with the library transformers"
    except HfHubHTTPError as error:  # no such name or revision, or not for everyone
        status = error.response.status_code if error.response is not None else "none"
        why = f"the hub refuses it (status {status}): correct the name, or log in to it with `hf auth login`"
    except (OSError, ValueError) as error:
        why = f"cannot be fetched ({str(error).splitlines()[0]}): give a tokenizer.json, or a folder with one"
    raise UserError(f"data.tokenizer={tokenizer}: {why}")


def num_entries(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id: some vocabularies have holes."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_entries(entries: int, vocab_size: int) -> None:
    """Raise UserError if the model has fewer entries than its tokenizer."""
    if entries > vocab_size:
        raise UserError(f"model.vocab_size={vocab_size}: the tokenizer has {entries} entries: set at least {entries}")


def end_of_text_id(tokenizer: Tokenizer, end_of_text: str) -> int:
    """Return the token's id. Raises UserError if the tokenizer does not have it."""
    token_id = tokenizer.token_to_id(end_of_text)
    if token_id is None:
        raise UserError(
            f"data.end_of_text={end_of_text}: not a token of data.tokenizer: name the token that ends a document there"
        )
    return token_id


def check_end_of_text(tokenizer: Tokenizer, end_of_text: str, another: str) -> None:
    """Raise UserError for a token that ordinary text has, too. another: what to set instead. (An added token that is
    not special, as <|EOT|>, is accepted: only text that spells it has it.)"""
    token_id = end_of_text_id(tokenizer, end_of_text)
    added = tokenizer.get_added_tokens_decoder().get(token_id)
    if added is not None and not added.special:
        return
    spelled, ids = (end_of_text, tokenizer.decode([token_id], skip_special_tokens=False)), list[int]()
    with suppress(UserError):  # of a tokenizer that cannot encode it
        ids = [each for found, _ in encode_pieces(tokenizer, ((text, None) for text in spelled), 1) for each in found]
    if token_id in ids:
        raise UserError(
            f"data.end_of_text={end_of_text}: text has this token, too, which would end documents; set another, "
            f"{another}"
        )


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's contents, in hex, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode_pieces(
    tokenizer: Tokenizer, pieces: Iterable[tuple[str, Flag]], batch_characters: int
) -> Iterator[tuple[np.ndarray, Flag]]:
    """Map (text, anything) to (ids as uint32 [n], the same), in order; about `batch_characters` at a time on all cores.

    Raises UserError for a tokenizer that has no ids for some text.
    """
    tokenizer.encode_special_tokens = True  # a special token's spelling inside a text is ordinary text
    batch: list[tuple[str, Flag]] = []
    waiting = 0
    for piece in pieces:
        batch.append(piece)
        waiting += len(piece[0])
        if waiting >= batch_characters:
            yield from _encode(tokenizer, batch)
            batch, waiting = [], 0
    yield from _encode(tokenizer, batch)


def _encode(tokenizer: Tokenizer, batch: list[tuple[str, Flag]]) -> Iterator[tuple[np.ndarray, Flag]]:
    try:
        encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
    except Exception as error:  # the library raises no narrower class
        reason = str(error).splitlines()[0]
        raise UserError(f"data.tokenizer: it cannot encode the text ({reason}): give one that can") from error
    for encoding, (_, flag) in zip(encodings, batch, strict=True):
        yield np.array(encoding.ids, dtype=np.uint32), flag
