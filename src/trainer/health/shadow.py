"""The BF16 shadow: loss and gradients of a microbatch in FP8 compared with BF16.

The same tokens run twice aside, from the same masters: in the run's precision, and with every FP8 GEMM in BF16. Logged:

    loss gap    loss in the run's precision minus loss in BF16, nats a token
    cosine      <g, g'> / (|g| |g'|) of the two gradients of each parameter; 1: FP8 points where BF16 does
    share       |g'| over that of all parameters together: a gradient that is next to nothing points anywhere

A router that is near a tie may choose other experts in BF16: that is part of the answer.

Gradients of the first pass are put aside; in the second one each is compared as soon as it is complete and both are let
go of, so that there is one set of gradients at any time, as in a step, and a little more. Where ranks share weights,
each compares its parts, and the three sums (both squares and the product) are added up.
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
    """Outcome, on the device: loss_gap 0-d FP64, nats; cosine and share [P] FP64, one for each of `module_names`."""

    loss_gap: Tensor
    cosine: Tensor
    share: Tensor


def module_names(engine: Engine) -> list[str]:
    """What the cosines are called: the parameters' names, without what goes without saying."""
    return [name.removesuffix(".weight") for name, _ in engine.model.named_parameters()]


def compare(engine: Engine, tokens: Tensor, batch: int) -> Shadow:
    """Run tokens [b, S + 1] of this rank both ways; batch: sequences of a step. A collective where there are ranks."""
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
        products = torch.stack([ours.dot(ours), theirs.dot(theirs), ours.dot(theirs)])
        sums[place[name]] = products.double() / copies(parameter)

    with second_pass.off_record(engine):
        loss = second_pass.run(engine, tokens, batch, keep).lm
    with second_pass.off_record(engine), ExitStack() as meanwhile:
        if engine.world.many:
            from trainer.parallel.fsdp import unquantised

            meanwhile.enter_context(unquantised(engine.model))
        meanwhile.enter_context(in_bf16(engine.model))
        loss_in_bf16 = second_pass.run(engine, tokens, batch, meet).lm
        engine.microbatch.release()
    squares, theirs, products = all_sum([sums], engine.world)[0].unbind(1)
    gap = all_mean(loss.double() - loss_in_bf16.double(), engine.world)
    return Shadow(gap, products / (squares * theirs).sqrt(), (theirs / theirs.sum()).sqrt())
