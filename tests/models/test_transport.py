"""Shared memory carries what collectives carry: processes on a CPU write into files that all of them have mapped, by
the kernels that write into other GPUs' memory. The processes run this file as a program."""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from models.transport import has_atomics

pytest.importorskip("triton", reason="Triton is missing")

SIZE = 2


class Shared:
    """torch's symmetric memory, of files in a folder."""

    def __init__(self, folder: Path):
        self._folder, self._made = folder, 0
        self._mapped: list[Tensor] = []

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._made += 1
        return self.get_buffer(dist.get_rank(), (size,), dtype)

    def rendezvous(self, tensor: Tensor, group: str) -> "Shared":
        dist.barrier()
        return self

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype) -> Tensor:
        self._mapped.append(torch.from_file(str(self._folder / f"{self._made}_{rank}"), True, sizes[0], dtype=dtype))
        return self._mapped[-1]

    def barrier(self, channel: int, timeout_ms: int) -> None:
        dist.barrier()


def main(folder: Path) -> None:
    """One process."""
    import triton_interpreter  # noqa: F401 (it corrects the interpreter)

    from models.transport import EqualSplits, SymmetricMemory

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, rank, shared = dist.group.WORLD, dist.get_rank(), Shared(folder)
    assert group is not None
    symm_mem.empty, symm_mem.rendezvous = shared.empty, shared.rendezvous  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None
    whole, ours = EqualSplits(group), SymmetricMemory(group, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    for slots in (16, 48, 32):  # more, and less again
        sent = torch.randint(0, slots + 1, (SIZE,), generator=generator)
        (received,) = ours.exchange((torch.stack([sent, sent], 1),), torch.ones_like(sent), None, keep=True)
        used = torch.arange(slots) < sent[:, None]
        rows: list[Tensor] = []
        for width, dtype in ((144, torch.uint8), (40, torch.bfloat16), (5, torch.int32)):
            drawn = torch.randint(1, 100, (SIZE, slots, width), generator=generator)
            rows.append((drawn * used[..., None]).flatten(0, 1).to(dtype))
        theirs = whole.exchange(tuple(rows), sent, received[:, 0], keep=True)
        arriving = received[:, 0].contiguous()
        kept = ours.exchange(tuple(rows), sent, arriving, keep=True)
        assert all(torch.equal(a, b) for a, b in zip(kept, theirs, strict=True))
        dist.barrier()
        for came, at_home in zip(ours.exchange(tuple(kept), arriving, sent, keep=False), rows, strict=True):
            for p in range(SIZE):
                block = slice(p * slots, p * slots + int(sent[p]))
                assert torch.equal(came[block], at_home[block]), "and back"
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"done_{rank}").touch()


def test_what_is_written_into_others_memory_is_what_collectives_bring(
    start_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    start_ranks(__file__, SIZE, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("done_*")) == [f"done_{rank}" for rank in range(SIZE)]


@pytest.mark.parametrize(("failed", "supported", "want"), [(0, 1, True), (0, 0, False), (101, 1, False)])
def test_gpus_whose_barriers_would_wait_for_ever_share_no_memory(
    failed: int, supported: int, want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is asked for atomics from one GPU to another: NVLink has them, PCIe has not."""

    def ask(out: Any, attribute: int, gpu: int, other: int) -> int:
        assert (attribute, gpu, other) == (3, 0, 5)
        out._obj.value = supported
        return failed

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGetP2PAttribute=ask))
    assert has_atomics(0, 5) is want


def test_without_a_driver_there_are_no_atomics(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not has_atomics(0, 1)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    main(Path(sys.argv[1]))
