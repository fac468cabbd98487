"""Replays a step of a run: from the nearest checkpoint before it, in the run's precision and in another.

    find      the checkpoint to begin with, and the history of the run: after a rewind the same step number stands for
              other data. A skipped step is looked up in the history that skipped it
    restore   weights, moments, scales and data cursor from the checkpoint; the steps up to the requested one are
              trained again, on one process, bit for bit on a CPU if the run had one too
    compare   the step's tokens through both models, from the same weights: loss and gradient norm of the step, and
              every tensor of one microbatch (`trainer.recovery.nonfinite_probe`), the one that went bad first if any

It writes nothing into the run's folder, and the run may continue meanwhile.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from precision.errors import UserError, counted
from trainer.checkpoint import (
    DamagedCheckpoint,
    checkpoint_step,
    list_checkpoints,
    read,
    read_values,
    verify_checkpoint,
)
from trainer.config import Config, load
from trainer.config.timeline import Timeline
from trainer.config_diff import changed_keys, configs_before
from trainer.data import Loader, Prepared, prepare
from trainer.data.document_masking import set_document_masking
from trainer.files import parse_lines
from trainer.forecast.preflight import check
from trainer.launch.device import pick_device
from trainer.offline.saved_model import ONE_PROCESS, config_at, with_overrides
from trainer.recovery.ladder import Ladder, Rewind
from trainer.recovery.nonfinite_probe import NonfiniteProbe, probe_microbatch
from trainer.run.names import CHECKPOINTS, CONFIG, EVENTS, METRICS
from trainer.run.run_folder import saved_backends
from trainer.step.engine import Engine, build_engine
from trainer.step.train_step import StepResult, train_step

SKIPPED = "nonfinite", "spike", "loss_scale"
_NO_MATTER = "run", "parallel", "eval", "checkpoint", "logging", "health", "profile", "dry_run", "gpu", "force_memory"
"""Sections that change no weight."""


@dataclass
class ReplayTarget:
    """How to reach a step: start with `checkpoint` (None: the start of the run), of step `first`, and apply the first
    `rewinds` rewinds of the run."""

    run: Path
    step: int
    checkpoint: Path | None
    first: int
    rewinds: list[Rewind]
    event: dict[str, Any] | None
    """The run's event about the step if it was skipped."""
    logged: dict[str, Any] | None
    """The run's metrics of the step."""


@dataclass
class Pass:
    """The step in one precision: loss and gradient norm of all of it, the place that is not finite first, and the
    readings of one microbatch."""

    name: str
    loss: float
    grad_norm: float
    place: str | None
    probe: NonfiniteProbe


@dataclass
class Replay:
    """Result. microbatch: the one examined, of `microbatches`; windows: those of its sequences."""

    config: Config
    target: ReplayTarget
    ours: Pass
    theirs: Pass
    engine: Engine
    loader: Loader
    data: Prepared
    microbatch: int
    microbatches: int
    windows: np.ndarray
    scales: list[float]
    """Scales of the arena's rows at the start of the step; 0: scaled by its own amax."""


