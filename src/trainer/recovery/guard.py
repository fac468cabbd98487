"""Commit or drop: a step whose loss, gradients or amaxes are not finite changes nothing.

`ok` = losses, gradient norm and every amax of the step are finite, a flag on the device. (The amaxes have to be in it:
a saturating cast turns an Inf into the format's largest value, and an activation's Inf need not reach the loss.)
Whatever a step changes is selected by that flag: masters, moments and step counts (`found_inf`), amax histories, router
biases, the count of committed steps. A multiplication by 0 or 1 would not do: 0 * NaN is NaN.

Where it went bad first is found on the device too, as an index into one list in the order of a step: forward rows of
the arena, the loss, backward rows from the last to the first, gradients by parameter. So a good step costs no
synchronisation; the host reads flag and index when it likes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from precision import ScalingArena

GRAD_SUFFIX = ":grad"


class TrainingStopped(RuntimeError):
    """Training cannot go on, or was told to stop; the message says why and what to do. exit_code: of the process."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Verdict:
    """Outcome of one step, on the device: ok (0-d bool), and where it went bad first (0-d int64, into
    `StepGuard.places`)."""

    step: int
    ok: Tensor
    place: Tensor


class StepGuard:
    """Decides whether a step counts, counts those that did not, and stops a run that makes no progress.

    committed, skipped, consecutive: 0-d int64 tensors on the device.
    """

    def __init__(self, arena: ScalingArena, parameter_names: list[str], max_consecutive_skips: int):
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
        ]
        self._max_consecutive = max_consecutive_skips
        self.committed, self.skipped, self.consecutive = (
            torch.zeros((), dtype=torch.long, device=device) for _ in range(3)
        )

    def judge(self, step: int, losses: Tensor, grad_norms: Tensor) -> Verdict:
        """losses [n], grad_norms [P] as `Optimizer.grad_norms`, and the arena's amaxes of the step -> the verdict."""
        bad = ~torch.cat([*self._finite(self._arena.amax, losses), torch.isfinite(grad_norms)])
        return Verdict(step, ~bad.any(), bad.int().argmax())

    def first_place(self, amax: Tensor, losses: Tensor) -> int | None:
        """Where these amaxes [N] or losses are not finite first, as an index into `places`; None: nowhere. On the
        host."""
        bad = ~torch.cat(self._finite(amax.to(self._forward.device), losses.to(self._forward.device)))
        return int(bad.int().argmax()) if bad.any() else None

    def _finite(self, amax: Tensor, losses: Tensor) -> list[Tensor]:
        """Whether they are, place by place in the order of `places`."""
        finite = torch.isfinite(amax)
        return [finite[self._forward], torch.isfinite(losses).all()[None], finite[self._backward]]

    def count(self, verdict: Verdict) -> None:
        """Add the step to the counters."""
        self.committed += verdict.ok
        self.skipped += ~verdict.ok
        self.consecutive.copy_(torch.where(verdict.ok, 0, self.consecutive + 1))

    def check_progress(self, step: int, last_place: str | None) -> None:
        """TrainingStopped if more steps in a row were dropped than allowed. Synchronises."""
        consecutive = int(self.consecutive)
        if consecutive > self._max_consecutive:
            raise TrainingStopped(
                f"{consecutive} {'step' if consecutive == 1 else 'steps'} in a row not finite, up to step {step} "
                f"(recovery.max_consecutive_skips={self._max_consecutive}); the last one first at {last_place or '?'}. "
                "Look at events.jsonl for where each began; then try a lower optim.lr, "
                "recipe=bf16 on resume, or precision.rules for that module"
            )

    def state_dict(self) -> dict[str, int]:
        """Counters for the checkpoint."""
        return {k: int(getattr(self, k)) for k in ("committed", "skipped", "consecutive")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the counters."""
        for key in ("committed", "skipped", "consecutive"):
            getattr(self, key).fill_(state[key])
