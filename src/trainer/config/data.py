"""The text to train on. Dataclasses are the schema of the `data` section; `check_data` checks the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from precision.errors import UserError

TOKENIZER = "tokenizer.json"
SMALLEST_VOCABULARY = 257  # the 256 bytes and the end-of-text token
LARGEST_VOCABULARY = 2**24  # of a tokenizer that is trained: room for it is allocated first


class Source(Enum):
    """Where the text comes from."""

    stdlib = "stdlib"
    text = "text"
    files = "files"
    hf = "hf"
    bins = "bins"


HAVE_PATHS = (Source.text, Source.files, Source.hf)


class Format(Enum):
    """Type of a file of `files`."""

    auto = "auto"
    jsonl = "jsonl"
    csv = "csv"
    tsv = "tsv"
    parquet = "parquet"
    text = "text"


class Stop(Enum):
    """Where a mixture with weights ends."""

    first_exhausted = "first_exhausted"
    all_exhausted = "all_exhausted"


@dataclass
class MixEntry:
    """One source of several. Null: the value of the `data` section itself."""

    name: str
    """Its name in summaries and in evaluation: letters, digits, _ and -."""
    weight: float | None = None
    """Its share of the text, relative to the others' weights. Null for all: everything, once."""
    source: Source | None = None
    """stdlib, text, files, hf or bins."""
    path: str | None = None
    """As data.path."""
    glob: str | None = None
    """As data.glob."""
    format: Format | None = None
    """As data.format."""
    text_column: str | None = None
    """As data.text_column."""
    subset: str | None = None
    """As data.subset."""
    split: str | None = None
    """As data.split."""
    revision: str | None = None
    """As data.revision."""
    streaming: bool | None = None
    """As data.streaming."""
    validation_path: str | None = None
    """As data.validation_path."""
    validation_split: str | None = None
    """As data.validation_split."""


@dataclass
class DataConfig:
    """The corpus, its split, its tokenizer and the cache of the prepared data."""

    source: Source = Source.stdlib
    """stdlib: the source text of Python's own standard library, found on this machine; text: a folder of text files;
    files: jsonl, CSV, parquet and text, compressed or not; hf: a Hugging Face dataset; bins: what prepare_data.py made.
    """
    path: str | None = None
    """text, files: the folder (files: or one file); hf: name on the hub, or a folder; bins: the folder made by
    prepare_data.py. Null with stdlib, and if `mix` names the sources."""
    glob: str = "**/*.py"
    """Files to read below the folder, matched on their path inside it; ** matches any number of folders, and |
    separates alternatives. Names that begin with a dot are left out."""
    exclude: list[str] = field(
        default_factory=lambda: ["site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"]
    )
    """Folders with these names (* and ? allowed), at any depth, are left out."""
    format: Format = Format.auto
    """files: their type. auto: by name, .jsonl .ndjson .json (an object a line), .csv .tsv (the first row names the
    columns), .parquet, .txt .text .md (one document a file), each also with .gz or .zst, parquet excepted."""
    text_column: str = "text"
    """files, hf: the key or column of the text."""
    subset: str | None = None
    """hf: the dataset's configuration. Null: its default."""
    split: str = "train"
    """hf: the split to read. Held-out text is taken from it."""
    revision: str | None = None
    """hf: commit, tag or branch on the hub. Null: the newest when the data is prepared."""
    streaming: bool = False
    """hf: read while downloading, without a copy on the disk."""
    mix: list[MixEntry] = field(default_factory=list)
    """Several sources, each with a validation set of its own. Empty: the one above."""
    stop: Stop = Stop.first_exhausted
    """With weights: first_exhausted: until a source is used up; nothing is repeated, and the rest of the others is left
    out. all_exhausted: until each has been read whole; small ones are repeated."""
    validation_fraction: float = 0.05
    """Share of the documents to hold out, each by a hash: of a file's path if a file is a document, else of the text,
    so that equal documents are on one side. 0: none, if validation_path or validation_split names others."""
    validation_path: str | None = None
    """text, files, hf: a folder, file or dataset of the same kind to hold out as a whole; then all of `path` is trained
    on, except files that are in both."""
    validation_split: str | None = None
    """hf: the split to hold out as a whole; then all of `split` is trained on."""
    tokenizer: str | None = None
    """A tokenizer.json to use, a folder that has one, or a name on the hub, as OWNER/NAME or OWNER/NAME@REVISION. Null:
    train a byte-level BPE of model.vocab_size entries on the training text."""
    tokenizer_sample_mb: int = 64
    """Megabytes of training text to train the BPE on: a fixed sample if there is more."""
    end_of_text: str = "<|endoftext|>"
    """The token after each document. Must exist in `tokenizer` if that is given."""
    skip_damaged: bool = False
    """Leave out unreadable text (files, lines, documents that are not text): named, counted, and the same when the run
    resumes. false: the first of it is an error that names it."""
    verify: bool = False
    """At a start, read all tokens and compare their SHA-256, each rank a part. false: only files with another size
    or modification time than when they were last read whole."""
    workers: int | None = None
    """Processes that prepare the data. Null: one a core. The result is the same."""
    shard_mb: int = 128
    """Megabytes of text in a file of tokens, the unit of work of one process."""
    cache_dir: str = ".cache/data"
    """Folder of prepared tokenizers and bins, one subfolder for each state of the source."""


