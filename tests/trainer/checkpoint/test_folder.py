"""Which checkpoint is which: those that are out of use, renamed, moved elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint import Checkpointer, DamagedCheckpoint, newest_checkpoint, read, set_aside_after
from trainer.checkpoint.folder import delete_checkpoint, delete_leftovers


def quiet(kind: str, step: int, message: str, **what: Any) -> None:
    """Ignores the event."""


def test_checkpoints_later_than_the_one_gone_on_from_are_out_of_use_until_replaced(folder: Path, events: Any) -> None:
    checkpointer = Checkpointer(folder, 0, events)
    for step in (1, 2, 3):
        checkpointer.save(step, {"t": torch.tensor(step)}, {})
    checkpointer.wait()
    assert [path.name for path in set_aside_after(folder, 1)] == ["step_00000002.set_aside", "step_00000003.set_aside"]
    newest = newest_checkpoint(folder, events)
    assert newest is not None and newest.name == "step_00000001"
    checkpointer.save(2, {"t": torch.tensor(20)}, {})
    checkpointer.close()
    assert read(folder / "step_00000002")[0]["t"] == 20
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00000001",
        "step_00000002",
        "step_00000003.set_aside",
    ]


def test_a_checkpoint_under_the_name_of_another_step_is_reported_and_not_used(folder: Path, events: Any) -> None:
    checkpointer = Checkpointer(folder, 0, quiet)
    for step in (4, 6):
        checkpointer.save(step, {"t": torch.tensor(step)}, {})
    checkpointer.close()
    (folder / "step_00000004").rename(folder / "step_00000008")
    assert newest_checkpoint(folder, events) == folder / "step_00000006"
    ((_, _, said, _),) = events.heard
    assert "step_00000008 holds step 4" in said and "rename it to step_00000004" in said
    with pytest.raises(DamagedCheckpoint, match="holds step 4"):
        read(folder / "step_00000008")
    (folder / "step_00000008").rename(folder / "step_00000004")
    assert read(folder / "step_00000004")[0]["t"] == 4


def test_a_checkpoint_may_be_moved_elsewhere_and_linked(folder: Path, tmp_path: Path, events: Any) -> None:
    """People do so when a disk is full. Rotation and resume remove the link alone."""
    checkpointer = Checkpointer(folder, 2, quiet)
    for step in (2, 4):
        checkpointer.save(step, {"t": torch.tensor(step)}, {})
    checkpointer.wait()
    moved = tmp_path / "elsewhere"
    for name in ("step_00000002", "step_00000004"):
        (folder / name).rename(moved.with_name(f"elsewhere-{name}"))
        (folder / name).symlink_to(moved.with_name(f"elsewhere-{name}"))
    assert newest_checkpoint(folder, events) == folder / "step_00000004"
    checkpointer.save(6, {"t": torch.tensor(6)}, {})
    checkpointer.close()
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000004", "step_00000006"]
    assert [path.name for path in set_aside_after(folder, 2)] == ["step_00000004.set_aside", "step_00000006.set_aside"]
    (folder / ".deleting_step_00000001").symlink_to(tmp_path)
    delete_leftovers(folder)
    delete_checkpoint(folder / "step_00000004.set_aside")
    assert [path.name for path in folder.iterdir()] == ["step_00000006.set_aside"]
    assert all((tmp_path / f"elsewhere-step_0000000{n}" / "manifest.json").is_file() for n in (2, 4)), "untouched"
