"""A save that fails costs one checkpoint and nothing else."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint import Checkpointer, CheckpointError, list_checkpoints


def test_a_full_disk_costs_one_checkpoint_and_nothing_else(
    checkpointer: Checkpointer, folder: Path, events: Any
) -> None:
    big = {"t": torch.ones(1 << 20)}
    checkpointer.save(1, big, {})
    checkpointer.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # writes fail half way, as on a full disk
    try:
        checkpointer.save(2, big, {})
        with pytest.raises(
            CheckpointError, match=r"step 2 could not be written to .*step_00000002: File too large"
        ) as failure:
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(failure.value, OSError) and str(failure.value).endswith(
        "File too large; free space or move the run's folder, then resume; what was saved before is intact"
    )
    assert events.heard[-1][0] == "alert"
    assert events.heard[-1][3] == {"rule": "checkpoint", "path": str(folder / "step_00000002"), "failed": True}
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    checkpointer.wait()  # said once
    checkpointer.save(3, big, {})
    checkpointer.wait()
    assert [path.name for path in list_checkpoints(folder)] == ["step_00000001", "step_00000003"]


def test_training_continues_after_a_failed_save(checkpointer: Checkpointer, folder: Path, events: Any) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    for step in (1, 2):
        checkpointer.save(step, {"t": torch.ones(3)}, {})
    with pytest.raises(CheckpointError, match=rf"{folder}.*; free space"):
        checkpointer.wait()
    assert [(kind, step, what["rule"]) for kind, step, _, what in events.heard] == [
        ("alert", 1, "checkpoint"),
        ("alert", 2, "checkpoint"),
    ]
    folder.unlink()
    checkpointer.save(3, {"t": torch.ones(3)}, {})
    checkpointer.wait()
    assert [path.name for path in list_checkpoints(folder)] == ["step_00000003"]