@dataclass(kw_only=True)
class SourceConfig(DataConfig):
    """The `data` section as one source has it: with the settings of its entry of `mix`, if it has one."""

    name: str
    """Its name, or the kind of the source."""
    key: str
    """Prefix of its settings in messages: data, or data.mix[0]."""
    weight: float | None

    @property
    def path_key(self) -> str:
        """Key of its path in messages."""
        held_out = self.source in HAVE_PATHS and self.path == self.validation_path
        return f"{self.key}.{'validation_path' if held_out else 'path'}"

    @property
    def held_out(self) -> SourceConfig | None:
        """Return the source that `validation_path` and `validation_split` name; None if a share of this one is held
        out."""
        split = self.validation_split if self.source is Source.hf else None
        path = self.validation_path if self.source in HAVE_PATHS else None
        if path is None and split is None:
            return None
        return replace(self, path=path or self.path, split=split or self.split)


def source_configs(data: DataConfig) -> list[SourceConfig]:
    """Return the sources of `data`, in order: the entries of `mix`, or one that has all settings of the section."""
    sources = []
    for number, entry in enumerate(data.mix or [MixEntry(data.source.value)]):
        own: dict[str, Any] = {key: value for key, value in vars(entry).items() if value is not None}
        key = f"data.mix[{number}]" if data.mix else "data"
        sources.append(SourceConfig(**{"weight": None, **vars(data), **own}, key=key))
    return sources


