"""Microbatches of a model whose weights FSDP shards: when gradients are reduced and gathered weights are freed."""

from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from models import DeepSeek, Losses
from trainer.parallel.gather import WeightAmaxSync
from trainer.parallel.large import LargeGradients
from trainer.parallel.mesh import FsdpPolicy
from trainer.parallel.shard_views import add_up
from trainer.step.microbatch import Microbatch


class ShardedMicrobatch:
    """Microbatches of a model that ranks share. When gradients are reduced, and gathered weights freed.

    Where each microbatch reduces its gradients, no rank holds a whole gradient for longer than a block takes backward;
    else the step's last one does, and until then they are added up where they were made. Weights that are kept (always:
    embedding and head) stay for the next microbatch, too: masters change between steps only.
    """

    def __init__(self, model: DeepSeek, run: Microbatch, world_size: int, policy: FsdpPolicy):
        self._model, self._run, self._world_size, self._policy = model, run, world_size, policy
        self._agreed = cast(WeightAmaxSync | None, model.weight_amax_sync)
        self._large = LargeGradients(model)

    def __call__(self, tokens: Tensor, index: int, count: int) -> Losses:
        """See `Microbatch`; index and count are of this rank's own."""
        self.before(index, count)
        losses = self._run(tokens, index, count * self._world_size)
        self.after(index, count, tokens.device)
        return losses

    def before(self, index: int, count: int) -> None:
        """Before the passes of microbatch `index` of `count`; where others are between them, before the second."""
        if self._agreed is not None and index == 0:
            self._agreed.forget()
        if count > 1:
            last, shared = index == count - 1, cast(FSDPModule, self._model)
            if not self._policy.reduce_each_microbatch:
                shared.set_requires_gradient_sync(last)
                shared.set_is_last_backward(last)
            shared.set_reshard_after_backward(last, recurse=self._policy.keep_gathered)

    def after(self, index: int, count: int, device: torch.device) -> None:
        """After its backward pass."""
        self._large.finish(device)
        if self._model.tensor is not None and index == count - 1:
            add_up(self._model)
        if self._agreed is not None and index == count - 1:
            self._agreed.forget()  # what follows, the next step or an evaluation, does so with other masters

    def forget(self) -> None:
        """See `Microbatch`."""
        self._run.forget()

    def release(self) -> None:
        """Free gathered weights: an evaluation has no backward pass that would."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if self._agreed is not None:
            self._agreed.forget()
