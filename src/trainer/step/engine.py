"""The engine: the state that a training step works on, built from a config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models import DeepSeek
from precision import Plan, ScalingArena, bind, gemm_layers
from precision.errors import UserError
from precision.hardware import detect, knows_fp8
from trainer.config import Config, Switch
from trainer.config.timeline import LossWeights, Timeline, at_peak_memory
from trainer.forecast.memory import is_gathered_in_fp8, keeps_transposed, pick_fsdp_policy, records_graphs, total_memory
from trainer.forecast.preflight import check_fsdp_policy
from trainer.forecast.stages import pipeline_of
from trainer.launch.device import tune_host
from trainer.launch.world import World
from trainer.optim.adamw import Optimizer
from trainer.optim.build_optimizer import build_optimizer
from trainer.optim.loss_scale import LossScale
from trainer.optim.qk_clip import QKClip, check_qk_clip
from trainer.parallel.blocks import parallelize
from trainer.parallel.mesh import Degrees, build_mesh, resolve
from trainer.parallel.shard_views import model_state, shard_views
from trainer.step.guard import StepGuard
from trainer.step.injection import Injector
from trainer.step.microbatch import EagerMicrobatch, GraphedMicrobatch, Microbatch
from trainer.step.step_snapshot import SnapshotKeeper

if TYPE_CHECKING:
    from trainer.step.pipelined_step import PipelinedStep


@dataclass
class Engine:
    """The state of a training run: model, optimizer, arena and guard."""

    device: torch.device
    world: World
    plan: Plan
    model: DeepSeek
    arena: ScalingArena
    optimizer: Optimizer
    guard: StepGuard
    snapshot: SnapshotKeeper
    injector: Injector | None
    microbatch: Microbatch
    degrees: Degrees
    pipelined: "PipelinedStep | None" = None
    """Runs all microbatches of a step if the blocks are divided into stages."""
    loss_scale: LossScale | None = None
    """Set if the plan contains FP16."""
    qk_clip: QKClip | None = None
    """Clips attention logits after the optimizer's update."""

    def enter(self, weights: LossWeights, changed: bool) -> None:
        """Prepare for a step with these loss weights. changed: they, or the shape, differ from the step before."""
        config = self.model.config
        self.model.mtp_loss_weight = config.mtp_loss_weight if weights.mtp is None else weights.mtp
        rate = weights.router_bias_rate
        self.model.router_bias_update_rate = config.router_bias_update_rate if rate is None else rate
        if changed:
            self.microbatch.forget()

    def adapt(self, timeline: Timeline, step: int) -> None:
        """Adapt what past steps predict to a phase that begins with this step: spike statistics, and scales of
        gradients. A function of the step's number: a resume, a rewind and a replay do the same."""
        if timeline.may_rise(step):
            self.guard.forget_usual()
        if (times := timeline.shrinks(step)) > 1:  # the mean has fewer tokens, and each weighs more
            self.arena.raise_gradients(times)

    @property
    def data_share(self) -> tuple[int, int]:
        """(index, number) of this rank's part of each batch. Ranks that share sequences have the same part."""
        return self.world.rank % self.degrees.stage // self.degrees.sequence, self.degrees.data

    def share_of(self, batch: Tensor) -> Tensor:
        """Return this rank's sequences of a whole batch [B, ...] that every rank has read."""
        part, parts = self.data_share
        return batch.chunk(parts)[part]

    def state(self) -> dict:
        """Return everything that a step changes, nested: tensors, `ShardView`s and JSON values."""
        own = {**self.restorable_tensors(), "arena": self.arena.state_dict(), "guard": self.guard.state_dict()}
        if self.loss_scale is not None:
            own["loss_scale"] = self.loss_scale.state_dict()
        if self.model.slots is not None:
            own["slots"] = self.model.slots.state_dict()
        return own

    def restorable_tensors(self) -> dict:
        """Return weights and moments, into which a checkpoint is read. The tensors are the step's own memory."""
        weights = model_state(self.model) if self.world.is_distributed else self.model.state_dict()
        return shard_views({"model": weights, "optimizer": self.optimizer.state_dict()})

    def load_state(self, state: dict) -> list[str]:
        """Load the rest of a saved state. Return the arena rows that start without a history."""
        self.guard.load_state_dict(state["guard"])
        if self.loss_scale is not None and "loss_scale" in state:  # missing if saved without FP16
            self.loss_scale.load_state_dict(state["loss_scale"])
        if self.model.slots is not None and "slots" in state:  # missing if tokens travelled by all-to-all
            self.model.slots.load_state_dict(state["slots"])
        for layer in gemm_layers(self.model):
            layer.forget_ahead()
        return self.arena.load_state_dict(state["arena"])


