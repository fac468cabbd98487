"""Host memory that a checkpoint is copied to before it is written.

Training continues as soon as the tensors are copied, so the copy is all that a save costs the trainer. All tensors
share one buffer that stays from save to save. It is allocated and, for tensors on a GPU, page-locked once: page-locking
costs many times as much as copying, and copying to pageable memory several times as much. The buffer is registered with
CUDA instead of taken from torch's pinned allocator, which rounds up to a power of two: up to twice the state in host
memory. `reserve` allocates it ahead of the first save.

torch's own DefaultStager is not used: in torch 2.11 it works once.
"""

import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64


class HostBuffers:
    """One reused host buffer for a set of named tensors."""

    def __init__(self) -> None:
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._copies: dict[str, Tensor] = {}
        self._unpin: weakref.finalize | None = None

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the memory for a `copy` of these tensors unless it exists; an older buffer is freed."""
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        if layout != self._layout:
            self.release()
            self._allocate(tensors, pin=any(tensor.is_cuda for tensor in tensors.values()))
            self._layout = layout

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous CPU copies of `tensors`, which may change from here on. Valid until the next call."""
        self.reserve(tensors)
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return dict(self._copies)

    def release(self) -> None:
        """Free the memory."""
        if self._unpin is not None:
            self._unpin()
        self._layout, self._copies, self._unpin = [], {}, None

    def _allocate(self, tensors: Mapping[str, Tensor], pin: bool) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
        buffer = torch.empty(starts[-1], dtype=torch.uint8).fill_(0)  # touch the pages now, so that they are mapped
        for (name, tensor), start, size in zip(tensors.items(), starts[:-1], sizes, strict=True):
            self._copies[name] = buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
        if pin and len(buffer):
            cudart: Any = torch.cuda.cudart()
            if int(cudart.cudaHostRegister(buffer.data_ptr(), len(buffer), 0)) == 0:
                # Unregister before the buffer is freed, also without `release`; not at exit, when CUDA is gone.
                self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, buffer.data_ptr())
                self._unpin.atexit = False
            else:
                with suppress(RuntimeError):  # takes the error, which the next launch would raise as its own
                    torch.ones((), device="cuda")
                gib = len(buffer) / 2**30
                warnings.warn(
                    f"{gib:.1f} GiB of host memory for checkpoints cannot be page-locked: saves stall longer",
                    stacklevel=2,
                )
