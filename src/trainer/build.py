"""Assembles a run: the order in which its parts are created, and the state that a checkpoint keeps.

Everything that can refuse (config, data, plan, GPU) comes before the run folder, so that a mistake leaves nothing
behind. Parameters are made on the meta device and materialised once; weights come from the seed, from `run.init_from`,
or from the checkpoint that the run resumes from.
"""

import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from precision import Plan, proof
from precision.errors import counted
from trainer.checkpoint import (
    Checkpointer,
    CheckpointError,
    Verify,
    checkpoint_name,
    checkpoint_step,
    read,
    read_values,
    verify_on_all_ranks,
)
from trainer.config import Config
from trainer.config.paths import as_typed, kept_tree
from trainer.config.timeline import Timeline, at_peak_memory, with_epochs
from trainer.data import Loader, Prepared, check_whole, find_or_build
from trainer.data.document_masking import set_document_masking
from trainer.data.prefetch import READ_AHEAD
from trainer.data.progress_bars import bars
from trainer.data.tokenizer_sample import silent
from trainer.forecast.check_values import check_single_steps, in_phase
from trainer.forecast.header import header
from trainer.forecast.preflight import without_effect
from trainer.forecast.stages import idle_share
from trainer.health.alerts import Alerts
from trainer.health.dashboard.at_end import SHORT_PATIENCE, write_at_end
from trainer.health.health import Health
from trainer.health.power import MeteredGpus, PowerMeter, find_gpus
from trainer.health.rules import training_rules
from trainer.health.stragglers import Stragglers
from trainer.launch.world import World
from trainer.recovery.diagnosis import Diagnosis
from trainer.recovery.ladder import Ladder, Rewind
from trainer.run.location import check_place, will_resume
from trainer.run.names import CHECKPOINTS, METRICS, TENSORS
from trainer.run.resume_source import check_identity, check_resumable, checkpoint_origin, init_from, moved_rate
from trainer.run.run_folder import Note, RunFolder, saved_backends
from trainer.sinks import Sinks
from trainer.step.engine import Engine, build_engine
from trainer.step.profiler import Profiler


