"""Watching tensors being quantised: what went in, what came out, and whose arena row it was.

    with observing(observer):
        model(tokens).total.backward()

Inside, every cast into FP8 that a scaling row stands for is told to the observer, whichever backend makes it: the input
and the output gradient of each GEMM and its weight (made anew inside, or it is not seen). Kernels that cast on the way
show nothing of what they cast, so they step aside: norms and feed-forward layers are put together from plain ops, as
the reference backend does, with the backend's own casts and GEMMs between them. The numbers may then differ from those
of the kernels by roundings.

The state is one per process, not per thread: on a GPU the backward pass runs in a thread of autograd's. Nothing here
may be compiled: whoever observes runs eagerly.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor

from precision.backends import Backend, GradOperand, WeightOperand, get_backend, replaced
from precision.formats import Format
from precision.plan import GemmRecipe
from precision.resolve import CUDA, REFERENCE

Observer = Callable[[Tensor, Tensor, Tensor, Tensor, Format], None]
"""Is told of casts: (amax_row, x, data, scale_inv, fmt). x was cast into `data`, of its shape and in `fmt`, which is
read as data * scale_inv (see `Operand`, `WeightOperand`). amax_row: the view into the arena that the tensor's slot
has."""

_observer: Observer | None = None


def is_observed() -> bool:
    """Whether somebody watches, so that kernels that cast on the way are to step aside."""
    return _observer is not None


def report(amax_row: Tensor | None, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format) -> None:
    """Tell whoever watches of a cast that has not passed a backend's `quantize*`."""
    if _observer is not None and amax_row is not None:
        _observer(amax_row, x.detach(), data, scale_inv, fmt)


@contextmanager
def observing(observer: Observer, backends: tuple[str, ...] = (REFERENCE,)) -> Iterator[None]:
    """Tell `observer` of every cast made inside. backends: whose doors to watch (`Plan.gemms`' recipes name them);
    Transformer Engine has none."""
    global _observer
    assert _observer is None, "one observer at a time"
    with ExitStack() as doors:
        for name in backends:
            if name in (REFERENCE, CUDA):
                doors.enter_context(replaced(name, cast(Backend, _Reporting(get_backend(name)))))
        _observer = observer
        try:
            yield
        finally:
            _observer = None


class _Reporting:
    """A backend that tells of what it quantises."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def quantize(
        self, x: Tensor, scale_row: Tensor, amax_row: Tensor, fmt: Format, recipe: GemmRecipe
    ) -> tuple[Tensor, Tensor]:
        """See `Backend`."""
        data, inv = self._backend.quantize(x, scale_row, amax_row, fmt, recipe)
        report(amax_row, x, data, inv, fmt)
        return data, inv

    def quantize_grad(self, dy: Tensor, scale_row: Tensor, amax_row: Tensor, recipe: GemmRecipe) -> GradOperand:
        """See `Backend`."""
        made = self._backend.quantize_grad(dy, scale_row, amax_row, recipe)
        if made.scale_inv is not None:
            report(amax_row, dy, made.data, made.scale_inv, recipe.grad)
        return made

    def quantize_weight(
        self,
        master: Tensor,
        scale_row: Tensor,
        amax_row: Tensor,
        fmt: Format,
        recipe: GemmRecipe,
        out: WeightOperand | None,
    ) -> WeightOperand:
        """See `Backend`."""
        made = self._backend.quantize_weight(master, scale_row, amax_row, fmt, recipe, out)
        assert made.scale_inv is not None
        report(amax_row, master, made.data, made.scale_inv, fmt)
        return made
