"""The processes of a run: which one this is, and how they talk about anything that is not a tensor of the model.

    torchrun --nproc_per_node=8 train.py ...     one process a GPU; RANK, LOCAL_RANK, WORLD_SIZE in its environment

`init()` joins them: NCCL between GPUs, gloo between host memories. With GPUs the default process group carries both
(`cpu:gloo,cuda:nccl`), so that tensors go by the one that their device has. What hosts tell each other (the run's
folder, whether to stop) is small and goes by gloo: it waits for no GPU.

A process by itself is a `World` of one, and nothing of torch.distributed is imported for it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch

from trainer.launch import Launch

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds that a process waits in a collective for the others. The first step compiles, within this time."""


@dataclass(frozen=True)
class World:
    """All processes of the run, seen from this one. Without arguments but a device: a process by itself."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    launch: Launch = field(default_factory=Launch)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run folder and speaks for all."""
        return self.rank == 0

    @property
    def many(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    def share(self, value: T) -> T:
        """Rank 0's `value`, on every rank. A collective: all ranks call it, the others' values are not looked at."""
        if not self.many:
            return value
        import torch.distributed as dist

        box: list[Any] = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank, on every rank. A collective."""
        if not self.many:
            return [value]
        import torch.distributed as dist

        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value)  # by gloo, which serves CPU tensors in the default group
        return box

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.gather(None)

    @contextmanager
    def first_of_node_goes_ahead(self) -> Iterator[None]:
        """One process of each node runs what is inside while its neighbours wait, then they run it. A collective."""
        if self.local_rank == 0:
            yield
        self.barrier()
        if self.local_rank != 0:
            yield


def init(device: torch.device, launch: Launch, timeout: float = TIMEOUT) -> World:
    """Join the other processes of `launch`; call it once. device: its type chooses GPUs or CPUs.

    Returns the world, whose `device` is this process's own (cuda:LOCAL_RANK, made the current one). timeout: seconds
    that a collective waits. ValueError if this node has fewer GPUs than processes.
    """
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if launch.local_rank >= count:
            raise ValueError(
                f"LOCAL_RANK={launch.local_rank}: this node has {count} GPU(s), one for each process; "
                f"start it with --nproc_per_node={count}, or train on CPUs with trainer.device=cpu"
            )
        device = torch.device("cuda", launch.local_rank)
        torch.cuda.set_device(device)
    if launch.size == 1:
        return World(device, launch=launch)
    import torch.distributed as dist

    # a rank whose peer is gone must not wait on: NCCL's watchdog ends it, with a dump of what it waited for
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    bound = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        backend, rank=launch.rank, world_size=launch.size, timeout=timedelta(seconds=timeout), **bound
    )
    return World(device, launch.rank, launch.local_rank, launch.size, launch.local_size, launch)


def leave(world: World) -> None:
    """Take this process out of the group, after all have done their work. A collective."""
    if world.many:
        import torch.distributed as dist

        world.barrier()
        dist.destroy_process_group()
