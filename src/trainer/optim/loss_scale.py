"""Loss scaling for FP16 (arXiv 1710.03740, section 3.2), dynamic as in torch.amp.GradScaler.

FP16 holds numbers from 6e-8 to 65504. Gradients of activations are often smaller, and would be 0. So the backward pass
starts from scale * loss. Weight gradients are FP32 sums: they are divided by the scale, a power of two, which is exact,
before norms, clipping and update see them. Activations and weights are not scaled.

    a good step                  the count of good steps rises; at `interval` the scale doubles, and it starts again
    a step that is not finite    the scale halves, and the count starts again

The scale follows the verdict on the device, like all that a step changes. If only the backward pass of a step is not
finite, at a scale above `minimum`, the scale overflowed: a lower one helps, without recovery. A NaN or Inf in the
forward pass does not depend on the scale, and at `minimum` there is no lower one: both are bad steps as in any recipe.
(A gradient that is NaN for another reason looks like an overflow until the scale has reached `minimum`, 16 steps from
2^16.) A step that is skipped for another reason, as a spike or for want of room, is finite and counts as a good step
for the scale.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from precision.config import LossScaleConfig

_update_scale = torch._amp_update_scale_  # pyright: ignore[reportPrivateImportUsage]  (GradScaler's own)


class LossScale:
    """The scale of a run: `scale`, 0-d FP32 on the device, always in the same memory."""

    def __init__(self, config: LossScaleConfig, device: torch.device):
        self._config = config
        self.scale = torch.tensor(config.initial, dtype=torch.float32, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def can_decrease(self) -> Tensor:
        """Whether the scale is above its minimum, 0-d bool."""
        return self.scale > self._config.minimum

    def update(self, finite: Tensor) -> None:
        """Update the scale after a step. finite: 0-d bool, whether all of the step was."""
        _update_scale(self.scale, self._good, (~finite).float(), 2.0, 0.5, self._config.interval)
        self.scale.clamp_(min=self._config.minimum)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for the checkpoint."""
        return {"scale": float(self.scale), "good": int(self._good)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved scale, in place."""
        self.scale.fill_(state["scale"])
        self._good.fill_(state["good"])