def find(run: Path, step: int, most: int) -> ReplayTarget:
    """Find the way to a step. Raises UserError if the run or step does not exist, if no checkpoint lies less than
    `most` steps before it, or if settings changed in between."""
    if not (run / CONFIG).is_file():
        what = f"no {CONFIG} in it" if run.is_dir() else "no such folder"
        raise UserError(f"{run}: {what}; give the folder of a run, as runs/NAME")
    events, metrics = _lines(run / EVENTS), _lines(run / METRICS)
    checkpoints = list_checkpoints(run / CHECKPOINTS)
    last = _last_step(events, metrics, checkpoints)
    if not 1 <= step <= last:
        raise UserError(f"step {step}: {run} has steps 1 to {last} so far; give one of them")
    skipped = [
        i
        for i, entry in enumerate(events)
        if entry["step"] == step and entry.get("kind") in SKIPPED and not _is_discarded(step, events[i + 1 :])
    ]
    event = events[skipped[-1]] if skipped else None
    rewinds = Ladder(load(config_at(run, step)).recovery, run, 1).read()
    if skipped:  # later ones belong to a later history
        earlier = sum(entry.get("kind") == "rollback" and "to" in entry for entry in events[: skipped[-1]])
        later, rewinds = rewinds[earlier:], rewinds[:earlier]
        newest = min([step - 1, *(rewind.to for rewind in later)])
        metrics = [] if later else metrics
    else:
        newest = step - 1
    logged = next((entry for entry in reversed(metrics) if entry["step"] == step and "loss/total" in entry), None)
    checkpoint = next((path for path in reversed(checkpoints) if _usable(path, newest)), None)
    first = 0 if checkpoint is None else checkpoint_step(checkpoint) or 0
    if checkpoint is None and config_at(run, step)["run"]["init_from"] is not None:
        raise UserError(
            f"step {step}: {run} has no checkpoint before it, and began with the weights of another run; "
            "give a step after its first checkpoint"
        )
    if step - 1 - first > most:
        where = "no checkpoint before it" + ("" if checkpoint is None else f" but {checkpoint.name}")
        again = step - 1 - first
        raise UserError(
            f"step {step}: {run} has {where}, so {counted(again, 'step')} must be trained again; "
            f"allow that with --most {again}"
        )
    for end in configs_before(run):
        if first < end < step and (what := changed_keys(config_at(run, end), config_at(run, step), but=_NO_MATTER)):
            raise UserError(
                f"step {step}: {run} has no checkpoint between it and step {end}, after which its settings changed "
                f"({what}); give a step up to {end}, or one after a checkpoint"
            )
    return ReplayTarget(run, step, checkpoint, first, rewinds, event, logged)


def _last_step(events: list[dict[str, Any]], metrics: list[dict[str, Any]], checkpoints: list[Path]) -> int:
    """Return the last step that a run has reached, as far as its files show."""
    reported = 0
    for entry in events:  # a resume discards later steps
        reported = entry["step"] if entry.get("kind") == "resume" else max(reported, entry["step"])
    return max([reported, *(entry["step"] for entry in metrics), *(checkpoint_step(path) or 0 for path in checkpoints)])


def config_of(target: ReplayTarget, overrides: list[str], faults: bool) -> dict[str, Any]:
    """Return the run's config tree as of that step, for one process; `overrides`: KEY=VALUE."""
    tree = with_overrides(config_at(target.run, target.step), overrides)
    tree["parallel"] |= ONE_PROCESS
    tree["profile"]["steps"] = None
    tree["health"]["shadow_every"] = 0  # it changes no step, and a precision without FP8 refuses it
    if not faults:
        tree["debug"]["inject"] = None
    return tree


def replay(target: ReplayTarget, tree: dict[str, Any], precision: Path, microbatch: int | None) -> Replay:
    """Run the step. tree: from `config_of`; precision: YAML of the recipe to compare with; microbatch: the one to
    examine, None: the first bad one, or the first."""
    config = load(tree)
    other = load({**tree, "precision": yaml.safe_load(precision.read_text())})
    for each in (config, other):
        check(each, 1)
    t, device = config.trainer, pick_device(config.trainer.device)
    timeline = Timeline(t)
    shape, weights = timeline.at(target.step), timeline.weights(target.step)
    size = shape.microbatch
    count = shape.batch // size
    if microbatch is not None and not 0 <= microbatch < count:
        raise UserError(f"--microbatch {microbatch}: the step has {count}; give 0 to {count - 1}")
    data = prepare(config.data, config.model.vocab_size)
    loader = Loader(data.train, timeline.segments, t.seed)
    engine = build_engine(config, device, saved_backends(target.run, target.step))
    set_document_masking(engine.model, t, data)
    _reach(target, config, engine, loader)
    tokens = loader.next()
    twin = build_engine(other, device)
    set_document_masking(twin.model, t, data)
    twin.model.load_state_dict(engine.model.state_dict())
    engines = engine, twin
    for e in engines:
        e.enter(weights, _changed(timeline, target.step))
        if (targets := e.model.mtp_targets(tokens)) is not None:
            e.model.expect(targets, count)

    def probe_all(index: int) -> list[NonfiniteProbe]:
        part, passes = tokens.split(size)[index], []
        for e in engines:
            if e.injector is not None:
                e.injector.data(loader.served)
            passes.append(probe_microbatch(e, target.step, index, part, len(tokens), keep=True))
        return passes

    scales = engine.arena.in_force().tolist()
    index = _likely(target, loader.served, size) if microbatch is None else microbatch
    seen = probe_all(index)
    loss_scales = [e.loss_scale and e.loss_scale.state_dict() for e in engines]
    results = [_train(e, target.step, loader, tokens, size) for e in engines]
    evidence = engine.snapshot.take()
    if microbatch is None and evidence and evidence[0] is not None and evidence[0].microbatch not in (None, index):
        index = evidence[0].microbatch  # nothing was committed: the weights are still the same
        for e, state in zip(engines, loss_scales, strict=True):
            if e.loss_scale is not None and state is not None:
                e.loss_scale.load_state_dict(state)
        seen = probe_all(index)
    ours = _pass(config.precision.name, engine, results[0], seen[0])
    theirs = _pass(other.precision.name, twin, results[1], seen[1])
    windows = loader.served[index * size : (index + 1) * size]
    return Replay(config, target, ours, theirs, engine, loader, data, index, count, windows, scales)


