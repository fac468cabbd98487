"""The storage below torch.distributed.checkpoint: shards, and dtypes that must not change."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# torch.distributed.checkpoint says so on one process, and pytest resets the filter that silences it.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def main(source: Path, target: Path) -> None:
    """One of two ranks: fills its shards from `source`, doubles them and writes them to `target`."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from trainer.checkpoint.storage import SafetensorsReader, SafetensorsWriter

    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 3))
    fully_shard(model)
    state = dict(model.state_dict())
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    load(state, storage_reader=SafetensorsReader(source), planner=DefaultLoadPlanner(False, False))
    for tensor in state.values():
        tensor.to_local().mul_(2)
    writer = SafetensorsWriter(target)
    save(state, storage_writer=writer, planner=DefaultSavePlanner(False, False))
    if dist.get_rank() == 0:
        assert sorted(writer.files) == ["rank00000.safetensors", "rank00001.safetensors", "tensors.json"], writer.files
    dist.barrier()
    dist.destroy_process_group()


def test_shards_are_read_and_written_on_another_world_size(
    tmp_path: Path, assert_same: Any, start_ranks: Callable[..., None]
) -> None:
    """FSDP2 on two processes fills its shards from what one process wrote; one process reads what the two wrote."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainer.checkpoint.dcp import save_parts
    from trainer.checkpoint.shard_view import ShardView
    from trainer.checkpoint.storage import SafetensorsReader, SafetensorsWriter

    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    state = {
        f"{layer}.{kind}": tensor
        for layer, n in ((0, 5), (1, 3))
        for kind, tensor in (("weight", torch.randn(n, 8 if n == 5 else 5)), ("bias", torch.randn(n)))
    }  # 5 and 3 rows: uneven shards
    save_parts(SafetensorsWriter(source), {name: ShardView.whole(tensor) for name, tensor in state.items()})
    start_ranks(__file__, 2, source, target)
    back = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load(back, storage_reader=SafetensorsReader(target), planner=DefaultLoadPlanner(False, False), no_dist=True)
    assert_same(back, {name: tensor * 2 for name, tensor in state.items()})


def test_reading_into_another_dtype_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainer.checkpoint.dcp import save_parts
    from trainer.checkpoint.shard_view import ShardView
    from trainer.checkpoint.storage import SafetensorsReader, SafetensorsWriter

    save_parts(SafetensorsWriter(tmp_path), {"t": ShardView.whole(torch.ones(3))})
    into = {"t": torch.ones(3, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException, match=r"t was saved as torch.float32"):
        load(into, storage_reader=SafetensorsReader(tmp_path), planner=DefaultLoadPlanner(False, False), no_dist=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
