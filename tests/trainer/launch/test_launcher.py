"""The place of a process among those of its job, as a launcher's variables say it, and what it waits for."""

import threading

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from trainer.launch.launcher import Launch
from trainer.launch.world import World


def test_without_a_launcher_a_process_is_the_only_one():
    launch = Launch.read({})
    assert launch == Launch() and launch.is_first and launch.size == 1 and not launch.under_torchrun


PLACE = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: "),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a number"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK: not set, where WORLD_SIZE=2 is; start with torchrun"),
        (PLACE | {"RANK": "2"}, "RANK=2: must be a number from 0 to WORLD_SIZE-1=1"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE=2: MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a"}, "LOCAL_RANK: not set, where WORLD_SIZE=2 is"),
        (PLACE | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: must be a number from 1 to WORLD_SIZE=2"),
        (PLACE | {"MASTER_PORT": "1"}, "LOCAL_RANK=1: must be a number from 0 to LOCAL_WORLD_SIZE-1=0"),
        (PLACE | {"LOCAL_RANK": "0", "MASTER_PORT": "99999"}, "MASTER_PORT=99999: must be a number from 1 to 65535"),
        (PLACE | {"LOCAL_RANK": "0", "MASTER_PORT": "0"}, "MASTER_PORT=0: must be a number from 1 to 65535"),
    ],
)
def test_an_environment_that_is_not_a_launchers_is_refused(environment: dict[str, str], says: str):
    with pytest.raises(ValueError, match=says):
        Launch.read(environment)


def test_a_world_of_one_sends_no_message():
    world = World(torch.device("cpu"))
    with world.local_rank_0_first():
        assert (world.broadcast(3), world.gather(3), world.on_rank_0(lambda: 4)) == (3, [3], 4)
    world.barrier()
    assert not torch.distributed.is_initialized() and not world.rank_group.connected


def test_nodes_of_different_sizes_prepare_once_each_and_go_on_together():
    store, done = HashStore(), []

    def enter(rank: int, local_rank: int, local_size: int) -> None:
        with World(torch.device("cpu"), rank, local_rank, 4, local_size, store=store).local_rank_0_first():
            done.append(rank)

    nodes = [(0, 0, 3), (1, 1, 3), (2, 2, 3), (3, 0, 1)]
    ranks = [threading.Thread(target=enter, args=place, daemon=True) for place in nodes]
    for rank in (1, 2, 0):  # the leader of the other node comes last
        ranks[rank].start()
    ranks[0].join(0.2)
    assert done == [0]
    ranks[3].start()
    for rank in ranks:
        rank.join(10)
    assert done[:2] == [0, 3] and sorted(done) == [0, 1, 2, 3]
