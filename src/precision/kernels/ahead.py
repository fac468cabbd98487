"""Compiles kernels ahead of their first launch, several at once.

While torch.compile traces a block it calls operators on fake tensors, seconds before the block runs. At the first call
with some shapes an operator's own function runs on fake tensors, too, and Triton's hook for asynchronous compilation
sends what it would launch to `compile_server`, and its processes fill Triton's cache. A later launch finds its kernel
there, or compiles it. So such a function must keep no tensor between calls.

Threads would be simpler, but CPython 3.11 failed where two of them parsed Python, which Triton does ("AST constructor
recursion depth mismatch").
"""

import hashlib
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from triton.runtime import _async_compile
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from precision import operators
from precision.observe import unsampled

SOURCE = Path(__file__).parents[2]
PIPE = 1 << 20  # bytes: jobs may come before the server reads them


def compile_ahead() -> None:
    """From now on, compile the kernels of operators while graphs are traced."""
    if operators.on_trace is None:
        operators.on_trace = _Ahead()


class _Ahead:
    def __init__(self):
        self._calls: set[Any] = set()
        self._kernels: set[str] = set()
        self._server: subprocess.Popen[bytes] | None = None

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], more: dict[str, Any]) -> None:
        """Have compiled what function(*args, **more) launches. args, more: with fake tensors."""
        call = function, _layouts(args), _layouts(tuple(sorted(more.items())))
        if call in self._calls:
            return
        self._calls.add(call)
        # what fails here fails again where it is launched, and is reported there
        with suppress(Exception), unsampled(), self._compiling(), FakeTensorMode():
            function(*_fresh(args), **{key: _fresh(value) for key, value in more.items()})

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Have this thread's launches only compile, and fake tensors show how their data will be aligned."""
        if _async_compile.active_mode.get() is self:  # an operator of an operator
            yield
            return
        run, here = JITFunction.run, threading.get_ident()

        def only_compile(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(self, *args, grid=grid, warmup=warmup or threading.get_ident() == here, **options)

        before = _async_compile.active_mode.set(self)  # pyright: ignore[reportArgumentType]  (only `submit` is called)
        JITFunction.run = only_compile
        FakeTensor.data_ptr = lambda self: int(self.storage_offset()) * self.element_size()
        try:
            yield
        finally:
            del FakeTensor.data_ptr
            JITFunction.run = run
            _async_compile.active_mode.reset(before)

    def submit(self, key: str, compiled: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        """Have a kernel compiled that is in no cache (called by Triton, which takes None for "not now"). compiled: the
        function that would; its variables say what."""
        names, cells = compiled.__code__.co_freevars, compiled.__closure__ or ()
        known = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
        source, folder = known["src"], get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        if key in self._kernels or folder.get_group(f"{source.name[:150]}.json"):
            return
        self._kernels.add(key)
        if self._server is None or self._server.poll() is not None:  # not started yet, or ended idle
            self._server = _serve()
        assert self._server.stdin is not None
        Jobs(job := io.BytesIO()).dump((source, known["target"], known["options"].__dict__))
        pickle.dump(job.getvalue(), self._server.stdin)


class Jobs(pickle.Pickler):
    """Writes kernels as the names that they are imported by."""

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        return (obj.fn.__module__, obj.fn.__qualname__) if isinstance(obj, JITFunction) else None


def _serve() -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "precision.kernels.compile_server"],
        env={**os.environ, "PYTHONPATH": path},
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pipesize=PIPE,
    )


def _layouts(value: Any) -> Any:
    """Return what a kernel may be specialised for, in an argument of an operator."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, _unaligned(value)
    return tuple(map(_layouts, value)) if isinstance(value, (list, tuple)) else value


def _fresh(value: Any) -> Any:
    """Return an argument with other fake tensors of its layout in place of tensors, which an operator may change."""
    if isinstance(value, Tensor):
        first = _unaligned(value)
        span = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        data = torch.empty(first + max(span, 0), dtype=value.dtype, device=value.device)
        return data.as_strided(value.shape, value.stride(), first)
    return type(value)(map(_fresh, value)) if isinstance(value, (list, tuple)) else value


def _unaligned(tensor: Tensor) -> int:
    """Return by how many elements a tensor's data begins behind a multiple of 16 bytes."""
    return int(tensor.storage_offset()) * tensor.element_size() % 16 // tensor.element_size()
