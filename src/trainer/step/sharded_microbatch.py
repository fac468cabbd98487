"""Microbatches of a model whose weights FSDP shards: when gradients are reduced and gathered weights are freed."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from models import DeepSeek, Losses
from trainer.parallel.fsdp_internals import end_backward, groups
from trainer.parallel.gather import WeightAmaxSync
from trainer.parallel.large import LargeGradients
from trainer.parallel.mesh import FsdpPolicy
from trainer.parallel.shard_views import add_up
from trainer.step.microbatch import Microbatch


class ShardedMicrobatch:
    """Runs microbatches of a model that ranks share, and decides when gradients are reduced and gathered weights freed.

    If each microbatch reduces its gradients, no rank holds a whole gradient for longer than a block's backward pass.
    Otherwise only the step's last one reduces, and gradients accumulate locally until then. Weights that are kept
    (always: embedding and head) also stay for the next microbatch: masters change only between steps.
    """

    def __init__(self, model: DeepSeek, run: Microbatch, world_size: int, policy: FsdpPolicy):
        self._model, self._run, self._world_size, self._policy = model, run, world_size, policy
        self._agreed = cast(WeightAmaxSync | None, model.weight_amax_sync)
        self._large = LargeGradients(model)
        self.shared = shared_modules(model)
        """All modules that FSDP shards, the model first."""

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """See `Microbatch`; index and count are this rank's own."""
        if index == 0:
            self.begin()
        last = index == count - 1
        if count > 1:
            self.before_backward(self.shared, reduces=last, frees=last, ends=last)
        losses = self._run(tokens, index, count * self._world_size)
        self.after_backward(last, tokens.device)
        return losses

    def begin(self) -> None:
        """Begin a step."""
        if self._agreed is not None:
            self._agreed.forget()

    def before_backward(
        self, modules: Iterable[FSDPModule], *, reduces: bool, frees: bool, ends: bool = False, holds: bool = False
    ) -> None:
        """Set up FSDP before the backward pass of one of several microbatches. reduces, frees: it is the last that adds
        to gradients of `modules`, and that gathers their weights; ends: the last of all modules; holds: weights are
        freed when `frees` is set, even if others are gathered for each pass."""
        if not self._policy.reduce_each_microbatch:
            self.shared[0].set_is_last_backward(ends)
        for module in modules:
            if not self._policy.reduce_each_microbatch:
                module.set_requires_gradient_sync(reduces, recurse=False)
            if self._policy.keep_gathered or holds or module is self.shared[0]:
                module.set_reshard_after_backward(frees, recurse=False)

    def after_backward(self, ends: bool, device: torch.device) -> None:
        """Finish a backward pass. ends: it was the step's last one."""
        self._large.finish(device)
        if ends and self._model.tensor is not None:
            add_up(self._model)
        if ends and self._agreed is not None:
            self._agreed.forget()  # the next step or an evaluation has other masters

    def reduce(self, modules: Iterable[FSDPModule], ends: bool) -> None:
        """Reduce gradients of `modules` that were added outside of a backward pass, and free the weights, which are
        still gathered. ends: `modules` are the step's last."""
        for module in modules:
            for owner, group in groups(cast(nn.Module, module)):
                if owner is module:
                    group.reduce()
        if ends:
            end_backward(self._model)

    def forget(self) -> None:
        """See `Microbatch`."""
        self._run.forget()

    def release(self) -> None:
        """Free the gathered weights, which an evaluation has no backward pass for, and gradients of a second pass."""
        self._large.finish(next(self._model.parameters()).device)
        for module in self.shared:
            module.reshard()
        if self._agreed is not None:
            self._agreed.forget()


def shared_modules(*modules: nn.Module) -> list[FSDPModule]:
    """Return the modules at or below these that FSDP shards."""
    return [inner for module in modules for inner in module.modules() if isinstance(inner, FSDPModule)]
