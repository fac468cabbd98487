"""What a run has logged: lines of JSON, and what of them must not depend on the history of its processes."""

import json
from pathlib import Path
from typing import Any

from trainer.run.names import EVENTS, METRICS

BITWISE = ("loss/", "optim/", "moe/", "fp8/", "tokens")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(run: Path, key: str | None = None) -> list[dict[str, Any]]:
    """Lines of metrics: those that have a key, or all."""
    return [line for line in lines(run / METRICS) if key is None or key in line]


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Events: those of some kinds, or all."""
    return [event for event in lines(run / EVENTS) if not kinds or event["kind"] in kinds]


def bitwise(run: Path) -> list[dict[str, Any]]:
    """The metrics that must be the same to the bit, whatever happened to the process."""
    return [{k: v for k, v in line.items() if k == "step" or k.startswith(BITWISE)} for line in metrics(run)]
