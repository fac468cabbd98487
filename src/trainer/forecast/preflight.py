"""Checks before a run that the schema cannot express.

`check()` checks values (`check_values`), compares keys that depend on each other and builds the model on the meta
device, so that the precision plan and the model raise their errors before memory is allocated or a file is written.
"""

import os
from functools import partial
from importlib.util import find_spec

import torch

from models import DeepSeek
from precision import Plan, proof
from precision.backends.availability import build_problem
from precision.config import BackendChoice, Granularity, Method, ScalingConfig
from precision.errors import UserError, refuse
from trainer.config import (
    Coefficients,
    Config,
    Device,
    Dispatch,
    GpuChoice,
    Iteration,
    MuonConfig,
    OptimizerName,
    PipelineSchedule,
    Switch,
)
from trainer.config.health import check_power, check_shadow
from trainer.config.recovery import SpikesConfig
from trainer.config.schema import shown
from trainer.config.timeline import Timeline, at_peak_memory, each_shape, last_step
from trainer.config.unused_data_keys import without_effect as data_without_effect
from trainer.forecast.check_optimizer import check_optimizer
from trainer.forecast.check_values import check_batch, check_values, in_phase
from trainer.forecast.gpus import target
from trainer.forecast.memory import is_gathered_in_fp8
from trainer.forecast.stages import check_stages
from trainer.forecast.tensor import check_context, check_tensor
from trainer.parallel.mesh import ONE_PROCESS, Degrees, fits_expert, resolve
from trainer.sinks.notify import check_targets
from trainer.sinks.trackers import check_wandb

_TE_SHARED = "its modules hold whole weights, which ranks share here"
_MUON = MuonConfig(0.95, True, Coefficients.quintic, None, Iteration.bf16, 0.2, False)
_SPIKES = SpikesConfig(False, 128, 64, 6.0)
_MTP_WEIGHTS = 0.0, 0.3
"""As in configs/: other values are a user's."""


def check(config: Config, world_size: int | None = None) -> Plan:
    """Return the resolved plan of a config that can be trained, by `world_size` processes if given. Raises UserError,
    naming key, value and fix, otherwise."""
    check_values(config, ONE_PROCESS if world_size is None else resolve(config.parallel, world_size))
    check_optimizer(config)
    if world_size is not None:
        for segment, shape in each_shape(config):
            with in_phase(config, segment):
                check_fsdp_policy(shape, resolve(config.parallel, world_size))
    check_targets(config.health.alerts.webhook, config.health.alerts.command)
    check_wandb(config.logging.wandb, os.environ.get("WANDB_MODE"))
    check_power(config.health.power, config.trainer.device is not Device.cpu and torch.cuda.is_available())
    _check_gpu(config)
    gpu = target(config).gpu
    if gpu is not None and not config.dry_run and (problem := build_problem()) is not None:
        raise UserError(f"trainer.device={config.trainer.device.value}: {problem}")
    if gpu is not None and config.gpu is GpuChoice.auto and find_spec("triton") is not None:
        if config.dry_run:
            proof.cached_proof(gpu)
        else:
            proof.prove(gpu, say=partial(print, flush=True) if config.logging.console.enabled else None)
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
    check_fp8_all_gather(config, plan, None if world_size is None else resolve(config.parallel, world_size))
    check_shadow(config.health, plan.has_fp8, plan.served_by("transformer_engine"))
    return plan


def _check_gpu(config: Config) -> None:
    if config.gpu is GpuChoice.auto:
        return
    if not config.dry_run:
        why = "a run uses the GPUs that it finds"
        refuse("gpu", config.gpu.value, why, "set gpu=auto, or dry_run=true for a forecast")
    if config.trainer.device is Device.cpu:
        refuse("gpu", config.gpu.value, "trainer.device=cpu uses none", "set gpu=auto, or trainer.device=auto")


def check_fsdp_policy(config: Config, degrees: Degrees) -> None:
    """Raise UserError if the ranks of `degrees` cannot train this config."""
    if degrees.world == 1:
        return
    check_batch(config, degrees)
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


