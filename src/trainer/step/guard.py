"""Commit or skip: a step changes nothing if its loss, gradients or amaxes are not finite, or its loss or gradient norm
is a spike.

`ok` = losses, gradient norm and every amax of the step are finite, a flag on the device. (Amaxes must be included: a
saturating cast turns an Inf into the format's largest value, and an activation's Inf need not reach the loss.) The flag
selects everything that a step changes: masters, moments and step counts (`found_inf`), amax histories, router biases,
the count of committed steps. Multiplying by 0 or 1 would fail: 0 * NaN is NaN. With `recovery.spikes.enabled` a finite
step whose numbers jump up (`trainer.step.spikes`) is not ok either.

The device also finds the place that went bad first, an index into one list in the order of a step: forward rows of the
arena, the loss, backward rows from the last to the first, gradients by parameter; spikes last. A good step therefore
needs no synchronisation; the host reads flag and index later. All ranks reach the same verdict: losses, norms and
amaxes are reduced over them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precision import ScalingArena
from precision.errors import RunError
from trainer.config.recovery import RecoveryConfig
from trainer.optim.loss_scale import LossScale
from trainer.step.spikes import Reading, SpikeWatch

GRAD_SUFFIX = ":grad"
COUNTERS = ("committed", "skipped", "spiked", "overflowed")


class TrainingStopped(RunError):
    """Training cannot continue, or a signal stopped it; the message has reason and fix. exit_code: of the process."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Verdict:
    """Outcome of one step, on the device: ok (0-d bool), and place, the one that went bad first (0-d int64, into
    `StepGuard.places`).

    spike: 0-d bool, the step is finite but skipped. overflow: 0-d bool, only the backward pass is not finite, and
    loss_scale, 0-d, the scale that it ran with, may fall (`trainer.optim.loss_scale`). crowded: 0-d bool, the step
    needed more room for tokens in slots than there was, and nothing else is wrong. reading: its numbers, None unless
    spikes are detected. fill: if tokens travel in slots, the largest share of their room that was needed
    (`models.slots`), 0-d.
    """

    step: int
    ok: Tensor
    place: Tensor
    spike: Tensor
    overflow: Tensor
    crowded: Tensor
    reading: Reading | None = None
    loss_scale: Tensor | None = None
    fill: Tensor | None = None

    @property
    def finite(self) -> Tensor:
        """Whether all numbers of the step are finite, 0-d bool, even if it is skipped for another reason."""
        return self.ok | self.spike | self.crowded


def total_norm(norms: Tensor) -> Tensor:
    """Return the norm of all gradients, 0-d FP32, from those of each [P] FP32: their squares may exceed FP32."""
    return norms.double().norm().float()


class Reason(NamedTuple):
    """The reason why a step was skipped. line: in words; what: the fields of its event."""

    line: str
    what: dict[str, Any]


