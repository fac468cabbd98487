"""What text to train on. The dataclass is the schema of the `data` section; `check_data` holds what it cannot say."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

SMALLEST_VOCABULARY = 257  # the 256 bytes and the end-of-text token


class Source(Enum):
    """Where the text comes from."""

    stdlib = "stdlib"
    text = "text"


@dataclass
class DataConfig:
    """The corpus, its split, its tokenizer and the cache of what is made of them."""

    source: Source = Source.stdlib
    """stdlib: the source text of Python's own standard library, found on this machine; text: the folder `path`."""
    path: str | None = None
    """Folder of UTF-8 text files, one document a file (source: text). Null with source: stdlib."""
    glob: str = "**/*.py"
    """Files below the folder that are documents, matched on their path inside it; ** stands for any number of folders.
    Names that begin with a dot and links to folders are left out."""
    exclude: list[str] = field(
        default_factory=lambda: ["site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"]
    )
    """Folders of these names (* and ? allowed), at any depth, are left out."""
    validation_fraction: float = 0.05
    """Share of the files that is held out. A file is on one side or the other by the hash of its path alone."""
    tokenizer: str | None = None
    """A tokenizer.json to use. Null: train a byte-level BPE of model.vocab_size entries on the training files."""
    tokenizer_sample_mb: int = 64
    """Megabytes of training text that the BPE learns from: a random but fixed sample where there is more."""
    end_of_text: str = "<|endoftext|>"
    """The token after each document. Must exist in `tokenizer` where one is given."""
    skip_damaged: bool = False
    """Leave out files that are not UTF-8 text or cannot be read: named, counted, and the same ones when the run goes
    on. false: such a file is an error that names it."""
    cache_dir: str = ".cache/data"
    """Folder of the prepared tokenizer and bins, one subfolder for each state of the source."""


def check_data(data: DataConfig, vocab_size: int) -> None:
    """Raise ValueError for settings that cannot work; looks at no file but `data.path` and `data.tokenizer`."""
    if data.source is Source.text and data.path is None:
        raise ValueError("data.path=null: data.source=text needs a folder of text files: set data.path=FOLDER")
    if data.source is Source.stdlib and data.path is not None:
        raise ValueError(
            f"data.path={data.path}: data.source=stdlib finds its own folder: set data=text to read this one"
        )
    if data.path is not None and not Path(data.path).is_dir():
        raise ValueError(f"data.path={data.path}: there is no such folder: give an existing one")
    if not 0.0 < data.validation_fraction < 1.0:
        raise ValueError(
            f"data.validation_fraction={data.validation_fraction}: must lie between 0 and 1, for example 0.05"
        )
    if data.tokenizer is not None and not Path(data.tokenizer).is_file():
        raise ValueError(
            f"data.tokenizer={data.tokenizer}: there is no such file: give a tokenizer.json, or null to train one"
        )
    if data.tokenizer_sample_mb < 1:
        raise ValueError(
            f"data.tokenizer_sample_mb={data.tokenizer_sample_mb}: the tokenizer needs text: set at least 1"
        )
    if not data.end_of_text:
        raise ValueError('data.end_of_text="": documents need a token between them: set one, for example <|endoftext|>')
    if data.tokenizer is None and vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"model.vocab_size={vocab_size}: a byte-level tokenizer has an entry for each of the 256 bytes and one for "
            f"the end of text: set at least {SMALLEST_VOCABULARY}"
        )
