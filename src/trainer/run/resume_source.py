"""The source of a run that does not start from nothing: its own checkpoint, if config and checkpoint agree on what may
not change, or the weights of another run."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from models import DeepSeek
from models.config import plain_model
from precision import Plan
from precision.errors import UserError, counted
from trainer.checkpoint import (
    DamagedCheckpoint,
    checkpoint_step,
    list_checkpoints,
    newest_checkpoint,
    read,
    read_meta,
    saved_shapes,
    verify_on_all_ranks,
)
from trainer.checkpoint.manifest import STATE, verify
from trainer.config import Config, OptimConfig, OptimizerName, load
from trainer.config.paths import as_typed, kept_tree
from trainer.config.phases import is_share
from trainer.config.timeline import Timeline, last_step
from trainer.config_diff import without_secrets
from trainer.launch.world import World
from trainer.optim.build_optimizer import learning_rate
from trainer.optim.orthogonalise import polynomials
from trainer.run.location import check_name, check_place, locate, will_resume
from trainer.run.names import CHECKPOINTS
from trainer.run.run_folder import Note, find_checkpoint


def identity(config: Config) -> dict:
    """Return the settings that must not change when a run resumes, and the recipe, which may."""
    t = config.trainer
    return {
        "model": plain_model(config.model),
        "trainer": {
            "seed": t.seed,
            "global_batch_size": t.global_batch_size,
            "sequence_length": t.sequence_length,
            "document_masking": t.document_masking,
        },
        "optim": _optimizer(config.optim),
        "precision": config.precision.name,
    }


def _optimizer(o: OptimConfig) -> dict:
    """Return the settings that determine the optimizer's state and the direction of its updates."""
    if o.muon is None or o.name is OptimizerName.adamw:
        return {"name": o.name.value}
    muon = asdict(o.muon) | {"steps": len(polynomials(o.muon.coefficients, o.muon.steps))}
    return {"name": o.name.value} | {f"muon.{k}": v.value if isinstance(v, Enum) else v for k, v in muon.items()}


def checkpoint_origin(config: Config, tokenizer_hash: str) -> dict:
    """Return a checkpoint's origin for its meta, which its manifest covers: the whole config, without secrets, and the
    SHA-256 of tokenizer.json. Evaluation, export and replay trust it instead of the run folder."""
    return {**identity(config), "config": without_secrets(kept_tree(config), None), "tokenizer": tokenizer_hash}


def check_resumable(config: Config, meta: dict, checkpoint: Path) -> None:
    """Raise UserError, naming the key, if a run with this config cannot resume from `checkpoint`, which has this
    meta."""
    _check_same(meta, config, checkpoint)
    step, ours = checkpoint_step(checkpoint) or 0, Timeline(config.trainer)
    if step > ours.steps:
        fix = f"{step} or more" if config.trainer.max_steps == ours.steps else "more"
        raise UserError(f"{last_step(config)}: {checkpoint} is already past it; set {fix}")
    theirs = meta["config"]["trainer"] if "config" in meta else None
    if theirs is None or not (theirs.get("phases") or config.trainer.phases):
        return
    was = Timeline(load(meta["config"]).trainer).read_by(step)
    if was != ours.read_by(step):
        read = "; ".join(
            f"from step {first} on {counted(batch, 'sequence')} of {length}" for first, batch, length in was
        )
        untils = [phase.until for phase in config.trainer.phases]
        moved = [i for i, until in enumerate(untils) if until is not None and is_share(until)]
        hint = f"; trainer.phases[{moved[0]}].until is a share of the run's length: set it in steps" if moved else ""
        raise UserError(
            f"trainer.phases: {checkpoint} was trained {read}; past phases must stay, later ones may change{hint}"
        )


def check_identity(config: Config) -> None:
    """Raise early, before data is prepared and a model is made, what `check_resumable` would raise because of a setting
    that must not change."""
    if not will_resume(config.run):
        return
    folder, named = locate(Path(config.run.dir), config.run.name, config.run.resume, "")
    newest = named or list_checkpoints(folder / CHECKPOINTS)[-1]
    with suppress(DamagedCheckpoint):  # skipped when the run folder is opened
        verify(newest, only=STATE)
        _check_same(read_meta(newest), config, newest)


