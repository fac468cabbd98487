"""The storage below torch.distributed.checkpoint: shards, and dtypes that must not change."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# torch.distributed.checkpoint says so on one process, and pytest resets the filter that silences it.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHARDED = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainer.checkpoint.storage import SafetensorsReader, SafetensorsWriter

rank, world, store, source, target = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
model = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 3))
fully_shard(model)
state = dict(model.state_dict())
assert all(isinstance(tensor, DTensor) for tensor in state.values())
load(state, storage_reader=SafetensorsReader(Path(source)), planner=DefaultLoadPlanner(False, False))
for tensor in state.values():
    tensor.to_local().mul_(2)
writer = SafetensorsWriter(Path(target))
save(state, storage_writer=writer, planner=DefaultSavePlanner(False, False))
if rank == 0:
    assert sorted(writer.files) == ["rank00000.safetensors", "rank00001.safetensors", "tensors.json"], writer.files
dist.barrier()
dist.destroy_process_group()
"""


def test_shards_are_read_and_written_on_another_world_size(tmp_path: Path, assert_same: Any) -> None:
    """FSDP2 on two processes fills its shards from what one process wrote; one process reads what the two wrote."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainer.checkpoint.checkpointer import save_parts
    from trainer.checkpoint.part import Part
    from trainer.checkpoint.storage import SafetensorsReader, SafetensorsWriter

    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    state = {
        f"{layer}.{kind}": tensor
        for layer, n in ((0, 5), (1, 3))
        for kind, tensor in (("weight", torch.randn(n, 8 if n == 5 else 5)), ("bias", torch.randn(n)))
    }  # 5 and 3 rows: uneven shards
    save_parts(SafetensorsWriter(source), {name: Part.whole(tensor) for name, tensor in state.items()})
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), "2", str(tmp_path / "store"), str(source), str(target)],
            stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    back = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load(back, storage_reader=SafetensorsReader(target), planner=DefaultLoadPlanner(False, False), no_dist=True)
    assert_same(back, {name: tensor * 2 for name, tensor in state.items()})


def test_reading_into_another_dtype_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainer.checkpoint.checkpointer import save_parts
    from trainer.checkpoint.part import Part
    from trainer.checkpoint.storage import SafetensorsReader, SafetensorsWriter

    save_parts(SafetensorsWriter(tmp_path), {"t": Part.whole(torch.ones(3))})
    into = {"t": torch.ones(3, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException, match=r"t was saved as torch.float32"):
        load(into, storage_reader=SafetensorsReader(tmp_path), planner=DefaultLoadPlanner(False, False), no_dist=True)