@dataclass
class Run:
    """An assembled run: everything that the loop uses."""

    config: Config
    world: World
    engine: Engine
    data: Prepared
    loader: Loader
    folder: RunFolder
    checkpointer: Checkpointer
    sinks: Sinks
    profiler: Profiler
    diagnosis: Diagnosis
    ladder: Ladder
    power: PowerMeter
    stragglers: Stragglers
    health: Health
    alerts: Alerts

    def close(self, error: BaseException | None) -> None:
        """Close the sinks (`error`: what ended the run), finish pending writes, release the run folder."""
        with ExitStack() as last:
            last.callback(self.folder.close)
            last.callback(self.sinks.close, error)
            if self.config.health.dashboard and self.world.is_first:
                last.callback(write_at_end, self.folder.path, error)
            last.enter_context(suppress(CheckpointError))  # already reported; the error that ended the run comes first
            last.callback(self.checkpointer.close)
            last.callback(self.power.close)
            last.callback(self.loader.close)
            self.profiler.close()

    def state(self) -> dict:
        """Return the state to save. Random numbers are drawn alike on all ranks, and the loader's cursor does not
        depend on ranks: except for weights and moments, rank 0's state serves all."""
        return {
            **self.engine.state(),
            "loader": self.loader.state_dict(),
            "validation": self.data.validation.sidecar.sha256,
            "ladder": self.ladder.state_dict(),
            "sinks": self.sinks.state_dict(),
            "rng": {"cpu": torch.get_rng_state()},
        }

    def save(self, step: int) -> None:
        """Checkpoint in the background; each rank its own part."""
        began = time.perf_counter()
        self.folder.recreate_if_deleted(step, self.sinks.event)
        meta = checkpoint_origin(self.config, self.data.tokenizer_hash)
        self.checkpointer.save(step, self.state(), meta, began, self.ladder.streak_begins)

    def finish_saving(self, step: int) -> CheckpointError | None:
        """Wait for the checkpoint of the last step; if it fails, try again. Return the error of the second attempt."""
        with suppress(CheckpointError):
            self.checkpointer.wait()
            return None
        self.save(step)
        try:
            self.checkpointer.wait()
        except CheckpointError as error:
            return error
        return None

    def restore(self, path: Path) -> None:
        """Load a checkpoint of this run, which `RunFolder` has verified: each rank reads its own part."""
        rewinds = self.world.on_rank_0(self.ladder.read)
        state, meta, fresh = self._load_training_state(path)
        self.ladder.load_state_dict(state.get("ladder", {"streak": []}), rewinds)
        self.apply_rewinds(self.folder.first_step + 1)
        self.sinks.load_state_dict(state["sinks"])
        message = f"resumed from {path.name}"
        if meta["precision"] != self.config.precision.name:
            message += f"; precision recipe {meta['precision']} -> {self.config.precision.name}"
            message += f", {counted(len(fresh), 'tensor')} without a scaling history at first" if fresh else ""
        self.sinks.event("resume", self.folder.first_step, message)
        if rate := moved_rate(meta, self.config, self.folder.first_step, int(self.engine.guard.committed)):
            self.sinks.event("settings", self.folder.first_step, rate)
        if meta.get("config", {}).get("precision") != kept_tree(self.config)["precision"]:
            self.alerts.another_precision()
        self.checkpointer.warn_of_deletions(self.folder.first_step, self.ladder.streak_begins)
        if state.get("validation", here := self.data.validation.sidecar.sha256) != here:
            changed = f"the text of {self.data.validation.path} has changed, and so loss/validation will"
            self.sinks.event("data", self.folder.first_step, changed, path=str(self.data.validation.path))

    def rewind(self, step: int) -> int:
        """Return to a checkpoint, in place, after too many skipped steps in a row up to `step`, and leave out what they
        read. Returns the checkpoint's step; raises TrainingStopped if that does not help. A collective."""
        self.checkpointer.wait_for_save()
        committed = int(self.engine.guard.committed)

        def first(verify: Verify) -> Rewind | str:
            choice = self.ladder.choose(committed, self.checkpointer.folder, self.sinks.event, verify)
            if isinstance(choice, Rewind):
                self.ladder.write(choice, self.sinks.event)
            return choice

        choice = verify_on_all_ranks(self.world, first, f"rewind{len(self.ladder.rewinds)}")
        message = self.ladder.take(choice, step, self.sinks.event)
        assert isinstance(choice, Rewind)
        self._load_training_state(self.checkpointer.folder / checkpoint_name(choice.to))
        self.sinks.rewind(choice.to)
        self.checkpointer.rewind_to(choice.to)
        what = {key: value for key, value in asdict(choice).items() if key != "step"}
        self.sinks.event("rollback", step, message, **what)
        return choice.to

    def _load_training_state(self, path: Path) -> tuple[dict, dict, list[str]]:
        """Load the state of training from a valid checkpoint. Return state and meta as `read` does, and the arena rows
        that start without a history."""
        state, meta = read(path, self.engine.restorable_tensors(), verified=True)
        fresh = self.engine.load_state(state)
        self.loader.load_state_dict(state["loader"])
        self.loader.step = checkpoint_step(path) or 0
        torch.set_rng_state(state["rng"]["cpu"])
        return state, meta, fresh

    def apply_rewinds(self, step: int) -> None:
        """Apply the left-out windows and lowered rates that hold from this step on to the loaded state."""
        self.ladder.apply(step, self.loader, self.engine.optimizer.schedule)