def is_on_hub(tokenizer: str) -> bool:
    """Return whether `data.tokenizer` is a name on the hub, OWNER/NAME or OWNER/NAME@REVISION, and no local path."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", tokenizer) and not tokenizer.endswith(".json")
    return bool(is_name) and not tokenizer.startswith(".") and not Path(tokenizer).exists()


def check_data(data: DataConfig, vocab_size: int) -> None:
    """Raise UserError for settings that cannot work. Reads no file except the paths and `data.tokenizer`."""
    sources = source_configs(data)
    _check_mix(data, sources)
    for part in sources:
        _check_part(part)
    if not 0.0 <= data.validation_fraction < 1.0:
        raise UserError(
            f"data.validation_fraction={data.validation_fraction}: must lie between 0 and 1, for example 0.05"
        )
    for part in sources:
        if data.validation_fraction == 0 and part.held_out is None and part.source is not Source.bins:
            raise UserError(
                f"data.validation_fraction=0: leaves no part of {part.name} for evaluation: set {part.key}."
                f"validation_path={'FOLDER' if part.source in HAVE_PATHS else 'FOLDER with data=text'}, or 0.01"
            )
    if data.tokenizer is not None and not is_on_hub(data.tokenizer):
        given = Path(data.tokenizer)
        if not (given / TOKENIZER if given.is_dir() else given).is_file():
            problem = f"a folder without a {TOKENIZER}" if given.is_dir() else "there is no such file or folder"
            fix = "give a tokenizer.json, a name on the hub as OWNER/NAME, or null to train one"
            raise UserError(f"data.tokenizer={data.tokenizer}: {problem}: {fix}")
    if not data.cache_dir:
        raise UserError("data.cache_dir='': prepared data needs a folder: set one, for example .cache/data")
    for key, why in (("tokenizer_sample_mb", "the tokenizer needs text"), ("shard_mb", "a shard needs text")):
        if getattr(data, key) < 1:
            raise UserError(f"data.{key}={getattr(data, key)}: {why}: set at least 1")
    if data.workers is not None and data.workers < 1:
        raise UserError(f"data.workers={data.workers}: too few; set at least 1, or null for one per core")
    if not data.end_of_text:
        why = "documents need a token between them"
        raise UserError(f"data.end_of_text='': {why}: set one, for example \"data.end_of_text='<|endoftext|>'\"")
    trains = data.tokenizer is None and all(part.source is not Source.bins for part in sources)
    if trains and not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        raise UserError(
            f"model.vocab_size={vocab_size}: a byte-level tokenizer has an entry for each of the 256 bytes and one for "
            f"the end of text: set {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}"
        )


def _check_mix(data: DataConfig, sources: list[SourceConfig]) -> None:
    for key in ("path", "validation_path"):
        if data.mix and (value := getattr(data, key)) is not None:
            raise UserError(f"data.{key}={value}: data.mix names the sources: give each its {key} there, or no mix")
    names = [part.name for part in sources]
    for number, part in enumerate(sources):
        if not re.fullmatch(r"[\w-]+", part.name, re.ASCII) or part.name in names[:number]:
            why = "is taken" if part.name in names[:number] else "is not a file name"
            raise UserError(f"{part.key}.name={part.name}: {why}: use letters, digits, _ and -, each name once")
        if part.weight is not None and not 0 < part.weight < float("inf"):
            raise UserError(f"{part.key}.weight={part.weight}: must be above 0; leave the source out instead")
        if (part.weight is None) != (sources[0].weight is None):
            shown = "null" if part.weight is None else part.weight
            raise UserError(f"{part.key}.weight={shown}: give all sources a weight, or none")
    kinds = {part.source is Source.bins for part in sources}
    if kinds == {True, False}:
        raise UserError("data.mix: bins are prepared already and go with bins only: prepare the others first")
    if kinds == {True} and sources[0].weight is not None:
        raise UserError("data.mix[0].weight: bins are read whole; give weights when they are prepared")


def _check_part(part: SourceConfig) -> None:
    key, path = part.key, part.path
    if part.source is Source.stdlib:
        if path is not None:
            fix = "leave its source out, and set data=text" if key != "data" else "set data=text"
            raise UserError(f"{key}.path={path}: {key}.source=stdlib finds its own folder: {fix} to read this one")
        return
    wanted = {
        Source.text: "a folder of text files, or one file: set {}.path=PATH",
        Source.files: "a folder of files, or one file: set {}.path=PATH",
        Source.hf: "a dataset: set {}.path to its name or folder",
        Source.bins: "the folder of prepared data: set {}.path=FOLDER",
    }[part.source].format(key)
    if not path:
        given = "null" if path is None else "''"
        raise UserError(f"{key}.path={given}: {key}.source={part.source.value} needs {wanted}")
    _check_path(f"{key}.path", path, part.source)
    if part.validation_path is not None and part.held_out is not None:
        _check_path(f"{key}.validation_path", part.validation_path, part.source)
    if part.source is Source.hf and part.held_out == part:
        name = "validation_path" if part.validation_split is None else "validation_split"
        raise UserError(f"{key}.{name}={getattr(part, name)}: the text that is trained on: name another, or null")


def _check_path(key: str, path: str, source: Source) -> None:
    if source is Source.hf:
        if not Path(path).is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
            raise UserError(f"{key}={path}: neither a folder nor a name on the hub, as OWNER/NAME: correct it")
    elif Path(path).is_file():
        if source not in (Source.files, Source.text):
            kind = f"{key.rpartition('.')[0]}.source"
            why = f"a file, and {kind}={source.value} reads a folder"
            raise UserError(f"{key}={path}: {why}: give a folder, or read one file with {kind}=files")
    elif not Path(path).is_dir():
        kind = "folder or file" if source in (Source.files, Source.text) else "folder"
        raise UserError(f"{key}={path}: there is no such {kind}: give an existing one")
