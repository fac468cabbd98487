"""What a training process asks of the machine it runs on, before it allocates anything large."""

import ctypes
import gc
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP = 1 << 30  # bytes


def tune_host(device: torch.device) -> None:
    """Settings for speed that change no result. Call it when the long-lived objects exist.

    Python's collector need not look again at modules and models that stay (it took 4 % of a step). On a CPU under
    glibc, freed memory stays with the process: each step's large buffers would else go back to the kernel and be zeroed
    anew (a quarter of the time of a step of deepseek_tiny).
    """
    gc.unfreeze()  # what an earlier run in this process left is garbage by now
    gc.collect()
    gc.freeze()
    if device.type == "cpu" and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, _KEEP)
            libc.mallopt(_M_TRIM_THRESHOLD, _KEEP)
