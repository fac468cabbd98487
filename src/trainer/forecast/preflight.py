"""Checks before a run that the schema cannot express.

`check()` compares keys that depend on each other and builds the model on the meta device, so that the precision plan
and the model raise their errors before memory is allocated or a file is written.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import torch

from models import DeepSeek
from precision import Plan, proof
from precision.backends.availability import build_problem
from precision.config import BackendChoice, Granularity
from precision.errors import UserError, refuse
from trainer.config import Config, Device, Dispatch, GpuChoice, PipelineSchedule, RunConfig, Switch
from trainer.config.data import check_data
from trainer.config.health import check_alerts, check_power, check_shadow
from trainer.config.recovery import RecoveryConfig
from trainer.config.timeline import Segment, Timeline, at_peak_memory, each_shape, last_step
from trainer.config.unused_data_keys import without_effect as data_without_effect
from trainer.forecast.check_optimizer import check_optimizer
from trainer.forecast.gpus import target
from trainer.forecast.memory import is_gathered_in_fp8
from trainer.forecast.schedule import check_phases
from trainer.forecast.stages import check_stages
from trainer.forecast.tensor import check_context, check_tensor
from trainer.parallel.mesh import Degrees, fits_expert, resolve
from trainer.sinks.notify import check_targets
from trainer.sinks.trackers import check_wandb

_TE_SHARED = "its modules hold whole weights, which ranks share here"


def check(config: Config, world_size: int | None = None) -> Plan:
    """Return the resolved plan of a config that can be trained, by `world_size` processes if given. Raises UserError,
    naming key, value and fix, otherwise."""
    _check_run(config.run)
    check_sizes(config)
    check_phases(config)
    check_optimizer(config)
    for segment, shape in each_shape(config):
        with in_phase(config, segment):
            check_sizes(shape)
            _check_batch(shape)
            if world_size is not None:
                check_fsdp_policy(shape, resolve(config.parallel, world_size))
    _check_recovery(config.recovery)
    _check_debug(config)
    _check_profile(config)
    check_data(config.data, config.model.vocab_size)
    check_alerts(config.health.alerts)
    check_targets(config.health.alerts.webhook, config.health.alerts.command)
    check_wandb(config.logging.wandb, os.environ.get("WANDB_MODE"))
    check_power(config.health.power, config.trainer.device is not Device.cpu and torch.cuda.is_available())
    config.model.validate()
    _check_gpu(config)
    gpu = target(config).gpu
    if gpu is not None and not config.dry_run and (problem := build_problem()) is not None:
        raise UserError(f"trainer.device={config.trainer.device.value}: {problem}")
    if gpu is not None and config.gpu is GpuChoice.auto and find_spec("triton") is not None:
        (proof.cached_proof if config.dry_run else proof.prove)(gpu)
    sharing = max(config.parallel.context, 1) * max(config.parallel.tensor, 1)
    widest_trainer = at_peak_memory(config).trainer
    tokens = widest_trainer.microbatch_size * widest_trainer.sequence_length // sharing
    plan = Plan(config.precision, config.model.num_layers, gpu, tokens)
    with torch.device("meta"):
        DeepSeek(config.model, plan)
    if gpu is not None and plan.served_by("transformer_engine") and (world_size or 1) > 1:
        why = f"on {gpu.name} it takes Transformer Engine, and {_TE_SHARED}"
        refuse("precision.backend", "auto", why, "start one process, or set precision.backend=reference (slow)")
    if config.compile.enabled is Switch.true and plan.served_by("transformer_engine"):
        why = "Transformer Engine's modules break the graph of a block, which is compiled as a whole"
        refuse("compile.enabled", "true", why, "set compile.enabled=auto, or precision.backend=cuda")
    _check_cuda_graph(config, plan)
    _check_fp8_all_gather(config, plan, world_size)
    has_fp8 = any(row.recipe.is_fp8 for row in plan.gemms.values())
    check_shadow(config.health, has_fp8, plan.served_by("transformer_engine"))
    return plan


@contextmanager
def in_phase(config: Config, segment: Segment) -> Iterator[None]:
    """Name the phase in errors about a shape that it brings."""
    try:
        yield
    except UserError as error:
        if not config.trainer.phases:
            raise
        raise UserError(f"trainer.phases, from step {segment.first} on: {error}") from None


def _check_gpu(config: Config) -> None:
    if config.gpu is GpuChoice.auto:
        return
    if not config.dry_run:
        why = "a run uses the GPUs that it finds"
        refuse("gpu", config.gpu.value, why, "set gpu=auto, or dry_run=true for a forecast")
    if config.trainer.device is Device.cpu:
        refuse("gpu", config.gpu.value, "trainer.device=cpu uses none", "set gpu=auto, or trainer.device=auto")


def _check_run(run: RunConfig) -> None:
    for key, path, fix in (("dir", run.dir, "set a folder, or leave it out"), ("init_from", run.init_from, "set null")):
        if path == "":  # an unset shell variable; Path reads it as the current folder
            refuse(f"run.{key}", "''", "no folder", fix)
    if run.dir.partition("/")[0] == "~":
        refuse("run.dir", run.dir, "~ is not expanded after =", "write $HOME")


def check_sizes(config: Config) -> None:
    """Raise UserError for impossible numbers, and for sequences that the model cannot take."""
    t, o, m = config.trainer, config.optim, config.model
    for key, value in {
        "trainer.max_steps": 1 if t.max_steps is None else t.max_steps,
        "trainer.global_batch_size": t.global_batch_size,
        "trainer.microbatch_size": t.microbatch_size,
        "trainer.sequence_length": t.sequence_length,
    }.items():
        if value < 1:
            refuse(key, value, "out of range", "set 1 or more")
    for key, value in {
        "trainer.seed": t.seed,
        "eval.sample": config.eval.sample,
        "checkpoint.keep": config.checkpoint.keep,
        "optim.weight_decay": o.weight_decay,
    }.items():
        if not 0 <= value < math.inf:
            refuse(key, value, "out of range", "set 0 or more")
    if config.logging.every == 0:
        refuse("logging.every", 0, "out of range", "set 1 or more")
    for key, value in {"optim.lr": o.lr, "optim.eps": o.eps}.items():
        if not 0 < value < math.inf:
            refuse(key, value, "out of range", "set a number above 0")
    if not 1 <= config.parallel.dispatch_capacity < math.inf:
        why = "it is a multiple of the tokens of even routing"
        refuse("parallel.dispatch_capacity", config.parallel.dispatch_capacity, why, "set 1.25, or 1 or more")
    if not 1 <= config.parallel.timeout < math.inf:
        refuse("parallel.timeout", config.parallel.timeout, "out of range", "set seconds, 1 or more")
    if o.clip is not None and not 0 < o.clip < math.inf:
        refuse("optim.clip", o.clip, "out of range", "set a number above 0, or null not to clip")
    for key, value in {"optim.decay_fraction": o.decay_fraction, "optim.min_lr_ratio": o.min_lr_ratio}.items():
        if not 0 <= value <= 1:
            refuse(key, value, "it is a share", "set 0 to 1")
    if len(o.betas) != 2 or not all(0 <= beta < 1 for beta in o.betas):
        refuse("optim.betas", o.betas, "AdamW has two, from 0 to below 1", "set [0.9, 0.95]")
    for key, value in {"eval.batches": config.eval.batches, "eval.at_end": config.eval.at_end}.items():
        if value is not None and value < 1:
            refuse(key, value, "out of range", "set 1 or more, or null for every window")
    if t.sequence_length > m.max_position_embeddings:
        why = f"the model is meant for at most model.max_position_embeddings={m.max_position_embeddings}"
        refuse("trainer.sequence_length", t.sequence_length, why, f"set at most {m.max_position_embeddings}")
    if t.sequence_length <= m.num_mtp_layers:
        why = f"model.num_mtp_layers={m.num_mtp_layers} predicts that many tokens further"
        refuse("trainer.sequence_length", t.sequence_length, why, f"set more than {m.num_mtp_layers}")


def _check_batch(config: Config) -> None:
    t = config.trainer
    if t.global_batch_size % t.microbatch_size:
        most = min(t.microbatch_size, t.global_batch_size)
        below = next(n for n in range(most, 0, -1) if t.global_batch_size % n == 0)
        why = f"it does not divide trainer.global_batch_size={t.global_batch_size}"
        refuse("trainer.microbatch_size", t.microbatch_size, why, f"set {below}, or another divisor")


def with_fitting_microbatch(config: Config, degrees: Degrees) -> Config:
    """Return the config with a microbatch no larger than a rank's share of the batch. Evaluations then take more
    microbatches for the same windows."""
    t, e = config.trainer, config.eval
    share, rest = divmod(t.global_batch_size, degrees.data)
    if rest or t.microbatch_size <= share or share < 1:  # check_sizes refuses a batch of none
        return config
    batches = None if e.batches is None else -(-e.batches * t.microbatch_size // share)
    return replace(config, trainer=replace(t, microbatch_size=share), eval=replace(e, batches=batches))


def cut_line(given: Config, config: Config) -> str | None:
    """What `with_fitting_microbatch` has changed, for the user."""
    was, now = given.trainer.microbatch_size, config.trainer.microbatch_size
    return (
        None
        if was == now
        else f"trainer.microbatch_size={was}: a rank's share of the batch is {now}; it computes {now} at a time"
    )


def check_fsdp_policy(config: Config, degrees: Degrees) -> None:
    """Raise UserError if the ranks of `degrees` cannot train this config."""
    if degrees.world == 1:
        return
    t = config.trainer
    together = degrees.data if t.global_batch_size % degrees.data else t.microbatch_size * degrees.data
    if t.global_batch_size % together:
        doing = "" if together == degrees.data else f" with trainer.microbatch_size={t.microbatch_size}"
        axes = [f"parallel.{a}={n}" for a, n in (("context", degrees.context), ("tensor", degrees.tensor)) if n > 1]
        who = f"groups of {' * '.join(axes)} ranks" if axes else "ranks"
        why = f"{degrees.data} {who}{doing} compute a multiple of {together} sequences"
        refuse("trainer.global_batch_size", t.global_batch_size, why, f"set a multiple of {together}")
    check_context(config, degrees)
    check_tensor(config, degrees)
    check_stages(config, degrees)
    if config.cuda_graph is Switch.true:
        refuse("cuda_graph", "true", "the ranks' messages are not part of a graph", "set cuda_graph=false")
    if config.precision.backend is BackendChoice.transformer_engine:
        refuse("precision.backend", "transformer_engine", _TE_SHARED, "set precision.backend=auto")
    if config.model.num_experts % degrees.expert:
        smaller = (
            n for n in range(degrees.expert, 0, -1) if fits_expert(n, degrees.cut * degrees.tensor, degrees.stage)
        )
        fits = next(n for n in smaller if not config.model.num_experts % n)
        why = f"it does not divide model.num_experts={config.model.num_experts}"
        refuse("parallel.expert", degrees.expert, why, f"set {fits}, or another divisor")


def _check_debug(config: Config) -> None:
    inject = config.debug.inject
    if inject is None:
        return
    last = Timeline(config.trainer).steps
    if not 1 <= inject.step <= last:
        fix = f"set 1 to {last_step(config)}"
        refuse("debug.inject.step", inject.step, "there is no such step", fix)
    if abs(inject.value) <= 1:
        why = "it would do nothing"
        refuse("debug.inject.value", inject.value, why, "set nan or inf, or a number above 1 for a spike")
    if inject.steps < 1:
        refuse("debug.inject.steps", inject.steps, "out of range", "set 1 or more")
    if inject.windows is not None and (len(inject.windows) != 2 or not 0 <= inject.windows[0] < inject.windows[1]):
        refuse("debug.inject.windows", inject.windows, "no such range", "set [BEGIN, END], END not included, or null")


def _check_recovery(r: RecoveryConfig) -> None:
    s, w = r.spikes, r.rewind
    for key, value in {
        "max_consecutive_skips": r.max_consecutive_skips,
        "rewind.max": w.max,
        "rewind.margin": w.margin,
    }.items():
        if value < 0:
            refuse(f"recovery.{key}", value, "out of range", "set 0 or more")
    if s.window < 2:
        refuse(
            "recovery.spikes.window", s.window, "too few steps to estimate the usual spread", "set 128, or 2 at least"
        )
    if not 2 <= s.min_steps <= s.window:
        why = f"it is a part of recovery.spikes.window={s.window}"
        refuse("recovery.spikes.min_steps", s.min_steps, why, f"set 2 to {s.window}")
    if not 0 < s.threshold < math.inf:
        refuse("recovery.spikes.threshold", s.threshold, "out of range", "set a number above 0, such as 6")
    if not 0 < w.lr_factor <= 1:
        why = "a rewind may lower the learning rate, not raise it"
        refuse("recovery.rewind.lr_factor", w.lr_factor, why, "set a number above 0 and at most 1")
    if w.lr_steps < (0 if w.lr_factor == 1 else 1):
        refuse("recovery.rewind.lr_steps", w.lr_steps, "the learning rate is lowered for no step", "set 1 or more")


def without_effect(config: Config, world_size: int) -> list[str]:
    """Return a line for each setting without effect beside the others in a run of `world_size` processes. `check`
    refuses what would be wrong."""
    lines, p, w = data_without_effect(config.data), config.parallel, config.recovery.rewind

    def idle(key: str, value: object, why: str, fix: str) -> None:
        lines.append(f"{key}={value} has no effect: {why}; {fix}")

    if world_size == 1:
        for key in ("reduce_each_microbatch", "fp8_all_gather", "reshard_after_forward"):
            if (choice := getattr(p, key)) is not Switch.auto:
                idle(f"parallel.{key}", choice.value, "one process shares nothing", "set auto, or start more")
    if p.dispatch not in (Dispatch.auto, Dispatch.all_to_all) and p.expert == 1:
        why = "all experts are in one process"
        idle("parallel.dispatch", p.dispatch.value, why, "set auto, or parallel.expert to 2 or more")
    for key, usual in (("stages", None), ("stages_per_rank", 1)):
        if (value := getattr(p, key)) != usual and p.pipeline == 1:
            idle(f"parallel.{key}", value, "there is one stage", f"set {usual or 'null'}, or parallel.pipeline")
    if p.schedule is not PipelineSchedule.interleaved and p.pipeline == 1:
        idle("parallel.schedule", p.schedule.value, "there is one stage", "set interleaved, or parallel.pipeline")
    if config.optim.qk_clip is not None and config.model.qk_norm:
        why = "model.qk_norm=true bounds logits, and its norm undoes a scaling"
        idle("optim.qk_clip", config.optim.qk_clip, why, "set null")
    if config.health.shadow_every > Timeline(config.trainer).steps:
        why = f"the run ends before, {last_step(config)}"
        idle("health.shadow_every", config.health.shadow_every, why, "set less, or 0")
    never = "recovery.rewind.max=0" if not w.max else "checkpoint.every=0" if not config.checkpoint.every else None
    if never is not None:
        for key, value, usual in (("margin", w.margin, 0), ("lr_factor", w.lr_factor, 1)):
            if value != usual:
                idle(f"recovery.rewind.{key}", value, f"{never}, the run never rewinds", "change one of them")
    return lines


def _check_profile(config: Config) -> None:
    steps, last = config.profile.steps, Timeline(config.trainer).steps
    if steps is None:
        return
    if len(steps) != 2:
        refuse("profile.steps", steps, "a window has a first and a last step", "set [10, 12], or null")
    if not 1 <= steps[0] <= steps[1] <= last:
        why = "no such window of steps"
        refuse("profile.steps", steps, why, f"set [FIRST, LAST], from 1 to {last_step(config)}")


def _check_cuda_graph(config: Config, plan: Plan) -> None:
    if config.cuda_graph is not Switch.true:
        return
    if config.trainer.device is Device.cpu:
        refuse("cuda_graph", "true", "trainer.device=cpu has no CUDA graphs", "set cuda_graph=false")
    if config.debug.inject is not None:
        why = "debug.inject puts a fault into one step, and a graph is the same in all"
        refuse("cuda_graph", "true", why, "set cuda_graph=false")
    if plan.served_by("transformer_engine"):
        why = "Transformer Engine's modules do work on the host that a graph would leave out"
        refuse("cuda_graph", "true", why, "set cuda_graph=false, or precision.backend=cuda")


def _check_fp8_all_gather(config: Config, plan: Plan, world_size: int | None) -> None:
    if config.parallel.fp8_all_gather is not Switch.true:
        return
    key, fix = "parallel.fp8_all_gather", "set parallel.fp8_all_gather=auto"
    rows = [row for row in plan.gemms.values() if row.recipe.is_fp8]
    if not rows:
        refuse(key, "true", "no weight computes in FP8", f"choose an FP8 recipe, or {fix}")
    if config.precision.scaling.granularity is Granularity.row:
        why = "with precision.scaling.granularity=row scales need the whole weight"
        refuse(key, "true", why, f"choose fp8_delayed or fp8_block, or {fix}")
    if world_size is not None:
        degrees = resolve(config.parallel, world_size)
        if degrees.world > 1 and not any(
            is_gathered_in_fp8(config.parallel.fp8_all_gather, row, degrees) for row in rows
        ):
            why = f"parallel.shard={degrees.shard} cuts no weight into parts that can be quantised by themselves"
            refuse(key, "true", why, f"change parallel.shard, or {fix}")