def build_engine(
    config: Config, device: torch.device, saved: Mapping[str, Any] | None = None, world: World | None = None
) -> Engine:
    """Build model, arena, optimizer and guard of a config on a device, at step 0. saved: as for `build_model`. world:
    the ranks of the job; with several this is a collective."""
    if config.cuda_graph is Switch.true and device.type != "cuda":
        raise UserError("cuda_graph=true: torch sees no GPU; set cuda_graph=false")
    world = world or World(device)
    degrees, whole, config = resolve(config.parallel, world.size), config, at_peak_memory(config)
    check_fsdp_policy(config, degrees)
    torch.manual_seed(config.trainer.seed)
    total = total_memory(device)
    if world.is_distributed and total is not None:
        total = min(world.gather(total))  # all ranks must decide alike
    plan, model = build_model(config, device, saved, degrees, total)
    injector = Injector(config.debug.inject, model) if config.debug.inject is not None else None
    arena = bind(model, plan, device)
    optimizer = build_optimizer(whole, plan, model, device, world, degrees)
    qk_clip = None
    if config.optim.qk_clip is not None and not config.model.qk_norm:
        check_qk_clip(config, model, device)
        qk_clip = QKClip(model, config.optim.qk_clip, arena.max_logits)
    zero_bubble = model.pipeline is not None and model.pipeline.zero_bubble
    compiled = is_compiled(config, plan, device) and not zero_bubble
    sizes = {(each.microbatch, each.length) for each in Timeline(whole.trainer).segments}
    parallelize(model, config.recompute, compiled, shapes=len(sizes))
    if compiled and plan.served_by("cuda") and world.local_rank == 0:  # the ranks of a node share Triton's cache
        from precision.kernels.ahead import compile_ahead  # Triton, which other machines may not have

        compile_ahead()
    spoil = injector.loss if injector is not None else None
    loss_scale = LossScale(config.precision.loss_scale, device) if plan.is_fp16 else None
    microbatch: Microbatch = EagerMicrobatch(model, spoil, loss_scale)
    pipelined = None
    if records_graphs(config, plan, degrees, total):
        microbatch = GraphedMicrobatch(model, config.cuda_graph is Switch.true, loss_scale)
    if world.is_distributed:
        from trainer.step.sharded_microbatch import ShardedMicrobatch

        policy = pick_fsdp_policy(config, plan, degrees, total)
        microbatch = ShardedMicrobatch(model, microbatch, world.size, policy)
        if model.pipeline is not None:
            from trainer.step.pipelined_step import PipelinedStep

            pipelined = PipelinedStep(model, model.pipeline, microbatch, degrees.stage, loss_scale)
    tune_host(device)
    return Engine(
        device=device,
        world=world,
        plan=plan,
        model=model,
        arena=arena,
        optimizer=optimizer,
        guard=StepGuard(arena, optimizer.names, config.recovery),
        snapshot=SnapshotKeeper(arena),
        injector=injector,
        microbatch=microbatch,
        degrees=degrees,
        pipelined=pipelined,
        loss_scale=loss_scale,
        qk_clip=qk_clip,
    )


def is_compiled(config: Config, plan: Plan, device: torch.device) -> bool:
    """Return whether blocks are compiled, if they are not those of zero-bubble stages."""
    if config.compile.enabled is not Switch.auto:
        return config.compile.enabled is Switch.true
    formats = [row.recipe.input for row in plan.gemms.values()] + [row.format for row in plan.tensors.values()]
    refused = any(fmt.is_fp8 for fmt in formats) and not knows_fp8(device)
    return device.type == "cuda" and not refused and not plan.served_by("transformer_engine")


def build_model(
    config: Config,
    device: torch.device,
    saved: Mapping[str, Any] | None = None,
    degrees: Degrees | None = None,
    total: float | None = None,
) -> tuple[Plan, DeepSeek]:
    """Return the resolved plan and the model on `device`, with weights drawn from the seed.

    saved: `Plan.backends()` from the start of a run that resumes, to choose the same backends. degrees: of the ranks
    that share the weights. total: memory of the smallest of their GPUs, bytes.
    """
    degrees, config = degrees or Degrees(), at_peak_memory(config)
    tokens = config.trainer.microbatch_size * config.trainer.sequence_length // degrees.sequence
    plan = Plan(config.precision, config.model.num_layers, detect(device), tokens, saved)
    with torch.device("meta"):
        model = DeepSeek(config.model, plan)
    keeps = True
    if degrees.world > 1:
        from trainer.parallel.dispatch import build_dispatch
        from trainer.parallel.fsdp import materialise

        fp8 = any(is_gathered_in_fp8(config.parallel.fp8_all_gather, row, degrees) for row in plan.gemms.values())
        keeps = pick_fsdp_policy(config, plan, degrees, total).keep_gathered
        mesh = build_mesh(degrees, device.type)
        if mesh.pipeline is not None:
            model.pipeline = pipeline_of(config, plan, mesh.pipeline.get_group())
        by = build_dispatch(config.parallel, mesh, device)
        materialise(model, mesh, device, config.trainer.seed, keeps, fp8, by)
    else:
        model.to_empty(device=device)
        model.init_weights(config.trainer.seed)
    for _, block in model.iter_blocks():
        for layer in gemm_layers(block):
            layer.keeps_transposed = keeps_transposed(config, degrees, keeps or not layer.is_sharded)
    return plan, model
