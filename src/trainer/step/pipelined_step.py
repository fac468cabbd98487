"""The microbatches of a step through the stages of a pipeline: one forward, one backward (1F1B, arXiv 2104.04473).

Stage i computes p - i microbatches forward, then backward and forward in turn, then the rest backward, by
`torch.distributed.pipelining`. Its ranks idle for p - 1 of m + p - 1 microbatches' times. FSDP's settings are those of
`ShardedMicrobatch`: they are set before each backward pass, and the last one reduces.

Nothing but messages between neighbouring stages happens meanwhile. What all ranks have to know (losses, loads, amaxes,
norms) is one message after the last microbatch, with zeros from stages that have no part in it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from models import DeepSeek, Losses
from models.stage import Stage, attach
from trainer.optim.loss_scale import LossScale
from trainer.step.microbatch import loss_factor
from trainer.step.sharded_microbatch import ShardedMicrobatch
from trainer.step.stage_clock import StageClock


class PipelinedStep:
    """This rank's stage of all microbatches of a step. ranks: of a stage, which share its weights."""

    def __init__(
        self, model: DeepSeek, stage: Stage, sharding: ShardedMicrobatch, ranks: int, loss_scale: LossScale | None
    ):
        self._model, self._stage, self._sharding, self._ranks = model, stage, sharding, ranks
        self._schedule: Schedule1F1B | None = None
        self._made_for: tuple[int, torch.Size] | None = None
        self._part = _Part(model, stage, loss_scale)
        self.clock = StageClock(next(p.device for p in model.parameters() if not p.is_meta))

    def __call__(self, microbatches: Sequence[Tensor]) -> list[Losses]:
        """Forward and backward of microbatches [B, S + 1] int64, of one shape, at least as many as stages.

        Adds the gradients of each one's total / their number over all ranks, times the loss scale if there is one, to
        the parameters' `grad`. Returns the losses of each, detached: this stage's share of them.
        """
        count, shape = len(microbatches), microbatches[0].shape
        if self._schedule is None or self._made_for != (count, shape):
            self._schedule, self._made_for = self._make(count, microbatches[0]), (count, shape)
        self._part.begin(count * self._ranks)
        tokens = torch.cat(list(microbatches))
        first, last = (tokens,) if self._stage.is_first else (), tokens if self._stage.is_last else None
        with self.clock.step():
            self._schedule.step(*first, target=last, tokens=tokens)
        return self._part.losses

    def _make(self, count: int, tokens: Tensor) -> Schedule1F1B:
        B, S = tokens.shape[0], tokens.shape[1] - 1
        dtype = self._model.embed.residual
        # their gradients travel; both ends are given, else torch runs the stage to see
        between = tuple(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            for shape in self._model.carried_shapes(B, S)
        )
        loss = torch.empty(1, device="meta", requires_grad=True)
        stage = _ShardedStage(
            self._part,
            self._stage.index,
            self._stage.count,
            tokens.device,
            input_args=(tokens.to("meta"),) if self._stage.is_first else between,
            output_args=(loss,) if self._stage.is_last else between,
            group=self._stage.group,
        )
        stage.sharding, stage.clock, stage.microbatches = self._sharding, self.clock, count
        return Schedule1F1B(stage, count, loss_fn=lambda loss, target: loss.sum(), scale_grads=False)


class _Part(nn.Module):
    """The stage as torch's schedule calls it. The model is none of its modules: FSDP's settings are not torch's."""

    def __init__(self, model: DeepSeek, stage: Stage, loss_scale: LossScale | None):
        super().__init__()
        self._run, self._stage = model.forward_stage, stage
        self._factor = partial(loss_factor, model, loss_scale=loss_scale)
        self.begin(1)

    def begin(self, count: int) -> None:
        """Before a step of so many microbatches, of all ranks."""
        self._count = count
        self.losses: list[Losses] = []

    def forward(self, *inputs: Tensor, tokens: Tensor) -> Tensor | tuple[Tensor, ...]:
        carried = () if self._stage.is_first else inputs
        factor = self._factor(self._count)
        made, losses = self._run(tokens, *carried)
        self.losses.append(losses.detached(losses.total))
        loss = losses.total / self._count if factor is None else losses.total * factor
        if self._stage.is_last:
            return loss.reshape(1)
        return attach(made[0], loss), *(x.view_as(x) for x in (*made[1:], *carried[1:]))


class _ShardedStage(PipelineStage):
    sharding: ShardedMicrobatch
    clock: StageClock
    microbatches: int

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.computes():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.clock.computes():
            self.sharding.before(bwd_chunk_id, self.microbatches)
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            self.sharding.after(bwd_chunk_id, self.microbatches, self.device)
