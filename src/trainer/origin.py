"""What a run begins from that it has not made itself: its own checkpoint, if config and checkpoint agree on what may
not change, or the weights of another run."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.checkpoint import read, saved_shapes
from trainer.config import Config
from trainer.distributed import World
from trainer.rundir import Note, find_checkpoint


def identity(config: Config) -> dict:
    """What must not change between a run and its resumption, and the recipe, which may."""
    t = config.trainer
    return {
        "model": json.loads(json.dumps(asdict(config.model), default=lambda choice: choice.value)),
        "trainer": {
            "seed": t.seed,
            "global_batch_size": t.global_batch_size,
            "sequence_length": t.sequence_length,
            "document_masking": t.document_masking,
        },
        "precision": config.precision.name,
    }


def check_same(theirs: dict, ours: dict, path: Path) -> None:
    """ValueError, naming the first key that a resumed run may not change and does."""
    for section in ("model", "trainer"):
        for key, value in ours[section].items():
            was = theirs[section].get(key, value)
            if was != value:
                raise ValueError(
                    f"{section}.{key}={value}: {path} was trained with {was}; set {section}.{key}={was}, or "
                    f"start a new run from its weights with run.init_from={path}"
                )


def init_from(ours: Mapping[str, Any], path: Path, world: World, notes: list[Note]) -> None:
    """Read weights (and router biases) of another run's checkpoint into `ours`, by name; what there is to tell goes to
    `notes`. A collective. ValueError if there are none, or not the same tensors."""

    def note(kind: str, step: int, message: str, **what: object) -> None:
        notes.append(Note(kind, step, message, what))

    checkpoint = world.on_first(lambda: find_checkpoint(path, "run.init_from", note), "init_from")
    saved = saved_shapes(checkpoint)
    for name, tensor in ours.items():
        here, there = tensor.size(), saved.get(f"model/{name}")
        if there != here:
            theirs = "no such tensor" if there is None else list(there)
            raise ValueError(
                f"run.init_from={path}: {name} is {list(here)} in this model, there: {theirs}; use that run's model.*"
            )
    for name in (name.removeprefix("model/") for name in saved if name.startswith("model/")):
        if name not in ours:
            raise ValueError(f"run.init_from={path}: {name} is there and not in this model; use that run's model.*")
    read(checkpoint, {"model": ours}, rest=False, verified=True)
    note("resume", 0, f"weights from {checkpoint}")
