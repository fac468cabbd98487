"""Scales and amax histories: one flat arena for every quantised tensor of the model.

An FP8 tensor is stored as x8 = saturate(x * scale) and read as x8 * (1 / scale), with

    scale = FORMAT_MAX / (amax * 2^margin)          amax: the largest absolute value           (arXiv 2209.05433)

*Current* scaling takes amax from the tensor itself. *Delayed* scaling takes the maximum of the last H committed steps,
so that the scale is known before the tensor is made and the cast needs one pass. Both record the amax of every step.

The arena holds all of it in three buffers with one row per tensor: `amax [N]` of the step in progress, `history [N, H]`
and `scale [N]`. A layer holds `Slot`s: 0-d views of its rows, bound once after the parameters exist. (Indexing the
arena inside a compiled block would lose writes and compile every block again.) So a step's update is one fused
operation for the model, skipping a step means not writing, and the checkpoint is plain tensors.

Four rules keep one bad step from poisoning later ones:
- `commit(ok)` writes nothing when ok is false. A non-finite amax makes ok false, so it never enters the history.
- An amax enters the history as at most `max_jump` times the largest there. After one absurd number a tensor keeps most
  of its format's range; the scale follows a lasting change in a few steps and clips meanwhile.
- A row whose history holds nothing positive has scale 0, which means: scale by this step's own amax.
- Microbatches and recomputation only raise `amax`, so that both are idempotent.

Rows without a format are recorded, not scaled: see `amax_probe`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from precision.config import ScalingConfig
from precision.errors import UserError
from precision.formats import Format


def absolute_max(x: Tensor) -> Tensor:
    """Return the largest absolute value of x, 0-d FP32; NaN or Inf if x holds one, 0 if x is empty."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()


def scale_from_amax(amax: Tensor, limit: float | Tensor, margin: int, power_of_two: bool) -> Tensor:
    """Return the scale that maps `amax` to `limit / 2^margin`. FP32, shape of amax. Zero and non-finite amax give 1.

    power_of_two rounds the scale down to a power of two. The result is finite and normal for every finite amax.
    """
    usable = torch.isfinite(amax) & (amax > 0)
    limit = limit if isinstance(limit, Tensor) else torch.full_like(amax, limit)  # number / tensor would round twice
    scale = limit / 2.0**margin / torch.where(usable, amax, 1.0)  # amax times 2^margin might not be finite
    scale = torch.where(usable, scale, 1.0).clamp(2.0**-126, 2.0**126)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


class Slot:
    """The arena rows of one tensor: one row, or `count` rows for a stack of expert weights.

    `amax` and `scale` are views into the arena ([] or [count], FP32), None until `ScalingArena` binds them; so are
    `next_amax` and `next_scale`, for weights that the optimizer makes. In a stack they are the rows `part`: a process
    that holds some of the experts has arena rows for all, as every other process does, and fills its own. `scales` [N]:
    the arena's scales of all tensors; their version counts changes. `place` [1] int64, in host memory: the first of its
    rows, for observers (see `observe`).
    scales_itself: with delayed scaling, too, its layer takes the scale from elsewhere (`head`), not from the history.
    """

    def __init__(self, names: list[str], fmt: Format | None, stacked: bool = False):
        self.names, self.format, self.stacked = names, fmt, stacked
        self.part = range(len(names))
        self.scales_itself = False
        self.amax: Tensor | None = None
        self.scale: Tensor | None = None
        self.next_amax: Tensor | None = None
        self.next_scale: Tensor | None = None
        self.scales: Tensor | None = None
        self.place: Tensor | None = None

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """`scale` and `amax` of a slot that is bound."""
        assert self.scale is not None and self.amax is not None, "precision.bind(model, ...) has not been called"
        return self.scale, self.amax


def record_amax(row: Tensor, amax: Tensor) -> None:
    """Raise an arena row (a view) to at least `amax`; NaN sticks."""
    row.copy_(torch.maximum(row, amax))


def step_scale(amax: Tensor, row_scale: Tensor, limit: float, scaling: ScalingConfig, delayed: bool) -> Tensor:
    """Return the scale of one tensor in this step, 0-d or [count].

    delayed: the arena's scale, or the tensor's own where it has no history. current: its own.
    """
    own = scale_from_amax(amax, limit, scaling.margin, scaling.power_of_two)
    if delayed:
        return torch.where(row_scale > 0, row_scale, own)
    return own


