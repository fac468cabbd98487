"""Compiles kernels ahead of their first launch, several at once.

While torch.compile traces a block it calls operators on fake tensors, seconds before the block runs. At the first call
with some shapes an operator's own function runs on fake tensors, too, with launches that only compile, in threads
(Triton's hook for asynchronous compilation). A later launch finds its kernel compiled, or compiles it.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from triton.runtime import _async_compile, driver
from triton.runtime.jit import JITFunction

from precision import operators

THREADS = 8


def compile_ahead() -> None:
    """From now on, compile the kernels of operators while graphs are traced."""
    if operators.on_trace is None:
        operators.on_trace = _Ahead()


class _Ahead:
    def __init__(self):
        self._threads = ThreadPoolExecutor(THREADS, "compile-ahead")
        self._calls: set[Any] = set()
        self._kernels: set[str] = set()

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], more: dict[str, Any]) -> None:
        """Compile what function(*args, **more) launches. args, more: with fake tensors."""
        call = function, _layouts(args), _layouts(tuple(sorted(more.items())))
        if call in self._calls:
            return
        self._calls.add(call)
        # what fails here fails again where it is launched, and is reported there
        with suppress(Exception), self._compiling():
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
        """Compile a kernel that this process has not compiled yet (called by Triton)."""
        if key not in self._kernels:
            self._kernels.add(key)
            self._threads.submit(_compile, compiled, keep)


def _compile(compiled: Callable[[], Any], keep: Callable[[Any], None]) -> None:
    """Compile a kernel and, in C, its launcher, which Triton caches, too."""
    kernel = compiled()
    driver.active.launcher_cls(kernel.src, kernel.metadata)  # pyright: ignore[reportAttributeAccessIssue]  (CUDA's has)
    keep(kernel)


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
        data = torch.empty(first + span, dtype=value.dtype, device=value.device)
        return data.as_strided(value.shape, value.stride(), first)
    return type(value)(map(_fresh, value)) if isinstance(value, (list, tuple)) else value


def _unaligned(tensor: Tensor) -> int:
    """Return by how many elements a tensor's data begins behind a multiple of 16 bytes."""
    return int(tensor.storage_offset()) * tensor.element_size() % 16 // tensor.element_size()
