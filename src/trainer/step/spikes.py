"""Spikes: steps whose loss or gradient norm jumps above its usual value.

A step is a spike if, for x the total loss or the gradient norm,

    log x > c + threshold * max(s, FLOOR)        c = median, s = 1.4826 * median(|log x_i - c|)      of committed steps

Median and MAD (median absolute deviation; 1.4826 makes it the standard deviation of a normal distribution) tolerate
outliers in up to half of the window. The first spike in the window would move a mean and a standard deviation, and hide
the next one. Logarithms are used because both numbers are positive and vary in proportion to their size: gradient norms
have a long tail to the right, which plain deviations would take for spikes, and FLOOR becomes a share of the value.
FLOOR keeps a run with an almost constant loss from skipping steps for nothing: with a threshold of 6, no loss less than
13 % above the median is a spike, and no norm less than 82 % above it.

Only a rise counts. Early in training the loss falls fast: its median lags above it and its deviation is large, so
little is a spike; before `min_steps` nothing is. A lasting change (of the data, say) is skipped again and again, since
skipped steps do not enter the window, until the limit of consecutive skips invokes the ladder. A change that the config
plans is no such: where a phase may raise the values (`Timeline.may_rise`), the statistics start over.

All of it runs on the device without waiting for the host: two sorts of 2 x window numbers a step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config.recovery import SpikesConfig

FLOOR = 0.02, 0.1
"""Smallest standard deviation of the logarithm of the loss, and of the gradient norm: 2 and 10 % of the value."""
NORMAL = 1.4826
TINY = 1e-30


class Reading(NamedTuple):
    """One step, on the device: value [2] of total loss and gradient norm, limit [2] of each (inf: none yet), and spiked
    [2] bool, whether each exceeds its limit."""

    value: Tensor
    limit: Tensor
    spiked: Tensor


class SpikeWatch:
    """Statistics of recent steps. values [2, W]: logarithms of total loss and gradient norm of the last W committed
    steps, the newest first; seen: how many of them there are, 0-d int64."""

    def __init__(self, config: SpikesConfig, device: torch.device):
        self._config = config
        self.values = torch.zeros(2, config.window, device=device)
        self.seen = torch.zeros((), dtype=torch.long, device=device)
        self._floor = torch.tensor(FLOOR, device=device)
        self._slots = torch.arange(config.window, device=device)

    def read(self, loss: Tensor, norm: Tensor) -> Reading:
        """Compare total loss and gradient norm, 0-d each, with their limits. Values that are not finite exceed any."""
        value = torch.stack([loss.float(), norm.float()])
        center, deviation = self._usual()
        limit = (center + self._config.threshold * deviation.maximum(self._floor)).exp()
        limit = torch.where(self.seen >= self._config.min_steps, limit, torch.inf)
        return Reading(value, limit, ~torch.isfinite(value) | (value > limit))

    def commit(self, reading: Reading, ok: Tensor) -> None:
        """Add the step to the window if `ok` (0-d bool)."""
        pushed = torch.cat([reading.value.clamp(min=TINY).log()[:, None], self.values[:, :-1]], dim=1)
        self.values.copy_(torch.where(ok, pushed, self.values))
        self.seen.copy_((self.seen + ok).clamp(max=self._config.window))

    def forget(self) -> None:
        """Start over: what was usual no longer is, as in a phase with other loss weights."""
        self.seen.zero_()

    def _usual(self) -> tuple[Tensor, Tensor]:
        """Return median and robust standard deviation of the window, [2] each."""
        there = self._slots < self.seen
        middle = ((self.seen - 1) // 2).clamp(min=0)[None]

        def median(x: Tensor) -> Tensor:
            ordered = torch.where(there, x, torch.inf).sort(dim=1).values
            return ordered.index_select(1, middle)

        center = median(self.values)
        return center[:, 0], NORMAL * median((self.values - center).abs())[:, 0]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the statistics, for the checkpoint."""
        return {"values": self.values.clone(), "seen": self.seen.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load statistics; if the window has another length, as much as both hold."""
        count = min(state["values"].shape[1], self.values.shape[1])
        self.values.zero_()
        self.values[:, :count] = state["values"][:, :count].to(self.values.device)
        self.seen.copy_(state["seen"].clamp(max=count))
