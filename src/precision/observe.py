"""Observation of casts into FP8: input, output and scaling row. There are two modes:

    with observing(observer):       a separate eager pass; every cast is shown whole. Kernels that cast internally
        model(tokens)...            cannot show their input, so norms and feed-forward layers are composed of plain
                                    ops instead, with the backend's own casts and GEMMs between them. The numbers may
                                    differ from those of the kernels by roundings

    with sampling(observer):        the training step itself, compiled or not, with the same kernels and bits; of each
        train_step(...)             tensor every k-th row is shown, whole rows and at most `SAMPLE` of them a cast;
                                    weights on a GPU whole

Sampling is host code. A compiled graph holds the casting kernels as custom operators, whose bodies are Python that runs
at each call and checks `if is_sampled()` after the cast. So a sampled step compiles nothing again, and other steps pay
for an `if`. Rows that a kernel never had in memory are recomputed for the sample alone, by the same kernels. Where
plain ops cast and are traced, a separate operator (`octet::report`) follows them. A CUDA graph replays kernels and no
Python: a sampled pass has its own graph, which shows its casts to the sampler that was set when it was recorded. So
observers work on the device alone, on memory that stays allocated.

The slot's `place` identifies a cast: its arena row as a number in host memory. Compiled blocks share a graph, and
inductor may copy a GPU tensor, so an address identifies nothing.

The state is one per process, not per thread: on a GPU the backward pass runs in an autograd thread. Traced code may
call `is_observed`, since observers run eagerly, but never `is_sampled`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from precision.formats import BY_NAME, Format

SAMPLE = 4096
"""Maximum number of rows of a cast that the sampler is shown."""
SAMPLE_ON_CPU = 32
"""The same on a CPU, where a step has few rows and each is expensive."""


class Observer(Protocol):
    """Callback for each cast."""

    def __call__(
        self, place: int, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format, live: Tensor | None = None, /
    ) -> None:
        """Observe the cast of x into `data`, of its shape and in `fmt`, read as data * scale_inv (see `Operand`,
        `WeightOperand`).

        place: the tensor's first row in the arena. live [rows] int: below 0 where a row of x is unused and may hold
        anything; None: all rows count.
        """
        ...


_observer: Observer | None = None
_sampler: Observer | None = None
_samplings = 0


def is_observed() -> bool:
    """Return whether an observer is set, so that layers avoid kernels that cast internally."""
    return _observer is not None


def is_sampled() -> bool:
    """Return whether a sampler is set for the current step. For operators' bodies and code that is never traced."""
    return _sampler is not None


def sampler() -> Observer | None:
    """Return the sampler of the current step."""
    return _sampler


def sampling_number() -> int:
    """Return how many times sampling has begun. A weight is cast repeatedly from the same numbers, whenever it has been
    gathered; this number lets it be shown once."""
    return _samplings


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Show every cast made inside to `observer`, whole. Nothing inside may be compiled. A weight is seen only if it is
    made again inside; Transformer Engine shows nothing."""
    global _observer
    assert _observer is None and _sampler is None, "one observer at a time"
    _observer = observer
    try:
        yield
    finally:
        _observer = None


@contextmanager
def sampling(observer: Observer) -> Iterator[None]:
    """Show rows of every cast made inside to `observer`."""
    global _sampler, _samplings
    assert _observer is None and _sampler is None, "one observer at a time"
    _sampler, _samplings = observer, _samplings + 1
    try:
        yield
    finally:
        _sampler = None


@contextmanager
def unsampled() -> Iterator[None]:
    """Pause sampling inside, for passes that are not part of the step (a warm-up, a recording)."""
    global _sampler
    kept, _sampler = _sampler, None
    try:
        yield
    finally:
        _sampler = kept


def every(x: Tensor) -> slice:
    """Return the rows of x [R, ...] to show: every k-th. k is odd, so that it aligns neither with sequences nor with
    tiles of experts' rows."""
    most = SAMPLE_ON_CPU if x.device.type == "cpu" else SAMPLE
    return slice(None, None, -(-x.shape[0] // most) | 1)


def part_of(scale_inv: Tensor, part: slice) -> Tensor:
    """Return the inverse scales of these rows."""
    return scale_inv[part] if scale_inv.dim() else scale_inv


def show(
    place: Tensor | None, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format, live: Tensor | None = None
) -> None:
    """Show all of x to the observer or sampler. place: a slot's; None: nothing is shown. Must not be traced."""
    watcher = _observer or _sampler
    if watcher is not None and place is not None:
        watcher(int(place), x.detach(), data, scale_inv, fmt, live)


def show_rows(place: Tensor | None, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format) -> None:
    """Show rows of x [..., C] to the sampler. Must not be traced."""
    if place is None or not x.numel():
        return
    x, data = x.reshape(-1, x.shape[-1]), data.reshape(-1, data.shape[-1])
    inv = scale_inv.reshape(-1, scale_inv.shape[-1]) if scale_inv.dim() else scale_inv
    part = every(x)
    show(place, x[part], data[part], part_of(inv, part), fmt)


def show_weight(place: Tensor | None, weight: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format) -> None:
    """Show a weight [(G,) N, K]: the whole weight, or on a CPU every k-th row of N to the sampler."""
    if _sampler is not None and weight.device.type == "cpu":
        N = weight.shape[-2]
        rows = torch.arange(0, N, -(-weight[..., 0].numel() // SAMPLE_ON_CPU) | 1)
        weight, data = weight[..., rows, :], data.view(torch.uint8)[..., rows, :].view(data.dtype)
        if scale_inv.dim() >= 2 and scale_inv.shape[-2] > 1:  # one scale per row, or per block of rows
            scale_inv = scale_inv[..., rows if scale_inv.shape[-2] == N else rows // 128, :]
    show(place, weight, data, scale_inv, fmt)


def report(place: Tensor | None, amax: Tensor, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format) -> None:
    """Show a cast of x [..., C] made by plain ops, traced or not. amax: the arena row that the cast has raised."""
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
    """`report` in a graph. It declares a mutation of amax that it does not make; else it would be removed as dead
    code."""
    if is_sampled():
        show_rows(place, x, data, scale_inv, BY_NAME[fmt])


@_report.register_fake
def _(amax: Tensor, place: Tensor, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: str) -> None:
    return None
