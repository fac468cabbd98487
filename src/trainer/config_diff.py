"""Configs as flat keys, joined by dots: comparing them and showing differences. Needs no torch."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

_TOKEN = r"(?:(?:access|api|auth|bearer|bot|hf|hub|wandb)_)?token"
_NAME = rf"(?:{_TOKEN}|\w*(?:webhook|command|password|passwd|secret|credentials?|api_?key))"
_SECRET = re.compile(rf"(?:^|\.){_NAME}(?:\.|$)")
_IN_SECTION = re.compile(rf"((?<!\w){_NAME}[\"']?\s*:\s*)(?:\"[^\"]*\"?|'[^']*'?|[^,}}]+)", re.IGNORECASE)
HIDDEN = "(not shown)"
_DEEPEST = 50


def is_secret(key: str) -> bool:
    """Return whether the value of a config key, dots included, may give access to something. Such values are never
    printed, logged or sent. `data.tokenizer` and `num_experts_per_token` are not secret."""
    return _SECRET.search(key.lower()) is not None


def printable(key: str, value: Any) -> Any:
    """Return the value of a config key, or a section as text, for display; secrets hidden."""
    if value is not None and is_secret(key):
        return HIDDEN
    return _IN_SECTION.sub(rf"\1{HIDDEN}", value) if isinstance(value, str) and "{" in value else value


def printable_override(override: str) -> str:
    """Return KEY=VALUE without secrets."""
    key, equals, value = override.partition("=")
    return f"{key}{equals}{printable(key.lstrip('+~'), value)}"


def without_secrets(tree: Any, hidden: Any = HIDDEN, key: str = "") -> Any:
    """Return a config's tree with `hidden` in place of secrets."""
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
    """Return the configs that a run folder keeps from before it resumed with another one, oldest first, by the last
    step that each was in force for."""
    kept = {int(path.stem.split("_")[2].partition("-")[0]): path for path in sorted(run.glob("config.before_step_*"))}
    return dict(sorted(kept.items()))


def read_yaml(text: str | bytes) -> dict[str, Any]:
    """Parse a run's config. Raises YAMLError for anything unreadable, whatever its bytes, and for what no run's config
    has: aliases, a few lines of which can stand for billions of values, and deep nesting."""
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0  # the C one takes a tenth of the time
    try:
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
                raise yaml.YAMLError("an alias or deep nesting, which a run's config does not have")
        tree = yaml.load(text, loader)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(f"cannot be read ({type(error).__name__})") from None
    if not isinstance(tree, dict):  # an empty file, too
        raise yaml.YAMLError("no config of a run")
    return tree


def changes(before: str | bytes, now: str | bytes, most: int = 8, but: Collection[str] = ("run",)) -> str:
    """Return `changed_keys` of two configs as YAML; YAMLError if one cannot be read."""
    return changed_keys(read_yaml(before), read_yaml(now), most, but)


def changed_keys(before: Any, now: Any, most: int = 8, but: Collection[str] = ("run",)) -> str:
    """Return keys that two configs' trees both have with different values, with both values; without the sections
    `but`: by default the run's location. Empty if there are none."""
    theirs, ours = flat(before), flat(now)
    keys = [
        key for key in ours if key in theirs and differ(ours[key], theirs[key]) and key.partition(".")[0] not in but
    ]
    changed = [
        f"{key} {HIDDEN}" if is_secret(key) else f"{key} {_shown(theirs[key])} -> {_shown(ours[key])}"
        for key in keys[:most]
    ]
    return ", ".join([*changed, *([f"and {len(keys) - most} more"] if len(keys) > most else [])])


def shapes_of(phases: Any) -> list[tuple[Any, ...]]:
    """Return what `trainer.phases` in a config's tree says about batches: each phase's end, batch and sequence length;
    empty if no phase has a batch or length of its own."""
    keys = "until", "global_batch_size", "sequence_length"
    found = [tuple(map(each.get, keys)) for each in phases or [] if isinstance(each, dict)]
    return found if any(batch or length for _, batch, length in found) else []


def differ(a: Any, b: Any) -> bool:
    """Return whether two values of a key differ. NaN equals itself, and 1 equals 1.0."""
    return a != b and _shown(a) != _shown(b)


def _shown(value: Any) -> str:
    """Return a value in JSON; of sections in a list, such as phases, the keys that are set."""
    if isinstance(value, list):
        value = [{k: v for k, v in each.items() if v is not None} if isinstance(each, dict) else each for each in value]
    return json.dumps(value)
