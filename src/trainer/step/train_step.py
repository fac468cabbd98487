"""One training step: forward, backward, verdict, commit or skip."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models import Losses
from precision import begin_step
from trainer.parallel.collectives import all_max, all_mean, all_sum
from trainer.step.engine import Engine
from trainer.step.guard import Verdict, total_norm
from trainer.step.metrics import load_metrics

LOSSES = ("total", "lm", "mtp", "balance")


@dataclass
class StepResult:
    """Outcome of one step, on the device: the verdict, metrics as 0-d tensors by key, and load, the tokens of each
    expert [blocks with experts, E]."""

    verdict: Verdict
    metrics: dict[str, Tensor]
    load: Tensor


def train_step(e: Engine, step: int, tokens: Tensor, microbatch_size: int) -> StepResult:
    """Run step number `step` on this rank's tokens [B / data ranks, S+1] (`Engine.data_share`). It commits all its
    changes, or none. No host synchronisation."""
    begin_step(e.model, e.arena)
    slots = e.model.slots
    fill = None if slots is None else slots.fill.zero_()
    tokens = tokens.to(e.device)
    microbatches = tokens.split(microbatch_size)
    if (targets := e.model.mtp_targets(tokens)) is not None:
        # ranks that count the same sequences; a tensor group has the same targets and losses, too
        copies = e.degrees.context * e.degrees.pipeline
        everyones = all_sum([targets], e.world)[0] // copies
        e.model.expect(everyones, len(microbatches) * e.world.size // e.degrees.pipeline)
    seen: list[Losses] = [] if e.pipelined is None else e.pipelined(microbatches)
    e.snapshot.begin(len(microbatches))
    for i, microbatch in enumerate(microbatches):
        if e.injector is not None:
            e.injector.before(step, i)
        if e.pipelined is None:
            seen.append(e.microbatch(microbatch, i, len(microbatches)))
        e.snapshot.note(i, seen[i].total)

    means = torch.stack([torch.stack([getattr(s, key) for s in seen]).mean() for key in LOSSES])
    load = torch.stack([losses.load for losses in seen]).sum(0)
    means, load = all_mean(means, e.world, e.degrees.pipeline), all_sum([load], e.world)[0]
    all_max([e.arena.amax, e.arena.max_logits, *([] if fill is None else [fill])], e.world)
    if e.loss_scale is not None:
        e.optimizer.unscale(e.loss_scale.scale)
    norms = e.optimizer.grad_norms()
    norm = total_norm(norms)
    verdict = e.guard.judge(step, means, norms, e.loss_scale, fill, slots is not None and slots.observing > 0)
    e.snapshot.keep(verdict.ok, e.guard.committed)
    e.arena.commit(verdict.ok)
    lr = e.optimizer.step(verdict.ok, e.guard.committed, norm, step - 1)
    clipped = None if e.qk_clip is None else e.qk_clip.apply(verdict.ok)
    e.model.update_router_bias(load, verdict.ok)
    e.guard.count(verdict)
    e.optimizer.zero_grad()

    metrics = {f"loss/{key}": mean for key, mean in zip(LOSSES, means, strict=True)}
    metrics |= {"optim/grad_norm": norm, "optim/lr": lr, **load_metrics(load)}
    if verdict.fill is not None:
        metrics["moe/slot_fill"] = verdict.fill
    if clipped is not None:
        metrics["optim/qk_clipped_heads"] = clipped
    if e.loss_scale is not None and verdict.loss_scale is not None:
        e.loss_scale.update(verdict.finite)
        metrics["optim/loss_scale"] = verdict.loss_scale
    return StepResult(verdict, metrics, load)
