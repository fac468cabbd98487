"""Triton kernels of the `cuda` backend, one subject per file. Each is tested against a reference in plain PyTorch.

They run on Hopper GPUs, and in Triton's interpreter (TRITON_INTERPRET=1) on any machine, with bitwise equal casts.
"""

import importlib
import pkgutil


def import_all() -> None:
    """Import all modules of kernels."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
