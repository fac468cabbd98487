"""Settings of the `data` section without effect beside the others, so that a run can warn of them.

Defaults of `configs/data/` and settings of the machine (`workers`, `cache_dir`), which users keep for all runs, are not
reported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.data import HAVE_PATHS, DataConfig, MixEntry, Source, SourceConfig, Stop, source_configs

FOLDERS = {Source.stdlib, Source.text, Source.files}
READ_BY = {
    "glob": FOLDERS,
    "exclude": FOLDERS,
    "format": {Source.files},
    "text_column": {Source.files, Source.hf},
    "subset": {Source.hf},
    "split": {Source.hf},
    "revision": {Source.hf},
    "streaming": {Source.hf},
    "validation_path": set(HAVE_PATHS),
    "validation_split": {Source.hf},
}
PREPARING = ("validation_fraction", "tokenizer_sample_mb", "skip_damaged", "shard_mb")
GLOBS = (
    *("**/*.py", "**/*.txt", "**/*"),
    "**/*.jsonl | **/*.jsonl.gz | **/*.jsonl.zst | **/*.csv | **/*.tsv | **/*.parquet | **/*.txt",
)
"""Defaults of the groups in configs/data."""


def without_effect(data: DataConfig) -> list[str]:
    """Return a line for each: key, value, why, and what to do."""
    sources, entries = source_configs(data), data.mix or [MixEntry("")]
    lines = []
    for key in READ_BY:
        value = getattr(data, key)
        if _is_given(key, value):
            heirs = [part for part, entry in zip(sources, entries, strict=True) if getattr(entry, key, None) is None]
            reasons = [_unread(part, key) for part in heirs]
            if all(reasons):
                why = "no source of data.mix reads it" if data.mix else str(reasons[0])
                lines.append(_line(f"data.{key}", value, why))
    for part, entry in zip(sources, entries, strict=True):
        own = [key for key in READ_BY if getattr(entry, key, None) is not None]
        lines += [_line(f"{part.key}.{key}", getattr(entry, key), why) for key in own if (why := _unread(part, key))]
    if data.stop is not Stop.first_exhausted and sources[0].weight is None:
        lines.append(_line("data.stop", data.stop, "without weights all text is read, once", "give data.mix weights"))
    if sources[0].source is Source.bins:
        given = [key for key in PREPARING if _is_given(key, getattr(data, key))]
        lines += [_line(f"data.{key}", getattr(data, key), "bins are prepared already") for key in given]
        return lines
    fraction = data.validation_fraction
    if fraction and _is_given("validation_fraction", fraction) and all(part.held_out for part in sources):
        why = "validation_path or validation_split says what is held out"
        lines.append(_line("data.validation_fraction", fraction, why))
    if data.tokenizer is not None and _is_given("tokenizer_sample_mb", data.tokenizer_sample_mb):
        lines.append(_line("data.tokenizer_sample_mb", data.tokenizer_sample_mb, "data.tokenizer is trained already"))
    return lines


def _is_given(key: str, value: Any) -> bool:
    default = DataConfig()
    shipped = {"glob": GLOBS, "exclude": ([], default.exclude)}.get(key, (getattr(default, key),))
    return value not in shipped


def _unread(part: SourceConfig, key: str) -> str:
    """Return why a source ignores a setting, or "" if it does not."""
    path = Path(str(part.path))
    if part.source not in READ_BY[key]:
        return f"{part.key}.source={part.source.value} does not read it"
    if key in ("glob", "exclude") and part.source in (Source.files, Source.text) and path.is_file():
        return f"{part.key}.path={part.path} is one file"
    if part.source is Source.hf and path.is_dir():
        saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
        if key == "revision" or (key == "subset" and saved) or (key == "split" and (path / "state.json").is_file()):
            return f"{part.key}.path={part.path} is a saved dataset, which has none"
    return ""


def _line(key: str, value: Any, why: str, fix: str = "leave it out") -> str:
    return f"{key}={getattr(value, 'value', value)} has no effect: {why}; {fix}"