def moved_rate(meta: Mapping[str, Any], config: Config, step: int, committed: int) -> str | None:
    """Return a line if a run that resumes after `step` has another learning rate in its next step than with the config
    of its checkpoint, which has this meta; None if not. committed: steps committed so far."""
    if "config" not in meta:
        return None
    was, steps = load(meta["config"]), Timeline(config.trainer).steps
    then, now = (float(learning_rate(each).at(torch.tensor(committed), step)) for each in (was, config))
    if step == steps or then == now:
        return None
    length, because = Timeline(was.trainer).steps, ""
    if length != steps:
        because = f": the schedule spans the whole run, {length:,} -> {steps:,} steps"
    return f"learning rate of step {step + 1}: {then:.3g} -> {now:.3g}{because}"


def _check_same(theirs: dict, config: Config, path: Path) -> None:
    """Raise UserError, naming the first key that a resumed run changes but must not. It suggests run.init_from only if
    that takes the checkpoint's tensors."""
    ours = identity(config)
    for section in ("model", "trainer", "optim"):
        for key, value in ours[section].items():
            was = theirs.get(section, {}).get(key, value)
            if was != value:
                fix = f"set {shlex.quote(f'{section}.{key}={_typed(was)}')}"
                if _difference(_meta_tensors(config), path) is None:
                    fix += f", or start a new run from its weights with {as_typed('run.init_from', str(path))}"
                raise UserError(f"{section}.{key}={_typed(value)}: {path} was trained with {_typed(was)}; {fix}")


def _typed(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_typed(each)}" for key, each in value.items()) + "}"
    return "null" if value is None else str(value)


def init_from(ours: Mapping[str, Any], path: Path, world: World, notes: list[Note]) -> Path:
    """Read weights (and router biases) of another run's checkpoint into `ours`, by name; remarks go to `notes`. Returns
    the checkpoint. A collective. Raises UserError if there are none, or not the same tensors."""

    def note(kind: str, step: int, message: str, **what: object) -> None:
        notes.append(Note(kind, step, message, what))

    checkpoint = verify_on_all_ranks(
        world, lambda verify: find_checkpoint(path, "run.init_from", note, verify), "init_from"
    )
    _check_tensors(ours, checkpoint, path)
    read(checkpoint, {"model": ours}, rest=False, verified=True)
    note("resume", 0, f"weights from {checkpoint}")
    return checkpoint


def check_origin(config: Config) -> None:
    """Raise in a dry run what `init_from` and a resumption would refuse after the start. Writes nothing."""

    def quiet(kind: str, step: int, message: str, **what: object) -> None:
        pass

    run = config.run
    if run.init_from is not None and not will_resume(run):
        path = Path(run.init_from)
        checkpoint = find_checkpoint(path, "run.init_from", quiet)
        _check_tensors(_meta_tensors(config), checkpoint, path)
    if run.resume == "never":
        check_name(run.name)
        return
    folder = check_place(run)
    if run.resume != "auto":
        newest = find_checkpoint(Path(run.resume), "run.resume", quiet)
    else:
        newest = None if folder is None else newest_checkpoint(folder / CHECKPOINTS, quiet)
    if newest is not None:
        check_resumable(config, read_meta(newest), newest)


def _meta_tensors(config: Config) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a config's model, without storage."""
    with torch.device("meta"):
        return DeepSeek(config.model, Plan(config.precision, config.model.num_layers)).state_dict()


def _check_tensors(ours: Mapping[str, Any], checkpoint: Path, path: Path) -> None:
    """Raise UserError, naming the first tensor that differs between a model and a checkpoint, found through `path`."""
    if (found := _difference(ours, checkpoint)) is not None:
        raise UserError(f"run.init_from={path}: {found}; use that run's model.*")


def _difference(ours: Mapping[str, Any], checkpoint: Path) -> str | None:
    """Return the first difference between a model's tensors and those of a checkpoint, None if there is none."""
    saved = saved_shapes(checkpoint)
    for name, tensor in ours.items():
        here, there = tensor.size(), saved.get(f"model/{name}")
        if there != here:
            theirs = "no such tensor" if there is None else list(there)
            return f"{name} is {list(here)} in this model, {theirs} there"
    for name in (name.removeprefix("model/") for name in saved if name.startswith("model/")):
        if name not in ours:
            return f"it has {name}, which this model lacks"
    return None
