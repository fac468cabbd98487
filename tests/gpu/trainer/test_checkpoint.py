"""Checkpoints of tensors on the GPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from trainer.checkpoint import Checkpointer, list_checkpoints, read
from trainer.checkpoint.staging import HostBuffers


def test_tensors_are_saved_as_they_were_at_the_call(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, 0, lambda *what, **more: None)
    weight = torch.zeros(1 << 24, device="cuda")
    step_count = torch.zeros((), device="cuda")
    for step in range(1, 4):
        weight.fill_(step)
        step_count += 1
        checkpointer.save(
            step, {"weight": weight, "row": weight[5:9], "step": step_count, "host": torch.tensor(step)}, {}
        )
        weight.fill_(-1)
    checkpointer.close()
    for step, path in enumerate(list_checkpoints(tmp_path), start=1):
        state, _ = read(path)
        for name, shape in {"weight": (1 << 24,), "row": (4,), "step": ()}.items():
            torch.testing.assert_close(state[name], torch.full(shape, float(step)), rtol=0, atol=0)
        assert state["host"] == step


def test_memory_that_cannot_be_page_locked_costs_time_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, cudart = torch.ones(64, device="cuda"), cast(Any, torch.cuda.cudart())
    fails = SimpleNamespace(cudaHostRegister=lambda pointer, size, flags: cudart.cudaHostRegister(0, size, flags))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fails)
    buffers = HostBuffers()
    with pytest.warns(UserWarning, match="cannot be page-locked"):
        buffers.reserve({"weight": weight})
    assert torch.equal(weight + 1, torch.full_like(weight, 2.0)), "the next kernel is not blamed"
    assert torch.equal(buffers.copy({"weight": weight})["weight"], torch.ones(64))
