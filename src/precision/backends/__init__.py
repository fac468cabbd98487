"""Backends compute GEMMs behind one interface; the plan chooses the backend of an op.

`reference` is plain PyTorch on any device and defines the correct result; the others are tested against it.
`precision.backends.interface` defines the interface. A backend is imported when an op first requests it: `cuda` needs
Triton, which machines without a GPU lack. `transformer_engine` is not behind this interface: it serves whole layers
with its own modules (`precision.backends.transformer_engine`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from precision.backends.interface import Backend, GradOperand, WeightOperand
from precision.backends.reference import ReferenceBackend

_BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend()}


def get_backend(name: str) -> Backend:
    """Return the backend of that name, importing it on first use."""
    if name == "cuda" and name not in _BACKENDS:
        from precision.backends.cuda import CudaBackend

        _BACKENDS[name] = CudaBackend()
    return _BACKENDS[name]


@contextmanager
def replaced(name: str, backend: Backend) -> Iterator[None]:
    """Replace a backend by another object inside the context, for example by one that records calls for audits."""
    original, _BACKENDS[name] = get_backend(name), backend
    try:
        yield
    finally:
        _BACKENDS[name] = original
