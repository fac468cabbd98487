"""The processes of a run: this one's place, and their messages about anything but tensors of the model.

    torchrun --nproc_per_node=8 train.py ...     one process a GPU; RANK, LOCAL_RANK, WORLD_SIZE in its environment

`init()` joins them: NCCL between GPUs, gloo between host memories. With GPUs the default process group has both
(`cpu:gloo,cuda:nccl`), and a tensor's device selects the backend. Messages between hosts (the run's folder, whether to
stop) are small and use gloo: they wait for no GPU.

A single process is a `World` of one, and imports nothing of torch.distributed.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from precision.errors import UserError
from trainer.launch.liveness.rank_group import RankGroup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

TIMEOUT = 1200.0
"""Default of `parallel.timeout`: seconds that a process waits in a collective for the others."""


@dataclass(frozen=True)
class World:
    """All processes of the run, seen from this one. With only a device: a single process."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    rank_group: RankGroup = field(default_factory=RankGroup)
    """Monitors the liveness of the processes."""
    control: "ProcessGroup | None" = None
    """A separate gloo group for messages between hosts while the model's collectives run."""
    store: "Store | None" = None
    timeout: float = TIMEOUT
    """Seconds that a collective waits for the others."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run folder and reports for all."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.size > 1

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank. A collective: all ranks call it; the others' values are ignored."""
        if not self.is_distributed:
            return value
        import torch.distributed as dist

        box: list[Any] = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T, named: str = "") -> list[T]:
        """Return every rank's `value`, by rank, on every rank. A collective.

        named: a word for work that may take longer than a collective's timeout (reading whole checkpoints): then there
        is none.
        """
        if not self.is_distributed:
            return [value]
        if named:
            key = f"{named}/{self.rank_group.launch.attempt}"
            self._set_flag(key)
            if self.is_first:
                self._await(key, range(self.size))
                self._set_flag(f"{key}/all")
            self._await(f"{key}/all", [0])
        import torch.distributed as dist

        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value)  # by gloo, which serves CPU tensors in the default group
        return box

    def gather_numbers(self, row: list[float]) -> list[list[float]]:
        """Gather equally many numbers from each rank: one message between hosts instead of two, nothing pickled."""
        if not self.is_distributed:
            return [row]
        import torch.distributed as dist

        local = torch.tensor(row, dtype=torch.float64)
        box = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(box, local)  # on the CPU: by gloo
        return [each.tolist() for each in box]

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.gather(None)

    def on_rank_0(self, ask: Callable[[], T]) -> T:
        """Return on every rank what `ask()` returns on rank 0. A collective; the others do not call `ask`."""
        return self.broadcast(ask() if self.is_first else cast(T, None))

    def coordinate(self, ask: Callable[[Callable[[A], list[B]]], T], part: Callable[[A], B], named: str) -> T:
        """Return on every rank what `ask(everyone)` returns on rank 0. A collective like `on_rank_0`, without a
        timeout. named: as for `gather`.

        everyone(work): returns `part(work)` of each rank, by rank. So rank 0 decides, and all do the work.
        """
        if not self.is_distributed:
            return ask(lambda work: [part(work)])
        key, turn = f"{named}/{self.rank_group.launch.attempt}", 0

        def say(more: bool, value: Any) -> None:
            nonlocal turn
            turn += 1
            self._set_flag(f"{key}/{turn}")
            self.broadcast((more, value))

        def everyone(work: A) -> list[B]:
            say(True, work)
            return self.gather(part(work), f"{key}/{turn}")

        if self.is_first:
            answer = ask(everyone)
            say(False, answer)
            return answer
        while True:
            turn += 1
            self._await(f"{key}/{turn}", [0])
            more, value = self.broadcast(cast("tuple[bool, Any]", None))
            if not more:
                return value
            self.gather(part(value), f"{key}/{turn}")

    @contextmanager
    def local_rank_0_first(self) -> Iterator[None]:
        """Run the code inside on one process of each node while its neighbours wait, then on these; all leave together.

        Unlike a collective it has no timeout: preparing a corpus may take long.
        """
        key, store = f"ahead/{self.rank_group.launch.attempt}", self.store  # torchrun's store outlives a restart
        if self.local_rank == 0:
            yield
        if store is not None:
            store.add(key, self.local_size if self.local_rank == 0 else 0)
            self._poll(lambda: store.add(key, 0) >= self.size)  # nodes may differ in their number of processes
        if self.local_rank != 0:
            yield

    def _set_flag(self, what: str) -> None:
        if self.store is not None:
            self.store.set(f"{what}/{self.rank}", "1")

    def _await(self, what: str, ranks: Iterable[int]) -> None:
        keys, store = [f"{what}/{rank}" for rank in ranks], self.store
        if store is not None:
            self._poll(lambda: store.check(keys))

    @staticmethod
    def _poll(done: Callable[[], bool]) -> None:
        pause = 0.01
        while not done():
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)  # thousands of ranks ask the one store


def init(device: torch.device, rank_group: RankGroup, timeout: float = TIMEOUT) -> World:
    """Join the other processes of `rank_group.launch`; call it once. device: its type chooses GPUs or CPUs.

    `rank_group.leave()` ends it. Returns the world, whose `device` is this process's own (cuda:LOCAL_RANK, made the
    current one). timeout: seconds that a collective waits. Raises UserError if this node has fewer GPUs than processes.
    """
    launch = rank_group.launch
    if device.type == "cuda" and (launch.under_torchrun or launch.size > 1):
        device = _own_gpu(launch.local_rank)
    if launch.size == 1:
        return World(device, rank_group=rank_group)
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    store = rank_group.connect()
    # NCCL's own watchdog aborts a process with a long dump and without names: it must come last
    limit, late = timedelta(seconds=timeout), timedelta(seconds=2 * timeout)
    gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=PrefixStore(f"groups/{launch.attempt}", store),
        rank=launch.rank,
        world_size=launch.size,
        timeout=late if gpu else limit,
        device_id=device if gpu else None,
    )
    control = cast("ProcessGroup", dist.new_group(backend="gloo", timeout=late))  # the rank group watches its time
    rank_group.mark_connected()
    rank_group.on_leave.append(dist.destroy_process_group)
    return World(
        device, launch.rank, launch.local_rank, launch.size, launch.local_size, rank_group, control, store, timeout
    )


def _own_gpu(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"--nproc_per_node={local_rank + 1} or more: this node has {count} GPU(s), and a process needs one for "
            f"itself; start with --nproc_per_node={count}, or train on CPUs with trainer.device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
