"""Compiles kernels for `ahead`, several at once:  python -m precision.kernels.compile_server

Reads jobs from standard input, until it ends or none comes for two minutes, and forks a process for each, which writes
Triton's cache: the kernel, and its launcher, which Triton has compiled in C. It imports everything once and never uses
the GPU.
"""

import importlib
import io
import os
import pickle
import signal
import sys
from contextlib import suppress
from functools import reduce
from typing import Any

import triton
from triton.runtime import driver

from precision import kernels

PROCESSES = 16  # compile at once
IDLE = 120  # seconds without a job end it: some 100s of MB of imports are not kept for weeks


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, and its end closes the pipe
    os.nice(10)
    kernels.import_all()
    with suppress(Exception):  # without a driver there is no launcher
        from triton.backends.nvidia.driver import CudaDriver

        driver.set_active(CudaDriver())
    running = 0
    with suppress(EOFError):
        while True:
            signal.alarm(IDLE)  # which ends this process only, and not those that compile
            job = pickle.load(sys.stdin.buffer)
            signal.alarm(0)
            if running == min(PROCESSES, os.cpu_count() or 1):
                os.wait()
                running -= 1
            running += 1
            if os.fork() == 0:
                with suppress(Exception):  # the trainer compiles it, then, and reports what is wrong
                    source, target, options = _Kernels(io.BytesIO(job)).load()
                    kernel = triton.compile(source, target=target, options=options)
                    driver.active.launcher_cls(kernel.src, kernel.metadata)  # pyright: ignore[reportAttributeAccessIssue]
                os._exit(0)
    for _ in range(running):
        os.wait()


class _Kernels(pickle.Unpickler):
    """Reads what `ahead.Jobs` writes."""

    def persistent_load(self, pid: tuple[str, str]) -> Any:
        module, name = pid
        return reduce(getattr, name.split("."), importlib.import_module(module))


if __name__ == "__main__":
    main()
