"""A forward and backward pass without effect on training, bit for bit.

Between two steps nothing is on the way: gradients are gone, gathered weights are freed, the data cursor and the random
numbers are the host's. What a pass leaves behind is known, and is put away here:

    maxima in the arena       saved before, restored after; scales and histories are only read
    compute weights           made again at the start; the next step does the same from the same masters and scales
    gradients                 dropped, each as soon as the caller has seen it
    weights gathered by FSDP  freed before and after
    load of the experts       an output of the model: not used
    debug.inject              disarmed: a fault belongs to its step

The pass is eager, whatever the run is: nothing is compiled for it, and a CUDA graph of the step is left alone. (It
finds its operands where they were, and its gradients are attached again in each step.)

All ranks make the same passes: there are collectives in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models import Losses
from precision import refresh_weights
from trainer.parallel.shard_views import local

if TYPE_CHECKING:
    from trainer.step.engine import Engine

OnGradient = Callable[[str, nn.Parameter], None]
"""Called with a parameter's name when its gradient is complete, `parameter.grad`; it may take it, or let go of it."""


@contextmanager
def off_record(engine: Engine) -> Iterator[None]:
    """Passes made inside leave no trace. Between two steps only. A collective where there are ranks."""
    maxima = engine.arena.amax, engine.arena.max_logits
    before = [each.clone() for each in maxima]
    if engine.injector is not None:
        engine.injector.before(0, 0)  # there is no such step
    engine.microbatch.release()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        engine.optimizer.zero_grad()
        engine.microbatch.release()
        for each, was in zip(maxima, before, strict=True):
            each.copy_(was)


def run(engine: Engine, tokens: Tensor, batch: int, on_gradient: OnGradient) -> Losses:
    """Forward and backward of tokens [b, S + 1] (this rank's), inside `aside`. Returns the losses, detached: of these
    tokens.

    batch: sequences of a step, of all ranks. Gradients are as large as in a step of so many, of which these are b: what
    scales know from earlier steps fits them. Where ranks share weights, they are added up over the ranks. With a loss
    scale the backward pass is the one that a step would make, and what `on_gradient` sees is divided by it.
    """
    share = len(tokens) / batch / engine.degrees.sequence
    scale = None if engine.loss_scale is None else engine.loss_scale.scale
    refresh_weights(engine.model, force=True)
    with ExitStack() as after:
        for name, parameter in engine.model.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(_named(name, on_gradient, scale))
                after.callback(hook.remove)
        engine.model.loss_scale = factor = None if scale is None else scale * share
        losses = engine.model(tokens.to(engine.device))
        total = losses.total if engine.injector is None else engine.injector.loss(losses.total)
        (total * (share if factor is None else factor)).backward()
    return losses.detached(total)


def _named(name: str, on_gradient: OnGradient, scale: Tensor | None) -> Callable[[nn.Parameter], None]:
    @torch.no_grad()
    def complete(parameter: nn.Parameter) -> None:
        if scale is not None and parameter.grad is not None:
            local(parameter.grad).div_(scale)
        on_gradient(name, parameter)

    return complete
