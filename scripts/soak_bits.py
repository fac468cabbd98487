"""The verdict of the soak test (`soak.py`): whether two runs are the same, bit for bit. No command of its own."""

import json
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import list_checkpoints, read

BITWISE = ("loss/", "optim/", "moe/", "fp8/")
STATE = ("model", "optimizer", "arena", "guard", "loader", "rng")


class Wrong(AssertionError):
    """What the soak test looks for."""


def compare(run: Path, reference: Path) -> None:
    """Wrong, unless the disturbed run has the bits of the reference."""
    ours, theirs = metrics(run), metrics(reference)
    if ours.keys() != theirs.keys():
        raise Wrong(f"metrics of other steps: {sorted(ours.keys() ^ theirs.keys())}")
    for step, values in theirs.items():
        wrong = [key for key in values.keys() | ours[step].keys() if values.get(key) != ours[step].get(key)]
        if wrong:
            raise Wrong(f"step {step}: {wrong[0]} is {ours[step].get(wrong[0])}, not {values.get(wrong[0])}")
    left, right = (list_checkpoints(each / "checkpoints")[-1] for each in (run, reference))
    (ours, _), (theirs, _) = read(left), read(right)
    for branch in STATE:
        if (where := difference(ours[branch], theirs[branch], branch)) is not None:
            raise Wrong(f"{left.name}: {where} is not the reference's")


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


def difference(ours: Any, theirs: Any, where: str) -> str | None:
    """The first place where two trees differ in a bit."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        as_bytes = (x.contiguous().reshape(-1).view(torch.uint8) for x in (ours, theirs))
        return None if same and torch.equal(*as_bytes) else where
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"{where} ({ours.keys() ^ theirs.keys()})"
        found = (difference(value, theirs[key], f"{where}/{key}") for key, value in ours.items())
        return next((place for place in found if place is not None), None)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        return difference(dict(enumerate(ours)), dict(enumerate(theirs)), where)
    return None if ours == theirs else where
