"""A config as a run keeps it: with absolute paths, so that its folder can be used from anywhere.

On the command line a path is relative to the working directory. `config.yaml` outlives that: scripts that evaluate,
sample or replay a run later read the locations of text and cache from it. Values other than paths stay as they are:
names on the hub, `run.resume=auto`, a program that is found by its name. Links are not followed, `..` is resolved.
"""

import os
import re
import shlex
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.data import Source, is_on_hub

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.data import DataConfig, MixEntry

NO_PATHS = "never", "auto"
"""Values of `run.resume` besides a path."""


def as_typed(key: str, value: str) -> str:
    """Return KEY=VALUE with quotes of Hydra and of the shell if needed."""
    if re.fullmatch(r"[\w./:%@+-]+", value, re.ASCII):
        return f"{key}={value}"
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), value)
    text = f"{key}='{escaped}'"
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'


def resuming(folder: Path) -> str:
    """Return the keys that resume the run in a folder, also one that has no checkpoint yet, as typed in a shell."""
    return f"{as_typed('run.dir', str(folder.parent))} {as_typed('run.name', folder.name)} run.resume=auto"


def kept_tree(config: "Config") -> dict[str, Any]:
    """Return `with_absolute_paths(config)` as plain values, enums by name: the content of config.yaml."""
    return _plain(asdict(with_absolute_paths(config)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.name if isinstance(value, Enum) else value


def with_absolute_paths(config: "Config") -> "Config":
    """Return a copy of `config` that means in any folder what `config` means in this one."""
    run, data, alerts = config.run, config.data, config.health.alerts
    mix = [replace(entry, **_sources(entry, entry.source or data.source)) for entry in data.mix]
    return replace(
        config,
        run=replace(
            run,
            dir=os.path.abspath(run.dir),
            resume=run.resume if run.resume in NO_PATHS else os.path.abspath(run.resume),
            init_from=_path(run.init_from),
        ),
        data=replace(
            data,
            **_sources(data, data.source),
            mix=mix,
            tokenizer=data.tokenizer if data.tokenizer and is_on_hub(data.tokenizer) else _path(data.tokenizer),
            cache_dir=os.path.abspath(data.cache_dir),
        ),
        health=replace(config.health, alerts=replace(alerts, command=_command(alerts.command))),
    )


def _path(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _sources(data: "DataConfig | MixEntry", source: Source) -> dict[str, str | None]:
    return {key: _source(getattr(data, key), source) for key in ("path", "validation_path")}


def _source(path: str | None, source: Source) -> str | None:
    """Anchor a path, except the name of a dataset on the hub: one that is not a folder here."""
    if path is None or (source is Source.hf and not Path(path).is_dir()):
        return path
    return os.path.abspath(path)


def _command(command: str | None) -> str | None:
    """Anchor the program of a command, but not its arguments. One without a closing quote stays: checks refuse it."""
    try:
        words = shlex.split(command) if command is not None else []
    except ValueError:
        return command
    if not words or "/" not in words[0] or os.path.isabs(words[0]):
        return command
    return shlex.join([os.path.abspath(words[0]), *words[1:]])