def _reach(target: ReplayTarget, config: Config, engine: Engine, loader: Loader) -> None:
    """Restore the state to begin with, and train the steps before the target's again."""
    ladder, timeline = _restore(target, config, engine, loader), Timeline(config.trainer)
    for step in range(target.first + 1, target.step + 1):
        if ladder.begins(step):
            ladder.apply(step, loader, engine.optimizer.schedule)
        engine.adapt(timeline, step)
        if step < target.step:
            engine.enter(timeline.weights(step), _changed(timeline, step))
            _train(engine, step, loader, loader.next(), timeline.at(step).microbatch)
    engine.snapshot.take()


def _changed(timeline: Timeline, step: int) -> bool:
    """Return whether the step before had another shape or other loss weights."""
    before = max(step - 1, 1)
    return (timeline.at(step), timeline.weights(step)) != (timeline.at(before), timeline.weights(before))


def _pass(name: str, engine: Engine, result: StepResult, probe: NonfiniteProbe) -> Pass:
    place = None if bool(result.verdict.ok) else engine.guard.places[int(result.verdict.place)]
    return Pass(name, float(result.metrics["loss/total"]), float(result.metrics["optim/grad_norm"]), place, probe)


def _train(engine: Engine, step: int, loader: Loader, tokens: Tensor, microbatch_size: int) -> StepResult:
    if engine.injector is not None:
        engine.injector.data(loader.served)
    return train_step(engine, step, tokens, microbatch_size)


def _restore(target: ReplayTarget, config: Config, engine: Engine, loader: Loader) -> Ladder:
    """Load the state to begin with. Return the ladder with the rewinds of the target's history."""
    if target.checkpoint is not None:
        state, _ = read(target.checkpoint, engine.restorable_tensors(), verified=True)
        engine.load_state(state)
        loader.load_state_dict(state["loader"])
        loader.step = target.first
        torch.set_rng_state(state["rng"]["cpu"])
    elif checkpoints := list_checkpoints(target.run / CHECKPOINTS):
        known = here = loader.bins.sidecar.sha256[:16]
        with suppress(OSError, ValueError, KeyError):  # damaged: then nothing is known
            known = read_values(checkpoints[-1], "loader")["data"]
        if known != here:
            raise UserError(f"data: {loader.bins.path} is not the text of the run; set it back to replay the step")
    ladder = Ladder(config.recovery, target.run, config.trainer.global_batch_size)
    ladder.load_state_dict({"streak": []}, target.rewinds)
    ladder.apply(target.first + 1, loader, engine.optimizer.schedule)
    return ladder


def _is_discarded(step: int, later: list[dict[str, Any]]) -> bool:
    """Return whether the run resumed from before a step after it reported it."""
    return any(entry.get("kind") == "resume" and entry["step"] < step for entry in later)


def _likely(target: ReplayTarget, served: np.ndarray, microbatch_size: int) -> int:
    """Return the microbatch that the run named when it skipped the step, numbered as on one process."""
    windows = (target.event or {}).get("windows")
    if not windows or "microbatch" not in (target.event or {}) or windows[0] not in served:
        return 0
    return int(np.flatnonzero(served == windows[0])[0]) // microbatch_size


def _usable(path: Path, newest: int) -> bool:
    if (checkpoint_step(path) or 0) > newest:
        return False
    try:
        verify_checkpoint(path)
    except DamagedCheckpoint:
        return False
    return True


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return entries of a JSON-lines file that may be growing."""
    return list(parse_lines(path)) if path.is_file() else []