class StepGuard:
    """Decides whether a step counts, and counts the steps that do not.

    committed, skipped (for any reason), spiked (skipped as spikes): 0-d int64 tensors on the device.
    """

    def __init__(self, arena: ScalingArena, parameter_names: list[str], config: RecoveryConfig):
        self._arena = arena
        device = arena.amax.device
        forward = [i for i, name in enumerate(arena.names) if not name.endswith(GRAD_SUFFIX)]
        backward = [i for i, name in reversed(list(enumerate(arena.names))) if name.endswith(GRAD_SUFFIX)]
        self._forward = torch.tensor(forward, dtype=torch.long, device=device)
        self._backward = torch.tensor(backward, dtype=torch.long, device=device)
        self.places = [
            *(f"{arena.names[i]} (forward)" for i in forward),
            "loss (forward)",
            *(f"{arena.names[i].removesuffix(GRAD_SUFFIX)} (backward)" for i in backward),
            *(f"{name.removesuffix('.weight')} (weight gradient)" for name in parameter_names),
            "experts' slots (capacity)",
            "loss (spike)",
            "gradient norm (spike)",
        ]
        self._first_backward = len(forward) + 1
        self.committed, self.skipped, self.spiked, self.overflowed = (
            torch.zeros((), dtype=torch.long, device=device) for _ in COUNTERS
        )
        self._spikes = SpikeWatch(config.spikes, device) if config.spikes.enabled else None

    def judge(
        self,
        step: int,
        losses: Tensor,
        grad_norms: Tensor,
        loss_scale: LossScale | None = None,
        fill: Tensor | None = None,
        observing: bool = False,
    ) -> Verdict:
        """Return the verdict on a step with the arena's current amaxes. losses: [n], the total first. grad_norms: [P],
        as from `Optimizer.grad_norms`. loss_scale: of the backward pass. fill: of the slots in this step; `observing`:
        of those that it would have needed."""
        reading = self._spikes.read(losses[0], total_norm(grad_norms)) if self._spikes is not None else None
        spiked = self._forward.new_zeros(2, dtype=torch.bool) if reading is None else reading.spiked
        fits = spiked.new_ones(1) if fill is None or observing else (fill <= 1)[None]
        bad = ~torch.cat([*self._finite(self._arena.amax, losses), torch.isfinite(grad_norms), fits, ~spiked])
        crowded = ~fits[0] & ~bad[:-3].any()
        ok, place, spike = ~bad.any(), bad.int().argmax(), bad[-2:].any() & ~bad[:-2].any()
        overflow, scale = torch.zeros_like(ok), None
        if loss_scale is not None:
            overflow = ~ok & ~spike & ~crowded & (place >= self._first_backward) & loss_scale.can_decrease
            scale = loss_scale.scale.clone()
        fill = None if fill is None else fill.clone()
        return Verdict(step, ok, place, spike, overflow, crowded, reading, scale, fill)

    def first_place(self, amax: Tensor, losses: Tensor) -> int | None:
        """Return the first place at which these amaxes [N] or losses are not finite, as an index into `places`, or
        None. On the host."""
        bad = ~torch.cat(self._finite(amax.to(self._forward.device), losses.to(self._forward.device)))
        return int(bad.int().argmax()) if bad.any() else None

    def _finite(self, amax: Tensor, losses: Tensor) -> list[Tensor]:
        """Return whether they are finite, place by place in the order of `places`."""
        finite = torch.isfinite(amax)
        return [finite[self._forward], torch.isfinite(losses).all()[None], finite[self._backward]]

    def spike(self, verdict: Verdict) -> Reason | None:
        """Return the reason of a step that was skipped as a spike, or None if that was not the reason. Synchronises."""
        if verdict.reading is None or not bool(verdict.spike):
            return None
        values, limits, spiked = (tensor.tolist() for tensor in verdict.reading)
        above = [
            (name, value, limit)
            for name, value, limit, is_spike in zip(("loss", "gradient norm"), values, limits, spiked, strict=True)
            if is_spike
        ]
        above_limits = " and ".join(f"{name} {value:.4g} above {limit:.4g}" for name, value, limit in above)
        name, value, limit = above[0]
        what = {"module": name, "value": value, "threshold": limit}
        return Reason(f"step {verdict.step} is a spike: {above_limits}; it is skipped", what)

    def overflow(self, verdict: Verdict, place: str) -> Reason | None:
        """Return the reason of a step that was skipped because its loss scale was too large, first at `place`, or None
        if that was not the reason. Synchronises."""
        if verdict.loss_scale is None or not bool(verdict.overflow):
            return None
        scale = float(verdict.loss_scale)
        line = f"step {verdict.step} overflows FP16 at a loss scale of {scale:,.12g}, first at {place}; the step is "
        return Reason(f"{line}skipped and the scale becomes {scale / 2:,.12g}", {"loss_scale": scale})

    def crowded(self, verdict: Verdict, capacity: float) -> Reason | None:
        """Return the reason of a step that was skipped because tokens had too few slots, or None if that was not the
        reason. capacity: from now on. Synchronises."""
        if verdict.fill is None or not bool(verdict.crowded):
            return None
        fill, line = float(verdict.fill), f"step {verdict.step} was skipped: "
        if fill == torch.inf:
            return Reason(f"{line}the scale of the tokens sent to experts was missing; it is computed again", {})
        line += f"a rank's experts were sent {fill:.2f} times the tokens they have room for; "
        fix = f"their room grows; for the next run set parallel.dispatch_capacity={capacity:.3g}"
        return Reason(line + fix, {"fill": fill, "capacity": capacity})

    def count(self, verdict: Verdict) -> None:
        """Add the step to the counters and to the spike statistics."""
        self.committed += verdict.ok
        self.skipped += ~verdict.ok
        self.spiked += verdict.spike
        self.overflowed += verdict.overflow
        if self._spikes is not None and verdict.reading is not None:
            self._spikes.commit(verdict.reading, verdict.ok)

    def forget_usual(self) -> None:
        """Start the spike statistics over."""
        if self._spikes is not None:
            self._spikes.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return counters and spike statistics, for the checkpoint."""
        counters = {key: int(getattr(self, key)) for key in COUNTERS}
        return {**counters, "spikes": None if self._spikes is None else self._spikes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them. A run that did not detect spikes before starts without statistics."""
        for key in COUNTERS:
            getattr(self, key).fill_(state.get(key, 0))
        if self._spikes is not None and state.get("spikes") is not None:
            self._spikes.load_state_dict(state["spikes"])
        else:
            self.forget_usual()
