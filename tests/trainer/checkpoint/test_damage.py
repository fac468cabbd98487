"""What is damaged is named and not used; the checkpoint before is."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.checkpoint import Checkpointer, DamagedCheckpoint, newest_checkpoint, read

FILES = ("manifest.json", "rank00000.safetensors", "state.json", "tensors.json")


def quiet(kind: str, step: int, message: str, **what: Any) -> None:
    """Ignores the event."""


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def delete(path: Path) -> None:
    path.unlink()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, alter, delete, replace_by_folder])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    checkpointer: Checkpointer, events: Any, file: str, damage: Any
) -> None:
    for step in (1, 2):
        checkpointer.save(step, {"t": torch.full((100,), step)}, {"step": step})
    checkpointer.wait()
    newest = newest_checkpoint(checkpointer.folder, events)
    assert newest is not None and newest.name == "step_00000002"
    damage(newest / file)
    before = newest_checkpoint(checkpointer.folder, events)
    assert before is not None and before.name == "step_00000001"
    kind, step, message, _ = events.heard[-1]
    assert (kind, step) == ("checkpoint", 2) and "damaged" in message and "step_00000002" in message
    # An altered listing can also show as a file that does not match it; everything else is named itself.
    assert file in message
    with pytest.raises(DamagedCheckpoint, match="step_00000002"):
        read(newest)
    assert read(before)[1] == {"step": 1}


@pytest.mark.parametrize("file", FILES)
def test_where_the_disk_fails_the_checkpoint_before_is_used(
    checkpointer: Checkpointer, events: Any, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    for step in (1, 2):
        checkpointer.save(step, {"t": torch.full((100,), step)}, {"step": step})
    checkpointer.wait()
    opened = Path.open

    def fails(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == file and "step_00000002" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", fails)
    before = newest_checkpoint(checkpointer.folder, events)
    assert before is not None and before.name == "step_00000001"
    assert "the disk fails" in events.heard[-1][2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    checkpointer = Checkpointer(folder, 1, quiet)
    checkpointer.save(1, {"t": torch.randn(10), "n": 1}, {"tokens": 5})
    checkpointer.close()
    return folder


@pytest.mark.parametrize("how", ["file", "link to itself"])
def test_what_is_no_checkpoint_in_place_of_one_is_skipped(checkpointer: Checkpointer, events: Any, how: str) -> None:
    checkpointer.save(1, {"t": torch.zeros(3)}, {})
    checkpointer.wait()
    path = checkpointer.folder / "step_00000002"
    path.write_text("") if how == "file" else path.symlink_to(path.name)
    before = newest_checkpoint(checkpointer.folder, events)
    assert before is not None and before.name == "step_00000001"
    assert "manifest.json cannot be read: it is no file" in events.heard[-1][2]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_detected(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    copy = tmp_path / "copy" / "step_00000001"
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(whole / "step_00000001", copy)
    path = copy / data.draw(st.sampled_from(FILES))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert newest_checkpoint(copy.parent, quiet) is None
    with pytest.raises(DamagedCheckpoint):
        read(copy)


def test_a_listing_that_claims_nothing_is_not_believed(checkpointer: Checkpointer, events: Any) -> None:
    checkpointer.save(1, {"t": torch.zeros(3)}, {})
    checkpointer.wait()
    path = newest_checkpoint(checkpointer.folder, events)
    assert path is not None
    for text in ('{"files": {}}', "[]", "null", '{"files": {}, "format": 99, "sha256": ""}'):
        (path / "manifest.json").write_text(text)
        assert newest_checkpoint(checkpointer.folder, events) is None
