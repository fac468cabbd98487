"""Exchange of blocks of rows among P processes without host synchronisation.

Each process has tensors of P blocks of C rows, block p for process p. C is fixed; the number of used rows in a block is
on the device. So the host needs no size, and a CUDA graph can hold the whole exchange.

    EqualSplits       one collective a tensor, whole blocks, used or not: any network, and gloo
    SymmetricMemory   GPUs of one node that write into each other's memory over NVLink: rows in use only, all tensors in
                      one go. One barrier before, when all processes have read the previous rows, and one after, when
                      all rows have arrived. Plain stores and torch's barriers; nothing of NVLink multicast
"""

import ctypes
import os
import socket
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNED = 256  # bytes
ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class Transport(Protocol):
    """Exchanges rows in the group. All its processes make the same calls, in the same order."""

    group: dist.ProcessGroup

    def exchange(self, rows: tuple[Tensor, ...], sent: Tensor, arriving: Tensor | None, keep: bool) -> list[Tensor]:
        """Exchange rows [P * C, ...], contiguous, of whole 32-bit words; return the received rows, of the same shapes.

        C may differ between the tensors. sent, arriving [P] int64: how many of each C are in use, to and from each
        process. arriving None: all are. keep: the caller owns the result, with zeros in unused rows; otherwise unused
        rows hold anything, and the result is valid only until the next call.
        """
        ...


class EqualSplits:
    """Transport by collectives of equal blocks."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def exchange(self, rows: tuple[Tensor, ...], sent: Tensor, arriving: Tensor | None, keep: bool) -> list[Tensor]:
        """See `Transport`; unused rows are sent too, as zeros."""
        out = [torch.empty_like(one) for one in rows]
        for ours, theirs in zip(rows, out, strict=True):
            # as bytes: the values do not matter, and not every backend supports every format
            dist.all_to_all_single(theirs.view(torch.uint8), ours.view(torch.uint8), group=self.group)
        return out


class SymmetricMemory:
    """Transport by stores into other GPUs' memory. wait: seconds after which a process that waits for another one ends
    with a GPU error; 0: never.

    The first exchange allocates the memory, and so does a later one that is larger: a collective that synchronises.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, wait: float = 0.0):
        self.group, self._device, self._wait = group, device, int(1000 * wait)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._inbox = torch.empty(0)
        self._handle = self._inboxes = None

    def exchange(self, rows: tuple[Tensor, ...], sent: Tensor, arriving: Tensor | None, keep: bool) -> list[Tensor]:
        from precision.kernels.peers import push, take

        offsets, need = [], 0
        for one in rows:
            offsets.append(need)
            need += -(-one.numel() * one.element_size() // ALIGNED) * ALIGNED
        if need > self._inbox.numel():
            self._make(need)
        assert self._handle is not None and self._inboxes is not None
        self._handle.barrier(channel=0, timeout_ms=self._wait)
        for one, offset in zip(rows, offsets, strict=True):
            push(one, self._inboxes, sent, offset, self._rank)
        self._handle.barrier(channel=0, timeout_ms=self._wait)
        received = [
            self._inbox[offset : offset + one.numel() * one.element_size()].view(one.dtype).view(one.shape)
            for one, offset in zip(rows, offsets, strict=True)
        ]
        if not keep:
            return received
        return [one.clone() if arriving is None else take(one, arriving) for one in received]

    def _make(self, size: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        # torch would otherwise set up NVLink multicast for this memory, which is not used
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        torch.cuda.synchronize(self._device)
        dist.barrier(self.group)  # no process writes into the old memory any more
        self._handle = self._inboxes = None
        self._inbox = torch.empty(0)
        size = -(-size // 2**21) * 2**21  # the smallest unit that GPUs map
        self._inbox = symm_mem.empty(size, dtype=torch.uint8, device=self._device)
        self._handle = symm_mem.rendezvous(self._inbox, self.group.group_name)
        buffers = [self._handle.get_buffer(p, (size,), torch.uint8) for p in range(self._size)]
        self._inboxes = torch.tensor([one.data_ptr() for one in buffers], dtype=torch.int64, device=self._device)


def shares_memory(group: dist.ProcessGroup, device: torch.device, proved: bool = True) -> bool:
    """Return whether the processes of each group are on one machine, with separate GPUs that reach each other's memory
    and can run torch's barriers in it. group: this process's; proved: and whether its kernels are right. A collective
    of all, since all reduce what slots need."""
    here = socket.gethostname(), device.index if device.type == "cuda" else None
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, here, group=group)
    hosts, gpus = zip(*found, strict=True)
    fits = proved and len(set(hosts)) == 1 and None not in gpus and len(set(gpus)) == len(gpus)
    if fits:
        others = [gpu for gpu in gpus if gpu != device.index]
        fits = all(torch.cuda.can_device_access_peer(device, gpu) and has_atomics(device.index, gpu) for gpu in others)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, fits)
    return all(everyone)


def has_atomics(gpu: int, other: int) -> bool:
    """Return whether atomic operations of one GPU work in the memory of another: over NVLink, but not over PCIe, where
    a barrier would wait for ever (CUDA's driver API, cuDeviceGetP2PAttribute)."""
    supported = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(supported), ATOMICS, gpu, other)
    except OSError:
        return False
    return not failed and bool(supported.value)
