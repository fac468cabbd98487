"""Ranks of a test, over gloo: joining them, the cases of a world size one after the other, gradients of all parts."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainer.launch.world import World
from trainer.parallel.collectives import all_sum
from trainer.parallel.shard_views import copies, local
from trainer.step.engine import Engine

Case = TypeVar("Case")


@contextmanager
def joined() -> Iterator[World]:
    """The ranks that run a test's program, as one of them."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    world = World(torch.device("cpu"), rank, rank, size, size)
    yield world
    world.barrier()  # rank 0 keeps the store, which the others may still read while they build a group
    dist.destroy_process_group()


def run_cases(cases: Mapping[int, Mapping[str, Case]], train: Callable[[str, Case, World], Any], out: Path) -> None:
    """As one of the ranks. Rank 0 writes what each case of this world size gives, as JSON."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, found = None, {}
    if size > 1:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
    for name, case in cases[size].items():
        control = None
        if store is not None:  # groups of its own, because each has threads and sockets
            dist.init_process_group("gloo", store=PrefixStore(name, store), rank=rank, world_size=size)
            control = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        world = World(torch.device("cpu"), rank, rank, size, size, control=control)
        found[name] = train(name, case, world)
        if rank == 0:
            out.write_text(json.dumps(found))
        world.barrier()
        if store is not None:
            dist.destroy_process_group()


def gradients(engine: Engine, world: World) -> dict[str, list[float]]:
    """Sum and norm of each parameter's first moment, which after one step is a tenth of its gradient, of all parts."""
    names, sums = [], []
    for name, state in engine.optimizer.state_dict().items():
        moment = local(state["exp_avg"]).double()
        own = torch.zeros(2).double() if moment.is_meta else torch.stack([moment.sum(), moment.square().sum()])
        names.append(name)
        sums.append(own / copies(state["exp_avg"]))
    total, squares = all_sum([torch.stack(sums)], world)[0].unbind(1)
    return dict(zip(names, torch.stack([total, squares.sqrt()], 1).tolist(), strict=True))