def build(config: Config, overrides: list[str], world: World) -> Run:
    """Build everything a run needs, in order. Raises UserError for the user's errors before anything is written."""

    def look() -> tuple[dict[str, Any] | None, bool]:
        check_identity(config)
        return saved_backends(check_place(config.run)), will_resume(config.run)

    saved, again = world.on_rank_0(look)
    notes: list[Note] = []
    data, about_data = None, []
    if Timeline(config.trainer).epochs is not None:
        data, about_data = _find_data(config, world)
        config = with_epochs(config, data.train.sidecar.num_tokens)
        check_single_steps(config)
    gpus = find_gpus(config.health.power, world)
    engine = build_engine(config, world.device, saved, world)
    origin = None
    if config.run.init_from is not None and not again:
        origin = init_from(engine.restorable_tensors()["model"], Path(config.run.init_from), world, notes)
    if data is None:
        data, about_data = _find_data(config, world)
    if origin is not None:
        notes.extend(_other_tokenizer(origin, data))
    check_whole(data.shards, config.data.verify, world.rank, world.gather)
    set_document_masking(engine.model, config.trainer, data)
    loader = _loader(config, data, world)

    def check(meta: dict[str, Any], path: Path) -> None:
        check_resumable(config, meta, path)
        loader.check(read_values(path, "loader"))
        begun, given = meta.get("config", {}).get("run", {}).get("init_from"), kept_tree(config)["run"]["init_from"]
        if given is not None and given != begun:
            why = "has no effect: the run resumes from its own checkpoint"
            notes.append(Note("config", 0, f"run.init_from={config.run.init_from}: {why}"))

    with ExitStack() as on_error:
        folder = RunFolder.open(config, overrides, engine.plan.to_text(), engine.plan.backends(), world, check)
        for each in about_data:  # a run that is refused because of its data says that alone
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        on_error.callback(folder.close)
        on_error.push(folder.undo)
        folder.keep(data.tokenizer_path)
        folder.notes.extend([*notes, *_notes(config, engine.plan, data, world, folder.first_step)])
        to, steps, alone = config.health.alerts, Timeline(config.trainer).steps, world.size == 1
        sinks = Sinks(config.logging, folder, steps, None, world.rank, to.webhook, to.command, alone)
        on_error.enter_context(sinks)
        world.rank_group.on_end.append(sinks.ended)
        if config.health.dashboard:
            world.rank_group.on_end.append(lambda failure: write_at_end(folder.path, failure.message, SHORT_PATIENCE))
        run = _assemble(config, world, engine, data, loader, folder, sinks, gpus)
        if world.is_first:
            sinks.header(header(config, engine.plan, overrides, folder.path, world.size, data))
        if folder.resumed_from is not None:
            with world.rank_group.phase("reading a checkpoint"):
                run.restore(folder.resumed_from)
        if config.checkpoint.every:
            run.checkpointer.reserve(run.state())
        on_error.pop_all()
    return run


def _assemble(
    config: Config,
    world: World,
    engine: Engine,
    data: Prepared,
    loader: Loader,
    folder: RunFolder,
    sinks: Sinks,
    gpus: MeteredGpus,
) -> Run:
    """Build the parts that observe, save and recover, and return them with those that there are."""
    t, plan, alerts = config.trainer, engine.plan, _alerts(config, folder, world)

    def inside(entry: Mapping[str, Any]) -> None:
        sinks.tensors(entry)
        alerts.tensors(entry)

    health = Health(config.health, engine, inside, t.global_batch_size, t.microbatch_size)
    if health.note is not None:
        sinks.event("alert", folder.first_step, health.note)
    largest_batch = max(each.batch for each in Timeline(t).segments)
    rank = world.rank if world.is_distributed else None
    return Run(
        config=config,
        world=world,
        engine=engine,
        data=data,
        loader=loader,
        folder=folder,
        checkpointer=Checkpointer(folder.path / CHECKPOINTS, config.checkpoint.keep, sinks.event, world),
        sinks=sinks,
        profiler=Profiler(config.profile, folder.path, engine.device, sinks.event, rank),
        diagnosis=Diagnosis(engine, loader, data.tokenizer_path, t.microbatch_size, folder.path),
        ladder=Ladder(config.recovery, folder.path, largest_batch, in_fp8=plan.has_fp8, in_fp16=plan.is_fp16),
        power=PowerMeter(gpus, config.health.power, world, sinks.event),
        stragglers=_stragglers(config, engine, world),
        health=health,
        alerts=alerts,
    )


