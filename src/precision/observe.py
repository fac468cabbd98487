"""Observing casts into FP8: input, output, and the scaling row. In two ways:

    with observing(observer):       apart. A pass made for the purpose, eager; every cast is shown whole. Kernels that
        model(tokens)...            cast on the way show nothing of what they cast, so they step aside: norms and
                                    feed-forward layers are put together from plain ops with the backend's own casts and
                                    GEMMs between them. The numbers may differ from those of the kernels by roundings

    with sampling(observer):        in passing. The step itself, compiled or not, kernels and bits as ever; of each
        train_step(...)             tensor every k-th row is shown, whole rows and at most `SAMPLE` of them a cast;
                                    weights on a GPU whole

What samples is host code. A compiled graph holds the casting kernels as custom operators, whose bodies are Python that
runs at each call; there, after the cast, stands `if is_sampled()`. So nothing is compiled again for a step that is
sampled, and one that is not pays for an `if`. Rows that a kernel never had in memory are made again, for the sample
alone, by the same kernels. Where plain ops cast and are traced, an operator that does nothing else (`octet::report`)
stands behind them. A CUDA graph replays kernels and no Python: a graph of a sampled pass is one of its own, which shows
its casts to the sampler that was set when it was recorded. So observers work on the device alone, on memory that stays.

Whose a cast is goes by the slot's `place`, its row of the arena as a number in host memory: compiled blocks share a
graph, and of a tensor on the GPU inductor may hand on a copy, so that its address identifies nothing.

The state is one per process, not per thread: on a GPU the backward pass runs in a thread of autograd's. Code that is
traced may ask `is_observed`, since observers run eagerly, and never `is_sampled`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from precision.formats import BY_NAME, Format

SAMPLE = 4096
"""The most rows of a cast that the sampler is shown, ..."""
SAMPLE_ON_CPU = 32
"""... and on a CPU, where a step has few rows and each is expensive."""


class Observer(Protocol):
    """Called with each cast."""

    def __call__(
        self, place: int, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format, live: Tensor | None = None, /
    ) -> None:
        """x was cast into `data`, of its shape and in `fmt`, which is read as data * scale_inv (see `Operand`,
        `WeightOperand`). place: the tensor's first row in the arena. live [rows] int: below 0 where a row of x stands
        for nothing and may hold anything; None: all rows count."""
        ...


_observer: Observer | None = None
_sampler: Observer | None = None
_samplings = 0


def is_observed() -> bool:
    """Whether an observer is set, so that layers leave out kernels that cast on the way."""
    return _observer is not None


def is_sampled() -> bool:
    """Whether a sampler is set for the current step. For operators' bodies and code that is never traced."""
    return _sampler is not None


def sampler() -> Observer | None:
    """Who samples the step that runs."""
    return _sampler


def sampling_number() -> int:
    """How many times sampling has begun: what is cast repeatedly from the same numbers (a weight, whenever it has been
    gathered) is shown once."""
    return _samplings


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell `observer` of every cast made inside, whole. Nothing inside may be compiled. A weight has to be made again
    inside, or it is not seen; Transformer Engine shows nothing."""
    global _observer
    assert _observer is None and _sampler is None, "one observer at a time"
    _observer = observer
    try:
        yield
    finally:
        _observer = None


@contextmanager
def sampling(observer: Observer) -> Iterator[None]:
    """Tell `observer` of rows of every cast made inside."""
    global _sampler, _samplings
    assert _observer is None and _sampler is None, "one observer at a time"
    _sampler, _samplings = observer, _samplings + 1
    try:
        yield
    finally:
        _sampler = None


@contextmanager
def unsampled() -> Iterator[None]:
    """Inside, passes that are no step's own (a warm-up, a recording) go unseen."""
    global _sampler
    kept, _sampler = _sampler, None
    try:
        yield
    finally:
        _sampler = kept


def every(x: Tensor) -> slice:
    """Which rows of x [R, ...] are shown: every k-th. k is odd, so that it falls in step neither with sequences nor
    with tiles of experts' rows."""
    most = SAMPLE_ON_CPU if x.device.type == "cpu" else SAMPLE
    return slice(None, None, -(-x.shape[0] // most) | 1)


def part_of(scale_inv: Tensor, part: slice) -> Tensor:
    """Inverse scales of these rows."""
    return scale_inv[part] if scale_inv.dim() else scale_inv


def show(
    place: Tensor | None, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format, live: Tensor | None = None
) -> None:
    """Show all of x to the observer or sampler. place: of a slot; None: of no slot. Not to be traced."""
    watcher = _observer or _sampler
    if watcher is not None and place is not None:
        watcher(int(place), x.detach(), data, scale_inv, fmt, live)


def show_rows(place: Tensor | None, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format) -> None:
    """Show rows of x [..., C] to the sampler. Not to be traced."""
    if place is None or not x.numel():
        return
    x, data = x.reshape(-1, x.shape[-1]), data.reshape(-1, data.shape[-1])
    inv = scale_inv.reshape(-1, scale_inv.shape[-1]) if scale_inv.dim() else scale_inv
    part = every(x)
    show(place, x[part], data[part], part_of(inv, part), fmt)


def show_weight(place: Tensor | None, weight: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format) -> None:
    """Show a weight [(G,) N, K]: all of it; on a CPU every k-th row of N to the sampler."""
    if _sampler is not None and weight.device.type == "cpu":
        N = weight.shape[-2]
        rows = torch.arange(0, N, -(-weight[..., 0].numel() // SAMPLE_ON_CPU) | 1)
        weight, data = weight[..., rows, :], data.view(torch.uint8)[..., rows, :].view(data.dtype)
        if scale_inv.dim() >= 2 and scale_inv.shape[-2] > 1:  # of rows, or of blocks of them
            scale_inv = scale_inv[..., rows if scale_inv.shape[-2] == N else rows // 128, :]
    show(place, weight, data, scale_inv, fmt)


def report(place: Tensor | None, amax: Tensor, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format) -> None:
    """Tell of a cast of x [..., C] that plain ops have made, traced or not. amax: the arena row that it has raised."""
    if place is None:
        return
    if torch.compiler.is_compiling():
        _report(amax, place, x, data, scale_inv, fmt.name)
    elif is_observed():
        show(place, x, data, scale_inv, fmt)
    elif is_sampled():
        show_rows(place, x, data, scale_inv, fmt)


@torch.library.custom_op("octet::report", mutates_args=("amax",))
def _report(amax: Tensor, place: Tensor, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: str) -> None:
    """`report` in a graph. It declares a change of amax, which it does not make: else it were removed as dead code."""
    if is_sampled():
        show_rows(place, x, data, scale_inv, BY_NAME[fmt])


@_report.register_fake
def _(amax: Tensor, place: Tensor, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: str) -> None:
    return None
