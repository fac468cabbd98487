"""`AmaxProbe`: reports which sublayer went bad first.

An identity at the end of a sublayer that records the absolute maximum of the tensor in the forward pass and of its
gradient in the backward pass, in arena rows of its own. In every recipe, BF16 included, the rows show after a dropped
step where the first non-finite number appeared, without running anything again; the cost is one read of the tensor each
way.
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
    """Identity that records amax(x) as row NAME and the amax of x's gradient as row NAME:grad. Without an arena:
    identity."""

    def __init__(self, name: str):
        super().__init__()
        self.slot = Slot([name], None)
        self.grad_slot = Slot([f"{name}:grad"], None)

    def slots(self) -> list[Slot]:
        """Arena rows of this module, in forward order."""
        return [self.slot, self.grad_slot]

    def forward(self, x: Tensor) -> Tensor:
        """x, unchanged."""
        if self.slot.amax is None or self.grad_slot.amax is None:
            return x
        return _AmaxProbe.apply(x, self.slot.amax, self.grad_slot.amax)
