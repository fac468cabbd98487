"""Who computes a GEMM. One interface; the plan says which backend serves an op.

A backend is an object with these methods (shapes: R rows, K in features, N out features, G groups; offsets [G] int32
are the cumulative ends of each group's rows, None for a plain linear):

    quantize(x [..., K], scale_row, amax, fmt, recipe) -> data, scale_inv
    quantize_weight(w [N, K] | [G, N, K], scale_row, amax, fmt, recipe) -> WeightOperand
    forward(x, x_inv, weight, offsets, recipe)     -> y  [R, N]     = x w^T
    dgrad(dy, dy_inv, weight, offsets, recipe)     -> dx [R, K]     = dy w
    wgrad(dy_exact, dy, dy_inv, x, x_inv, offsets, recipe) -> dw [N, K] | [G, N, K] = dy^T x

`scale_inv` None marks an operand that is not quantised. `reference` is the definition of right; others are tested
against it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from precision.backends.reference import ReferenceBackend

_BACKENDS = {"reference": ReferenceBackend()}


def get_backend(name: str) -> ReferenceBackend:
    """The backend of that name."""
    return _BACKENDS[name]


@contextmanager
def replaced(name: str, backend: ReferenceBackend) -> Iterator[None]:
    """While inside, another object answers to a backend's name: one that records what passes, for audits."""
    original, _BACKENDS[name] = _BACKENDS[name], backend
    try:
        yield
    finally:
        _BACKENDS[name] = original
