"""The BF16 shadow: loss and gradients of a microbatch in FP8 compared with BF16.

The same tokens run twice, outside the step, from the same masters: in the run's precision, and with every FP8 GEMM in
BF16. Logged:

    loss gap    loss in the run's precision minus loss in BF16, nats a token
    cosine      <g, g'> / (|g| |g'|) of the two gradients of each parameter; 1: FP8 points where BF16 does
    share       |g'| over that of all parameters together: the direction of a tiny gradient is arbitrary

A router near a tie may choose other experts in BF16: the comparison includes that.

The gradients of the first pass are kept. In the second pass each gradient is compared as soon as it is complete, then
both are freed: little more than one set of gradients is alive at any time. Where ranks share weights, each compares its
parts, and the three sums (both squares and the product) are added up.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from precision.plain import in_bf16
from trainer.parallel.collectives import all_mean, all_sum
from trainer.parallel.shard_views import copies, local
from trainer.step import second_pass

if TYPE_CHECKING:
    from trainer.step.engine import Engine


class Shadow(NamedTuple):
    """Result, on the device: loss_gap 0-d FP64, nats; cosine and share [P] FP64, one for each of `module_names`."""

    loss_gap: Tensor
    cosine: Tensor
    share: Tensor


def module_names(engine: Engine) -> list[str]:
    """Return the names of the cosines: the parameters' names without `.weight`."""
    return [name.removesuffix(".weight") for name, _ in engine.model.named_parameters()]


def compare(engine: Engine, tokens: Tensor, batch: int) -> Shadow:
    """Run tokens [b, S + 1] of this rank both ways. batch: sequences of a step. A collective with several ranks."""
    parameters = dict(engine.model.named_parameters())
    place = {name: i for i, name in enumerate(parameters)}
    kept: dict[str, Tensor] = {}
    sums = torch.zeros(len(parameters), 3, dtype=torch.float64, device=engine.device)

    def keep(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        kept[name], parameter.grad = local(parameter.grad), None

    @torch.no_grad()
    def meet(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        ours, theirs = kept.pop(name).flatten(), local(parameter.grad).flatten()
        parameter.grad = None
        if ours.is_cuda:  # a large one's memory is of the steps' stream, and this is the stream that reduces
            ours.record_stream(torch.cuda.current_stream(ours.device))
        products = torch.stack([ours.dot(ours), theirs.dot(theirs), ours.dot(theirs)])
        sums[place[name]] = products.double() / copies(parameter)

    with second_pass.without_side_effects(engine):
        loss = second_pass.run(engine, tokens, batch, keep).lm
    with second_pass.without_side_effects(engine), ExitStack() as meanwhile:
        if engine.world.is_distributed:
            from trainer.parallel.fsdp import unquantised

            meanwhile.enter_context(unquantised(engine.model))
        meanwhile.enter_context(in_bf16(engine.model))
        loss_in_bf16 = second_pass.run(engine, tokens, batch, meet).lm
        engine.microbatch.release()
    squares, theirs, products = all_sum([sums], engine.world)[0].unbind(1)
    gap = all_mean(loss.double() - loss_in_bf16.double(), engine.world)
    return Shadow(gap, products / (squares * theirs).sqrt(), (theirs / theirs.sum()).sqrt())
