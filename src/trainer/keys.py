"""Configs by their keys, joined by dots: what is compared, and what differs is told by. Needs no torch."""

import json
from typing import Any

import yaml


def flat(tree: Any, key: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}"""
    if not isinstance(tree, dict):
        return {key: tree}
    stem = f"{key}." if key else ""
    return {inner: value for name, below in tree.items() for inner, value in flat(below, f"{stem}{name}").items()}


def changes(before: str, now: str, most: int = 8) -> str:
    """Keys that two configs, as YAML, both have and that differ, with both values; not those that say where the run is.
    Empty if there are none, or `before` cannot be read."""
    try:
        theirs, ours = (flat(yaml.safe_load(text)) for text in (before, now))
    except yaml.YAMLError:
        return ""
    keys = [key for key in ours if key in theirs and ours[key] != theirs[key] and not key.startswith("run.")]
    told = [f"{key} {json.dumps(theirs[key])} -> {json.dumps(ours[key])}" for key in keys[:most]]
    return ", ".join([*told, *([f"and {len(keys) - most} more"] if len(keys) > most else [])])
