"""The files below a checkpoint: shards of any number of ranks."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.shard_view import ShardView
from trainer.checkpoint.storage import SavedTensors, save_parts


def main(source: Path, target: Path) -> None:
    """One of two ranks: fills its shards from `source`, doubles them and writes them to `target`."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from trainer.parallel.shard_views import shard_view

    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 3))
    fully_shard(model)
    state = {name: shard_view(tensor) for name, tensor in model.state_dict().items()}
    parts = {name: part for name, part in state.items() if isinstance(part, ShardView)}
    assert len(parts) == 4
    SavedTensors(source).fill(parts)
    for part in parts.values():
        part.data.mul_(2)
    files = save_parts(target.with_name("writing"), target, parts, "{}", dist.group.WORLD)
    if dist.get_rank() == 0:
        ranks = ["rank00000.safetensors", "rank00001.safetensors"]
        assert files is not None and sorted(files) == [*ranks, "state.json", "tensors.json"], files
    else:
        assert files is None
    dist.destroy_process_group()


def test_shards_are_read_and_written_on_another_world_size(
    tmp_path: Path, assert_same: Any, start_ranks: Callable[..., None]
) -> None:
    """FSDP2 on two processes fills its shards from what one process wrote; one process reads what the two wrote."""
    source, target = tmp_path / "source", tmp_path / "target"
    state = {
        f"{layer}.{kind}": tensor
        for layer, n in ((0, 5), (1, 3))
        for kind, tensor in (("weight", torch.randn(n, 8 if n == 5 else 5)), ("bias", torch.randn(n)))
    }  # 5 and 3 rows: uneven shards
    save_parts(tmp_path / "w", source, {name: ShardView.whole(tensor) for name, tensor in state.items()}, "{}")
    start_ranks(__file__, 2, source, target)
    back = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    SavedTensors(target).fill({name: ShardView.whole(tensor) for name, tensor in back.items()})
    assert_same(back, {name: tensor * 2 for name, tensor in state.items()})


def test_a_target_of_another_dtype_takes_the_saved_values_rounded(tmp_path: Path, assert_same: Any) -> None:
    saved = torch.randn(7, 3)
    save_parts(tmp_path / "w", tmp_path / "at", {"t": ShardView.whole(saved)}, "{}")
    into = {"t": torch.empty(7, 3, dtype=torch.bfloat16)}
    SavedTensors(tmp_path / "at").fill({"t": ShardView.whole(into["t"])})
    assert_same(into["t"], saved.bfloat16())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
