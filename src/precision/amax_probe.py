"""`AmaxProbe`: reports which sublayer went bad first.

A probe is an identity at the end of a sublayer. It records the absolute maximum of the tensor in the forward pass, and
of its gradient in the backward pass, in its own arena rows. After a skipped step these rows show where the first
non-finite number appeared, without a second run. This works in every recipe, BF16 included, and costs one read of the
tensor each way.
"""

import torch
from torch import Tensor, nn

from precision.scaling import Slot, absolute_max, record_amax


class _AmaxProbe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, forward_row: Tensor, grad_row: Tensor) -> Tensor:
        ctx.grad_row = grad_row  # not saved for backward: other rows of the arena change in between
        record_amax(forward_row, absolute_max(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        record_amax(ctx.grad_row, absolute_max(grads[0]))
        return grads[0], None, None


class AmaxProbe(nn.Module):
    """Identity that records amax(x) in row NAME and the amax of x's gradient in row NAME:grad. It records nothing until
    it is bound to an arena."""

    def __init__(self, name: str):
        super().__init__()
        self.slot = Slot([name], None)
        self.grad_slot = Slot([f"{name}:grad"], None)

    def slots(self) -> list[Slot]:
        """Return this module's arena rows, in forward order."""
        return [self.slot, self.grad_slot]

    def forward(self, x: Tensor) -> Tensor:
        if self.slot.amax is None or self.grad_slot.amax is None:
            return x
        return _AmaxProbe.apply(x, self.slot.amax, self.grad_slot.amax)
