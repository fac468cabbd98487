"""Who computes a GEMM. One interface; the plan says which backend serves an op.

`reference` is plain PyTorch on any device and the definition of right; the others are tested against it. What a backend
must offer: `precision.backends.interface`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from precision.backends.interface import Backend, GradOperand, WeightOperand
from precision.backends.reference import ReferenceBackend

__all__ = ["Backend", "GradOperand", "WeightOperand", "get_backend", "replaced"]

_BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend()}


def get_backend(name: str) -> Backend:
    """The backend of that name."""
    return _BACKENDS[name]


@contextmanager
def replaced(name: str, backend: Backend) -> Iterator[None]:
    """While inside, another object answers to a backend's name: one that records what passes, for audits."""
    original, _BACKENDS[name] = _BACKENDS[name], backend
    try:
        yield
    finally:
        _BACKENDS[name] = original
