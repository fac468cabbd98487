"""Run folders as tests make them: what a run leaves when it is killed."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import Checkpointer
from trainer.run.names import CHECKPOINTS, EVENTS, METRICS
from trainer.run.run_folder import RunFolder

TEXTS = {"config.yaml": "lr: 1\n", "overrides.txt": "", "environment.json": "{}\n", "precision_plan.txt": "plan\n"}


def quiet(kind: str, step: int, message: str, **what: Any) -> None:
    """Ignores the event."""


def save(path: Path, *steps: int) -> None:
    checkpointer = Checkpointer(path / CHECKPOINTS, 0, quiet)
    for step in steps:
        checkpointer.save(step, {"t": torch.tensor(step)}, {"step": step})
    checkpointer.close()


def log(path: Path, *steps: int) -> None:
    with (path / METRICS).open("a") as metrics, (path / EVENTS).open("a") as events:
        for step in steps:
            metrics.write(json.dumps({"step": step, "loss/lm": 1 / (step + 1)}) + "\n")
            events.write(json.dumps({"step": step, "kind": "spike", "message": "x"}) + "\n")


def logged(path: Path, name: str = METRICS) -> list[int]:
    return [json.loads(line)["step"] for line in (path / name).read_text().splitlines()]


def make_run(
    runs: Path, *, checkpoints: tuple[int, ...], lines: tuple[int, ...] = (0, 100, 150, 200, 250, 300)
) -> Path:
    """A run that was killed after it had logged `lines` and saved `checkpoints`."""
    run = RunFolder(runs, "a", "never", "bf16", TEXTS)
    log(run.path, *lines)
    save(run.path, *checkpoints)
    run.close()
    return run.path


def damage(checkpoint: Path) -> None:
    with (checkpoint / "rank00000.safetensors").open("r+b") as file:
        file.truncate(20)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def snapshot(path: Path) -> dict[str, str]:
    """Digests of all files under `path`, without those that hold a time: the lock, and the list of files read whole."""
    return {
        str(file.relative_to(path)): digest(file.read_bytes())
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in (".lock", "verified.json")
    }