class ScalingArena:
    """All scaling state of a model on one device. See the module docstring.

    names: N row names, in the order of the forward pass where modules define it. amax [N], scale [N], history [N, H]:
    FP32. next_amax, next_scale [N] FP32: of weights that the optimizer makes for the next step. max_logits [attention
    cores, H] FP32: see `max_logits`.
    """

    def __init__(self, slots: Iterable[Slot], scaling: ScalingConfig, delayed: bool, device: torch.device | str):
        unique = list({id(s): s for s in slots}.values())
        self.names = [name for slot in unique for name in slot.names]
        if len(set(self.names)) != len(self.names):
            raise UserError(
                "two tensors share a name in the scaling arena; give every GEMM of the plan a name of its own"
            )
        self._scaling, self.delayed = scaling, delayed
        limits = [slot.format.max if slot.format else 0.0 for slot in unique for _ in slot.names]
        self.limit = torch.tensor(limits, dtype=torch.float32, device=device)
        self.scaled = self.limit > 0  # [N] bool: the others are only recorded
        self.num_scaled = sum(limit > 0 for limit in limits)
        by_history = [delayed and not slot.scales_itself for slot in unique for _ in slot.names]
        self._by_history = torch.tensor(by_history, dtype=torch.bool, device=device)
        size = len(self.names)
        self.amax, self.next_amax = torch.zeros(size, device=device), torch.zeros(size, device=device)
        self.max_logits = torch.zeros(0, 0, device=device)
        self.scale, self.next_scale = torch.zeros(size, device=device), torch.zeros(size, device=device)
        self.history = torch.zeros(size, scaling.history if delayed else 0, device=device)
        start = 0
        for slot in unique:
            stop = start + len(slot.names)
            # .data gives each view its own version counter, or one layer's write would invalidate what another saved
            rows = slice(start + slot.part.start, start + slot.part.stop) if slot.stacked else start
            slot.amax, slot.scale, slot.scales = self.amax.data[rows], self.scale.data[rows], self.scale
            slot.next_amax, slot.next_scale = self.next_amax.data[rows], self.next_scale.data[rows]
            slot.place = torch.tensor([start], device="cpu")
            start = stop

    def begin_step(self) -> None:
        """Reset the previous step's amaxes and logits."""
        self.amax.zero_()
        self.max_logits.fill_(-torch.inf)

    def finite(self) -> Tensor:
        """Return a 0-d bool: whether every amax recorded in this step is finite."""
        return torch.isfinite(self.amax).all()

    def in_force(self) -> Tensor:
        """Return the scales of the step's casts, [N]; 0 for tensors with scales of their own."""
        return torch.where(self._by_history, self.scale, 0.0)

    def commit(self, ok: Tensor) -> None:
        """Push the step's amaxes into the histories and set the next scales if `ok` (0-d bool, on the device); else
        write nothing. Where a scale does not come from a history, that of the step is recorded.

        Call it before the optimizer's step, which makes weights under the next scales.
        """
        if not self.names:
            return
        self.next_amax.zero_()
        if not self.delayed:
            self._update_scale()
            return
        peak = self.history.amax(dim=1)
        highest = torch.where(peak > 0, peak * self._scaling.max_jump, torch.inf)
        pushed = torch.cat([self.amax.minimum(highest)[:, None], self.history[:, :-1]], dim=1)
        self.history.copy_(torch.where(ok, pushed, self.history))
        self._update_scale()
        # a weight that has no history yet changes little in a step: the step's amax serves for its next scale
        own = scale_from_amax(self.amax, self.limit, self._scaling.margin, self._scaling.power_of_two)
        torch.where(self.scale > 0, self.scale, own, out=self.next_scale)

    def raise_gradients(self, times: float) -> None:
        """Expect output gradients of so many times their size from now on: raise their histories."""
        rows = [i for i, name in enumerate(self.names) if name.endswith(":grad")]
        self.history[rows] *= times
        self._update_scale()

    def state_dict(self) -> dict[str, Tensor | list[str]]:
        """Return the histories and the names of their rows, for the checkpoint. Scales follow from them."""
        return {"names": list(self.names), "history": self.history.clone()}

    def load_state_dict(self, state: dict[str, Tensor | list[str]]) -> list[str]:
        """Restore the rows of the same names; return the names without saved rows, which start without history.

        With the same rows and history length everything is restored bit for bit. A run may resume with another recipe:
        then matching rows are restored; with current scaling there is nothing to restore.
        """
        names, history = state["names"], state["history"]
        assert isinstance(names, list) and isinstance(history, Tensor)
        self.history.zero_()
        self.scale.zero_()
        if not self.delayed:
            return []
        row_of = {name: i for i, name in enumerate(names)} if history.shape[1] else {}
        pairs = [(i, row_of[name]) for i, name in enumerate(self.names) if name in row_of]
        if pairs:
            ours, theirs = (torch.tensor(rows, device=self.history.device) for rows in zip(*pairs, strict=True))
            depth = min(self.history.shape[1], history.shape[1])
            self.history[ours, :depth] = history.to(self.history.device)[theirs, :depth]
        self._update_scale()
        return [name for name in self.names if name not in row_of]

    def _update_scale(self) -> None:
        # scales that were the tensors' own are for the logs
        peak = torch.where(self._by_history, self.history.amax(dim=1), self.amax) if self.delayed else self.amax
        scale = scale_from_amax(peak, self.limit, self._scaling.margin, self._scaling.power_of_two)
        self.scale.copy_(torch.where((peak > 0) & self.scaled, scale, 0.0))