def without_effect(config: Config, world_size: int, done: int = 0) -> list[str]:
    """Return a line for each setting without effect beside the others in a run of `world_size` processes. done: steps
    before it resumes. `check` refuses what would be wrong."""
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
    if p.expert != 1 and not config.model.num_moe_blocks:
        idle("parallel.expert", p.expert, "no block has experts", "set 1, or fewer model.num_dense_layers")
    for key, usual in (("stages", None), ("stages_per_rank", 1)):
        if (value := getattr(p, key)) != usual and p.pipeline == 1:
            idle(f"parallel.{key}", value, "there is one stage", f"set {usual or 'null'}, or parallel.pipeline")
    if p.schedule is not PipelineSchedule.interleaved and p.pipeline == 1:
        idle("parallel.schedule", p.schedule.value, "there is one stage", "set interleaved, or parallel.pipeline")
    if config.optim.qk_clip is not None and config.model.qk_norm:
        why = "model.qk_norm=true bounds logits, and its norm undoes a scaling"
        idle("optim.qk_clip", config.optim.qk_clip, why, "set null")
    off: list[tuple[str, object, object, str]] = []
    if config.optim.muon is not None and config.optim.name is OptimizerName.adamw:
        off.append(("optim.muon", config.optim.muon, _MUON, "optim.name=adamw"))
    if not config.recovery.spikes.enabled:
        off.append(("recovery.spikes", config.recovery.spikes, _SPIKES, "recovery.spikes.enabled=false"))
    for section, given, usual, why in off:
        for key, value in vars(given).items():
            if value != getattr(usual, key):
                idle(
                    f"{section}.{key}",
                    shown(getattr(value, "value", value)),
                    f"{why} does not read it",
                    "change one of them",
                )
    for key in ("every", "shadow_every"):
        if (value := getattr(config.health, key) or 0) > Timeline(config.trainer).steps:
            idle(f"health.{key}", value, f"the run ends before, {last_step(config)}", "set less, or 0")
    scaling, usual = config.precision.scaling, ScalingConfig()
    for key in ("history", "max_jump") if scaling.method is Method.current else ():
        if (value := getattr(scaling, key)) != getattr(usual, key):
            idle(f"precision.scaling.{key}", value, "with method=current scales have no history", "leave it out")
    if not config.model.num_mtp_layers and (weight := config.model.mtp_loss_weight) not in _MTP_WEIGHTS:
        idle("model.mtp_loss_weight", weight, "model.num_mtp_layers=0", "change one of them")
    steps, inject = config.profile.steps, config.debug.inject
    if done and steps is not None and steps[1] <= done:
        idle("profile.steps", steps, f"the run resumes after step {done}", "set later steps, or null")
    if done and inject is not None and inject.step + inject.steps - 1 <= done:
        idle("debug.inject.step", inject.step, f"the run resumes after step {done}", "set a later step, or null")
    never = "recovery.rewind.max=0" if not w.max else "checkpoint.every=0" if not config.checkpoint.every else None
    if never is not None:
        for key, value, usual in (("margin", w.margin, 0), ("lr_factor", w.lr_factor, 1)):
            if value != usual:
                idle(f"recovery.rewind.{key}", value, f"{never}, the run never rewinds", "change one of them")
    return lines


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


def check_fp8_all_gather(config: Config, plan: Plan, degrees: Degrees | None) -> None:
    """Raise UserError if weights cannot be gathered in FP8, though the config says so. degrees: None if not known."""
    if config.parallel.fp8_all_gather is not Switch.true:
        return
    key, fix = "parallel.fp8_all_gather", "set parallel.fp8_all_gather=auto"
    rows = [row for row in plan.gemms.values() if row.recipe.is_fp8]
    if not rows:
        refuse(key, "true", "no weight computes in FP8", f"choose an FP8 recipe, or {fix}")
    if config.precision.scaling.granularity is Granularity.row:
        why = "with precision.scaling.granularity=row scales need the whole weight"
        refuse(key, "true", why, f"choose fp8_delayed or fp8_block, or {fix}")
    if degrees is None or degrees.world == 1:
        return
    if not any(is_gathered_in_fp8(config.parallel.fp8_all_gather, row, degrees) for row in rows):
        why = f"parallel.shard={degrees.shard} cuts no weight into parts that can be quantised by themselves"
        refuse(key, "true", why, f"change parallel.shard, or {fix}")
