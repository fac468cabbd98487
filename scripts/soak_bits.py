"""Whether two runs of the soak test (`soak.py`) are the same, bit for bit. No command of its own."""

import json
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import checkpoint_name, read

BITWISE = ("loss/", "optim/", "moe/", "fp8/")
STATE = ("model", "optimizer", "arena", "guard", "loader", "rng")


class Wrong(AssertionError):
    """What the soak test looks for."""


def state(run: Path, step: int) -> dict[str, Any]:
    """What a run has trained, as its checkpoint of that step holds it."""
    whole, _ = read(run / "checkpoints" / checkpoint_name(step))
    return {branch: whole[branch] for branch in STATE}


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    """step -> what must not depend on what happened to the process."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        known = steps.setdefault(entry["step"], {})
        for key, value in entry.items():
            if key.startswith(BITWISE) and known.setdefault(key, value) != value:
                raise Wrong(f"{run.name}: step {entry['step']} has {key} twice, {known[key]} and {value}")
    return steps


def differs(ours: Any, theirs: Any, where: str = "") -> str | None:
    """The first place where two trees differ in a bit."""
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
