"""The microbatches of a step through the stages of a pipeline: one forward, one backward (1F1B, arXiv 2104.04473).

Rank i of p computes p - i microbatches forward, then backward and forward in turn, then the rest backward, by
`torch.distributed.pipelining`. It idles for p - 1 of m + p - 1 microbatches' times. With v stages a rank (interleaved)
a round of p microbatches goes through its first stage, then through its second one, and so on; it idles for p - 1 of v
m + p - 1 stages' times.

With two stages a rank in a V (zero bubble, arXiv 2401.10241) a backward pass has two halves: gradients of inputs, for
which the stage before waits, and gradients of weights, which fill the time in which the rank would wait
(`precision.deferred`). FSDP's hooks run in the first half, so gradients are reduced by hand after a stage's last second
half.

FSDP's settings are those of `ShardedMicrobatch`, set before each backward pass; the last backward pass of a stage
reduces.

Meanwhile only neighbouring stages exchange messages. Losses, loads, amaxes and norms are reduced over all ranks in one
message after the last microbatch, with zeros from stages that do not have them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from models import DeepSeek, Losses
from models.stage import Pipeline, Stage, attach
from precision.deferred import WeightGradientQueue
from precision.linear import gemm_layers
from trainer.optim.loss_scale import LossScale
from trainer.step.microbatch import loss_factor
from trainer.step.sharded_microbatch import ShardedMicrobatch, shared_modules
from trainer.step.stage_clock import StageClock

Schedule = Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble


class PipelinedStep:
    """Runs this rank's stages for all microbatches of a step. ranks: number that share the stages and their weights."""

    def __init__(
        self, model: DeepSeek, pipeline: Pipeline, sharding: ShardedMicrobatch, ranks: int, loss_scale: LossScale | None
    ):
        self._model, self._pipeline, self._sharding, self._ranks = model, pipeline, sharding, ranks
        self._schedule: Schedule | None = None
        self._made_for: tuple[int, torch.Size] | None = None
        self._parts = [_Part(model, stage, loss_scale, pipeline.zero_bubble) for stage in pipeline.stages]
        self._shared = {stage: shared_modules(*model.blocks_of(stage)) for stage in pipeline.stages}
        self._device = next(p.device for p in model.parameters() if not p.is_meta)
        self._left = 0  # remaining backward passes of the step, or their second halves
        self.clock = StageClock(self._device)

    def __call__(self, microbatches: Sequence[Tensor]) -> list[Losses]:
        """Run forward and backward of microbatches [B, S + 1] int64, of one shape, at least as many as ranks.

        Adds the gradients of each one's total / their number over all ranks, times the loss scale if there is one, to
        the parameters' `grad`. Returns the losses of each, detached: these stages' share of them.
        """
        count, shape = len(microbatches), microbatches[0].shape
        if self._schedule is None or self._made_for != (count, shape):
            self._schedule, self._made_for = self._make(count, microbatches[0]), (count, shape)
        for part in self._parts:
            part.begin(count * self._ranks)
        self._left = count * len(self._parts)
        self._sharding.begin()
        self._sharding.before_backward(self._sharding.shared, reduces=False, frees=False)
        tokens = torch.cat(list(microbatches))
        first, last = self._pipeline.has_first, self._pipeline.has_last
        with self.clock.step():
            self._schedule.step(*((tokens,) if first else ()), target=tokens if last else None, tokens=tokens)
        of_each = zip(*(part.losses for part in self._parts), strict=True)
        return [Losses(*(reduce(torch.add, each) for each in zip(*losses, strict=True))) for losses in of_each]

    @contextmanager
    def backward(self, stage: Stage, last: bool) -> Iterator[None]:
        """Set up FSDP for a stage's backward pass inside. last: it is for the step's last microbatch."""
        sharding = self._sharding
        if self._pipeline.zero_bubble:
            # gradients of the last microbatch are not complete: weights stay until they are reduced
            sharding.before_backward(self._shared[stage], reduces=False, frees=False, holds=last)
            yield
            sharding.after_backward(False, self._device)
            return
        self._left -= 1
        ends = self._left == 0
        sharding.before_backward(self._shared[stage], reduces=last, frees=last, ends=ends)
        # some stages use embedding, final norm and head, but FSDP gathers them for all
        reduces = last and (stage.is_first or stage.is_last)
        sharding.before_backward(sharding.shared[:1], reduces=reduces, frees=ends, ends=ends)
        yield
        sharding.after_backward(ends, self._device)

    @contextmanager
    def weight_gradients(self, stage: Stage, last: bool) -> Iterator[None]:
        """Set up FSDP for the second half of a stage's backward pass inside, and reduce after the last one."""
        self._left -= 1
        sharding, ends = self._sharding, self._left == 0
        if last:
            modules = [*self._shared[stage], *(sharding.shared[:1] if ends else ())]
            sharding.before_backward(modules, reduces=True, frees=True, ends=ends, holds=True)
        yield
        if last:
            sharding.reduce(self._shared[stage], ends)
        sharding.after_backward(ends, self._device)

    def _make(self, count: int, tokens: Tensor) -> Schedule:
        B, S = tokens.shape[0], tokens.shape[1] - 1
        dtype = self._model.embed.residual
        # they carry gradients; both shapes are given, else torch runs the stage to infer them
        between = tuple(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            for shape in self._model.carried_shapes(B, S)
        )
        loss = torch.empty(1, device="meta", requires_grad=True)
        stages = []
        for part in self._parts:
            stage = _ShardedStage(
                part,
                part.stage.index,
                part.stage.count,
                tokens.device,
                input_args=(tokens.to("meta"),) if part.stage.is_first else between,
                output_args=(loss,) if part.stage.is_last else between,
                group=self._pipeline.group,
                dw_builder=None if part.weights is None else part.weights.take,
            )
            stage.around, stage.part, stage.microbatches = self, part, count
            stages.append(stage)

        def total(loss: Tensor, target: Tensor) -> Tensor:
            return loss.sum()

        if len(stages) == 1:
            return Schedule1F1B(stages[0], count, loss_fn=total, scale_grads=False)
        kind = ScheduleZBVZeroBubble if self._pipeline.zero_bubble else ScheduleInterleaved1F1B
        return kind(stages, count, loss_fn=total, scale_grads=False)


