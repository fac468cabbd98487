"""NonfiniteProbe: statistics of every tensor of one forward and backward pass, in order of computation.

The arena keeps only the amax of a tensor. This module repeats a pass without effect on the run
(`trainer.step.second_pass`), and reports for each tensor the numbers that are not finite, their sequences, and the
effect of the cast into FP8:

    NAME           output of a GEMM, a sublayer (its `AmaxProbe`), a block, the embedding or the final norm
    NAME:input     what was cast for a GEMM in FP8; NAME:weight, its weight, a stack of experts as one
    NAME:grad      the gradient of NAME's output, and the cast of it; NAME:weight gradient, that of its weight. The loss
                   scale is divided out again, after its effect on them in FP16

With `keep` the tensors themselves stay in host memory, so that another pass can be compared with this one.

The pass is eager, casts are separate from their kernels, and the host waits for every tensor: this is for analysing a
bad step, not for training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models import Losses
from models.block import Block
from models.layers import Embedding
from precision import AmaxProbe, GroupedLinear, Linear, refresh_weights
from precision.formats import Format
from precision.observe import observing
from precision.scaling import absolute_max
from trainer.health.casts import ELEMENTS, SATURATED, UNDERFLOWN, Rows, cast_sums
from trainer.parallel.shard_views import local
from trainer.step.second_pass import run, without_side_effects

if TYPE_CHECKING:
    from trainer.step.engine import Engine


@dataclass
class TensorReading:
    """Statistics of a tensor. sequences: those of the microbatch with a number that is not finite, if its shape shows
    them.

    saturated, underflown: shares of the numbers, None if it was not cast. kept: the tensor.
    """

    name: str
    shape: tuple[int, ...]
    elements: int
    not_finite: int
    amax: float
    sequences: list[int] = field(default_factory=list)
    saturated: float | None = None
    underflown: float | None = None
    kept: Tensor | None = None


class NonfiniteProbe:
    """Readings of a microbatch of `batch` sequences; rows by name. It is also an `observe.Observer`."""

    def __init__(self, engine: Engine, batch: int, keep: bool = False):
        self.rows: dict[str, TensorReading] = {}
        self.losses: Losses | None = None
        self._engine, self._batch, self._length, self._keep = engine, batch, 0, keep
        self._casts = Rows(engine.arena)

    @property
    def first_bad(self) -> TensorReading | None:
        """The first tensor with a number that is not finite. (Weights come before everything else.)"""
        return next((row for row in self.rows.values() if row.not_finite), None)

    @property
    def bad_sequences(self) -> list[int]:
        """Sequences of the first bad tensor that shows any."""
        return next((row.sequences for row in self.rows.values() if row.sequences), [])

    @torch.no_grad()
    def __call__(
        self, place: int, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format, live: Tensor | None = None
    ) -> None:
        """See `observe.Observer`."""
        at = self._casts.at(place)
        if at is None or x.numel() == 0:
            return
        name = self._casts.names[at]
        row = self._read(name, x, of_tokens=not name.endswith(":weight"))
        if row.saturated is None:
            sums = cast_sums(x, data, scale_inv, fmt).tolist()
            row.saturated, row.underflown = sums[SATURATED] / sums[ELEMENTS], sums[UNDERFLOWN] / sums[ELEMENTS]

    @torch.no_grad()
    def gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Read the gradient of a weight and free it (a `second_pass.OnGradient`)."""
        assert parameter.grad is not None
        self._read(f"{name.removesuffix('.weight')}:weight gradient", local(parameter.grad), of_tokens=False)
        parameter.grad = None

    def _read(self, name: str, x: Tensor, of_tokens: bool = True) -> TensorReading:
        """Read a tensor the first time that its name comes (recomputation repeats it). of_tokens: it may have token
        rows."""
        if name in self.rows:
            return self.rows[name]
        x = x.detach()
        bad = ~torch.isfinite(x)
        row = TensorReading(name, tuple(x.shape), x.numel(), int(bad.sum()), float(absolute_max(x)))
        lines = x.numel() // max(x.shape[-1], 1) if x.dim() else 0
        tokens = self._batch * self._length
        of_tokens &= ".experts." not in name  # their rows are sorted by expert
        if of_tokens and row.not_finite and lines == tokens:
            row.sequences = bad.view(self._batch, -1).any(1).nonzero().flatten().tolist()
        if self._keep:
            row.kept = x.to("cpu", copy=True)
        self.rows[name] = row
        return row

    def _unscaled(self, grad: Tensor) -> Tensor:
        scale = self._engine.loss_scale
        return grad if scale is None else grad.float() / scale.scale

    @contextmanager
    def watching(self, length: int) -> Iterator[None]:
        """Read all tensors that the model computes inside; sequences of `length` positions."""
        self._length = length
        model = self._engine.model
        hooks = []
        for name, module in model.named_modules():
            if isinstance(module, AmaxProbe):
                name = module.slot.names[0]
            elif module is not model.norm and not isinstance(module, Linear | GroupedLinear | Embedding | Block):
                continue
            hooks.append(module.register_forward_hook(self._hook(name)))
        try:
            with observing(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str):
        def seen(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
            x = output[0] if isinstance(output, tuple) else output
            self._read(name, x)
            if x.requires_grad:
                x.register_hook(lambda grad: self._read(f"{name}:grad", self._unscaled(grad)) and None)

        return seen


def probe_microbatch(
    engine: Engine, step: int, microbatch: int, tokens: Tensor, batch: int, keep: bool = False
) -> NonfiniteProbe:
    """Run forward and backward of microbatch `microbatch` of step `step`, tokens [b, S + 1], without effect on the run,
    with the current weights and scales. batch: sequences of a step, of all ranks. A collective if there are several
    ranks.

    keep: keep the tensors, too. The fault of `debug.inject` is injected if it is for that step.
    """
    probe = NonfiniteProbe(engine, len(tokens), keep)
    injector = engine.injector
    with without_side_effects(engine):
        if injector is not None:
            injector.before(step, microbatch)
        try:
            with probe.watching(tokens.shape[1] - 1):
                probe.losses = run(engine, tokens, batch, probe.gradient)
        finally:
            if injector is not None:
                injector.before(0, 0)
                refresh_weights(engine.model, force=True)  # the fault may have spoilt one of them
    return probe
