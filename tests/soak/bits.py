"""Bitwise comparison of two runs of the soak test (`soak.py`). Not a command of its own."""

import json
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import checkpoint_name, read

BITWISE = ("loss/", "optim/", "moe/", "fp8/")
STATE = ("model", "optimizer", "arena", "guard", "loader", "rng")


class SoakFailure(AssertionError):
    """A failure that the soak test looks for."""


def state(run: Path, step: int) -> dict[str, Any]:
    """Return a run's trained state from its checkpoint of that step."""
    whole, _ = read(run / "checkpoints" / checkpoint_name(step))
    return {branch: whole[branch] for branch in STATE}


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    """Return step -> metrics that must not depend on the process's history."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        known = steps.setdefault(entry["step"], {})
        for key, value in entry.items():
            if key.startswith(BITWISE) and known.setdefault(key, value) != value:
                raise SoakFailure(f"{run.name}: step {entry['step']} has {key} twice, {known[key]} and {value}")
    return steps


def differs(ours: Any, theirs: Any, where: str = "") -> str | None:
    """Return the first place where two trees differ in a bit."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        as_bytes = (x.contiguous().reshape(-1).view(torch.uint8) for x in (ours, theirs))
        return None if same and torch.equal(*as_bytes) else where
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"{where} ({ours.keys() ^ theirs.keys()})"
        found = (differs(value, theirs[key], f"{where}/{key}") for key, value in ours.items())
        return next((place for place in found if place is not None), None)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        return differs(dict(enumerate(ours)), dict(enumerate(theirs)), where)
    return None if ours == theirs else where