class _Part(nn.Module):
    """A stage as torch's schedule calls it. The model is not a submodule: FSDP's settings are not torch's.

    weights: the queue of weight gradients, if they are computed separately.
    """

    def __init__(self, model: DeepSeek, stage: Stage, loss_scale: LossScale | None, zero_bubble: bool):
        super().__init__()
        self._run, self.stage = partial(model.forward_stage, stage), stage
        self._factor = partial(loss_factor, model, loss_scale=loss_scale)
        self.weights = WeightGradientQueue() if zero_bubble else None
        for layer in gemm_layers(nn.ModuleList(model.blocks_of(stage))):
            layer.deferred = self.weights
        self.begin(1)

    def begin(self, count: int) -> None:
        """Prepare for a step of `count` microbatches, over all ranks."""
        self._count = count
        self.losses: list[Losses] = []

    def forward(self, *inputs: Tensor, tokens: Tensor) -> Tensor | tuple[Tensor, ...]:
        carried = () if self.stage.is_first else inputs
        factor = self._factor(self._count)
        made, losses = self._run(tokens, *carried)
        self.losses.append(losses.detached(losses.total))
        loss = losses.total / self._count if factor is None else losses.total * factor
        if self.stage.is_last:
            return loss.reshape(1)
        return attach(made[0], loss), *(x.view_as(x) for x in (*made[1:], *carried[1:]))


class _ShardedStage(PipelineStage):
    around: PipelinedStep
    part: _Part
    microbatches: int

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_buffers():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_buffers():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _without_buffers(self) -> Iterator[None]:
        """Keep torch from allocating receive buffers for all microbatches of a step: each is allocated on receipt."""
        device, self.device = self.device, torch.device("meta")
        yield
        self.device = device

    def _get_init_p2p_neighbors_ops(self) -> Any:
        """torch 2.11 also connects a rank to itself, where it has two stages in a row; gloo cannot."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        _place(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        _place(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.around.clock.computes():
            made = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _place(self.args_recv_info[fwd_chunk_id], "meta")  # now only the backward pass holds it
        return made

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        last = bwd_chunk_id == self.microbatches - 1
        with self.around.clock.computes(), self.around.backward(self.part.stage, last):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _place(self.grad_recv_info[bwd_chunk_id], "meta")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        last = bwd_chunk_id == self.microbatches - 1
        with self.around.clock.computes(), self.around.weight_gradients(self.part.stage, last):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def _place(infos: Sequence[Any], device: torch.device | str) -> None:
    """Replace torch's receive buffers by new ones on this device; on meta they need no memory."""
    for info in infos:
        if (buffer := getattr(info, "buffer", None)) is not None:
            info.buffer = torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)