def _find_data(config: Config, world: World) -> tuple[Prepared, list[warnings.WarningMessage]]:
    """Return the data, and on rank 0 the warnings about it."""
    progress = bars() if config.logging.console.enabled and world.is_first else nullcontext(silent)
    with world.local_rank_0_first(), warnings.catch_warnings(record=True) as found, progress as show:
        warnings.simplefilter("always")
        data = find_or_build(config.data, config.model.vocab_size, show)
    return data, found if world.is_first else []


def _loader(config: Config, data: Prepared, world: World) -> Loader:
    """Return the loader of the training data. Raises UserError if a phase of the run needs more text than there is."""
    segments = Timeline(config.trainer).segments
    for each in segments:
        with in_phase(config, each):
            data.train.check_length(each.length, each.batch)
            data.validation.check_length(each.length)  # else this would fail only at the end of training
    return Loader(data.train, segments, config.trainer.seed, device=world.device, ahead=READ_AHEAD)


def _other_tokenizer(origin: Path, data: Prepared) -> list[Note]:
    """Return a note if a checkpoint to start from was trained on tokens of another tokenizer than the data has."""
    theirs = origin.parent.parent / data.tokenizer_path.name
    if not theirs.is_file() or theirs.read_bytes() == data.tokenizer_path.read_bytes():
        return []
    why = "its embedding and head belong to another tokenizer than that of the data"
    fix = as_typed("data.tokenizer", str(theirs))
    return [Note("alert", 0, f"run.init_from={origin}: {why}; to keep its tokens, set {fix}")]


def _stragglers(config: Config, engine: Engine, world: World) -> Stragglers:
    alerts, bubble = config.health.alerts, None
    if engine.pipelined is not None:
        bubble = engine.pipelined.clock, idle_share(at_peak_memory(config), engine.plan, engine.degrees)
    return Stragglers(world, alerts.enabled and alerts.straggler is not None, bubble)


def _alerts(config: Config, folder: RunFolder, world: World) -> Alerts:
    """Return the rules about what rank 0 logs, with the history of the lines before a resume."""
    if not (config.health.alerts.enabled and world.is_first):
        return Alerts()
    gpu = torch.cuda.get_device_properties(world.device) if world.device.type == "cuda" else None
    alerts = Alerts(
        training_rules(config.health.alerts, gpu and gpu.total_memory / 2**30, config.precision.scaling),
        config.health.alerts.repeat,
    )
    if not folder.is_new:
        alerts.replay(folder.path / METRICS, folder.path / TENSORS)
    return alerts


def _notes(config: Config, plan: Plan, data: Prepared, world: World, step: int) -> list[Note]:
    """Return what is unusual about a run: its plan, its kernels, its data, settings without effect."""
    notes = [Note("alert", step, note) for note in plan.notes]
    if (found := proof.latest()) is not None:
        kind, subject = ("kernels", "") if found.is_proved else ("alert", "kernels: ")
        notes.append(Note(kind, step, f"{subject}{found.line}"))
    idle = without_effect(config, world.size, step)
    return [*notes, *_left_out(data, step), *(Note("config", step, line) for line in idle)]


def _left_out(data: Prepared, step: int) -> list[Note]:
    """Return notes on what the bins leave out: files, and documents of others; the message has the first of them."""
    notes = []
    documents = [each for each in data.skipped if each.count]
    for found, what in ((data.left_out, "damaged file{s} of the data left out"), (documents, "document{s} left out")):
        if not found:
            continue
        first, count = found[:5], sum(each.count or 1 for each in found)
        more = f" and {len(found) - len(first)} more" if len(found) > len(first) else ""
        message = f"{count:,} {what.format(s='s' * (count > 1))}: {', '.join(map(str, first))}{more}"
        notes.append(Note("data", step, message, {"count": count, "paths": [each.path for each in found[:100]]}))
    return notes
