"""Configs as flat mappings of dotted keys, for comparing them and naming what differs. Needs no torch."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

_TOKEN = r"(?:(?:access|api|auth|bearer|bot|hf|hub|wandb)_)?token"
_SECRET = re.compile(
    rf"(?:^|\.)(?:{_TOKEN}|\w*(?:webhook|command|password|passwd|secret|credentials?|api_?key))(?:\.|$)"
)
HIDDEN = "(not shown)"


def is_secret(key: str) -> bool:
    """Whether the value of a config key, dots included, may give access to something: it is never printed, logged or
    sent. `data.tokenizer` and `num_experts_per_token` are none."""
    return _SECRET.search(key.lower()) is not None


def printable(key: str, value: Any) -> Any:
    """The value of a config key for display, secrets hidden."""
    return HIDDEN if value is not None and is_secret(key) else value


def without_secrets(tree: Any, hidden: Any = HIDDEN, key: str = "") -> Any:
    """A config's tree with `hidden` where a secret is."""
    if not isinstance(tree, dict):
        return hidden if tree is not None and is_secret(key) else tree
    return {name: without_secrets(below, hidden, f"{key}.{name}") for name, below in tree.items()}


def flat(tree: Any, key: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}"""
    if not isinstance(tree, dict):
        return {key: tree}
    stem = f"{key}." if key else ""
    return {inner: value for name, below in tree.items() for inner, value in flat(below, f"{stem}{name}").items()}


def configs_before(run: Path) -> dict[int, Path]:
    """The configs that a run folder keeps of the times when it continued with another one, oldest first, by the last
    step that each was in force for."""
    kept = {int(path.stem.split("_")[2].partition("-")[0]): path for path in sorted(run.glob("config.before_step_*"))}
    return dict(sorted(kept.items()))


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, which no config of a run has: a few lines of them stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias, which a run's config does not have")
        return super().compose_node(parent, index)


def read_yaml(text: str | bytes) -> Any:
    """The content of a run's config. YAMLError for anything that cannot be read, whatever bytes it has."""
    try:
        return yaml.load(text, _PlainLoader)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(f"cannot be read ({type(error).__name__})") from None


def changes(before: str | bytes, now: str | bytes, most: int = 8, but: Collection[str] = ("run",)) -> str:
    """Keys that two configs, as YAML, both have and that differ, with both values; not those of the sections `but`: by
    default, those that say where the run is. Empty if there are none; YAMLError if one cannot be read."""
    theirs, ours = (flat(read_yaml(text)) for text in (before, now))
    keys = [key for key in ours if key in theirs and ours[key] != theirs[key] and key.partition(".")[0] not in but]
    changed = [
        f"{key} {HIDDEN}" if is_secret(key) else f"{key} {json.dumps(theirs[key])} -> {json.dumps(ours[key])}"
        for key in keys[:most]
    ]
    return ", ".join([*changed, *([f"and {len(keys) - most} more"] if len(keys) > most else [])])
