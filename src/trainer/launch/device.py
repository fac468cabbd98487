"""The device of a training process, and checks of it before anything large is allocated.

Processes that prepare data import this module: it imports torch, which takes a second, where it is needed.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from precision.errors import UserError
from trainer.config import Device

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP = 1 << 30  # bytes
_CONTROL_GROUP = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
_CPU_SHARE = Path("/sys/fs/cgroup/cpu.max")


def tune_host(device: torch.device) -> None:
    """Apply speed settings that change no result. Call it after the long-lived objects exist.

    Python's collector skips modules and models that stay (scanning them took 4 % of a step). On a CPU under glibc,
    freed memory stays with the process: otherwise each step's large buffers would return to the kernel and be zeroed
    again (a quarter of the time of a step of deepseek_tiny).
    """
    gc.unfreeze()  # objects of an earlier run in this process are garbage now
    gc.collect()
    gc.freeze()
    if device.type == "cpu" and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, _KEEP)
            libc.mallopt(_M_TRIM_THRESHOLD, _KEEP)


def host_memory() -> float:
    """Return the bytes available to all processes of this host: its memory, or the limit of this control group."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CONTROL_GROUP:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(Path(path).read_text()))
    return float(min(limits))


def host_cpus() -> int:
    """Return the number of CPUs that this process may use: those of its affinity, or its control group's share."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = _CPU_SHARE.read_text().split()
        cpus = min(cpus, math.ceil(int(quota) / int(period)))
    return cpus


def pick_device(choice: Device) -> torch.device:
    """Return the device to train on. Raises UserError if a GPU is required and there is none."""
    import torch

    available = torch.cuda.is_available()
    if choice is Device.cuda and not available:
        raise UserError(
            "trainer.device=cuda: torch sees no GPU; set trainer.device=cpu or install a CUDA build of torch"
        )
    return torch.device("cuda" if available and choice is not Device.cpu else "cpu")
