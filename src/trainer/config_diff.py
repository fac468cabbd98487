"""Configs by their keys, joined by dots: what is compared, and what differs is told by. Needs no torch."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml


def flat(tree: Any, key: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}"""
    if not isinstance(tree, dict):
        return {key: tree}
    stem = f"{key}." if key else ""
    return {inner: value for name, below in tree.items() for inner, value in flat(below, f"{stem}{name}").items()}


def configs_before(run: Path) -> dict[int, Path]:
    """The configs that a run folder keeps of the times when it went on with another one, oldest first, by the last step
    that each was in force for."""
    kept = {int(path.stem.split("_")[2].partition("-")[0]): path for path in sorted(run.glob("config.before_step_*"))}
    return dict(sorted(kept.items()))


def changes(before: str, now: str, most: int = 8, but: Collection[str] = ("run",)) -> str:
    """Keys that two configs, as YAML, both have and that differ, with both values; not those of the sections `but`: by
    default, those that say where the run is. Empty if there are none, or `before` cannot be read."""
    try:
        theirs, ours = (flat(yaml.safe_load(text)) for text in (before, now))
    except yaml.YAMLError:
        return ""
    keys = [key for key in ours if key in theirs and ours[key] != theirs[key] and key.partition(".")[0] not in but]
    changed = [f"{key} {json.dumps(theirs[key])} -> {json.dumps(ours[key])}" for key in keys[:most]]
    return ", ".join([*changed, *([f"and {len(keys) - most} more"] if len(keys) > most else [])])
