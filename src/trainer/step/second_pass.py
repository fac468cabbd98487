"""A forward and backward pass without effect on training, bit for bit.

Between two steps nothing is in flight: gradients are dropped, gathered weights are freed, and the data cursor and the
random numbers are the host's. The effects of a pass are known and undone here:

    maxima in the arena       saved before, restored after; scales and histories are only read
    compute weights           made again at the start; the next step does the same from the same masters and scales
    gradients                 dropped, each as soon as the caller has seen it
    weights gathered by FSDP  freed before and after
    load of the experts       an output of the model: not used
    debug.inject              disarmed: a fault belongs to its step

The pass is always eager: nothing is compiled for it, and a CUDA graph of the step stays valid. (Its operands keep their
addresses, and its gradients are attached again in each step.)

The passes contain collectives: all ranks must make the same ones.
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
"""Called with a parameter's name when its gradient, `parameter.grad`, is complete. It may take or free the gradient."""


@contextmanager
def without_side_effects(engine: Engine) -> Iterator[None]:
    """Undo the effects of the passes inside. Only between two steps. A collective if there are several ranks."""
    maxima = engine.arena.amax, engine.arena.max_logits
    before = [each.clone() for each in maxima]
    if engine.injector is not None:
        engine.injector.before(0, 0)  # no such step: disarm
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
    """Run forward and backward of this rank's tokens [b, S + 1], inside `without_side_effects`. Return the detached
    losses of these tokens.

    batch: sequences of a step, of all ranks. Gradients are scaled as in a step of `batch` sequences, of which these are
    b, so that they fit the scales of earlier steps. Gradients of shared weights are added up over the ranks. A loss
    scale applies as in a step; `on_gradient` receives the gradient divided by it.
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
