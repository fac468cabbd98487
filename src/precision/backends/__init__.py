"""Backends compute GEMMs. One interface; the plan chooses the backend of an op.

`reference` is plain PyTorch on any device and the definition of right; the others are tested against it. What a backend
must offer: `precision.backends.interface`. A backend is imported when an op first asks for it: `cuda` needs Triton, and
machines without a GPU have none. `transformer_engine` is no object behind this interface: it serves whole layers with
modules of its own (`precision.backends.transformer_engine`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from precision.backends.interface import Backend, GradOperand, WeightOperand
from precision.backends.reference import ReferenceBackend

__all__ = ["Backend", "GradOperand", "WeightOperand", "get_backend", "replaced"]

_BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend()}
_ON_DEMAND = {"cuda": ("precision.backends.cuda", "CudaBackend")}  # name: (module, class)


def get_backend(name: str) -> Backend:
    """The backend of that name; imported on first use."""
    if name not in _BACKENDS:
        module, cls = _ON_DEMAND[name]
        _BACKENDS[name] = getattr(import_module(module), cls)()
    return _BACKENDS[name]


@contextmanager
def replaced(name: str, backend: Backend) -> Iterator[None]:
    """While inside, another object answers to a backend's name: one that records what passes, for audits."""
    original, _BACKENDS[name] = get_backend(name), backend
    try:
        yield
    finally:
        _BACKENDS[name] = original
