"""Messages over gloo, in one process."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from models.messages import start_gather, wait


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_gathers_in_flight_on_a_cpu_do_not_run_gloos_coalesced_all_gather(tmp_path: Path) -> None:
    """Two of them at once on one group corrupt the heap, in some of many thousand rounds: see `start_gather`."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        sent = [torch.randn(3, 5), torch.randn(5, 3).T, torch.arange(7)]
        with Operators() as ran:
            started = [start_gather(x, 1, group.group_name) for x in sent]
        for x, pieces in zip(sent, started, strict=True):
            assert torch.equal(wait(pieces), x[None])
        messages = [name for name in ran.names if name.startswith("_c10d_functional::")]
        assert messages == ["_c10d_functional::all_to_all_single"] * len(sent)
    finally:
        dist.destroy_process_group()
