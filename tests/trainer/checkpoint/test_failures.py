"""What is damaged is named, what fails costs one checkpoint, what is killed leaves the one before."""

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpoint,
    list_checkpoints,
    newest_checkpoint,
    read,
    set_aside_after,
)
from trainer.checkpoint.folder import delete_checkpoint, delete_leftovers

# torch.distributed.checkpoint says so on one process, and pytest resets the filter that silences it.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

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


@pytest.mark.parametrize("damage", [truncate, alter, delete])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    checkpointer: Checkpointer, events: Any, file: str, damage: Any
) -> None:
    for step in (1, 2):
        checkpointer.save(step, {"t": torch.full((100,), step)}, {"step": step})
    checkpointer.wait()
    newest = checkpointer.newest()
    assert newest is not None and newest.name == "step_00000002"
    damage(newest / file)
    before = checkpointer.newest()
    assert before is not None and before.name == "step_00000001"
    kind, step, message, _ = events.heard[-1]
    assert (kind, step) == ("checkpoint", 2) and "damaged" in message and "step_00000002" in message
    # An altered listing can also show as a file that does not match it; everything else is named itself.
    assert file in message
    with pytest.raises(DamagedCheckpoint, match="step_00000002"):
        read(newest)
    assert read(before)[1] == {"step": 1}


def test_where_the_disk_fails_the_checkpoint_before_is_used(
    checkpointer: Checkpointer, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        checkpointer.save(step, {"t": torch.full((100,), step)}, {"step": step})
    checkpointer.wait()
    opened = Path.open

    def fails(path: Path, *how: Any, **more: Any) -> Any:
        if path.suffix == ".safetensors" and "step_00000002" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", fails)
    before = checkpointer.newest()
    assert before is not None and before.name == "step_00000001"
    assert "the disk fails there" in events.heard[-1][2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    checkpointer = Checkpointer(folder, 1, quiet)
    checkpointer.save(1, {"t": torch.randn(10), "n": 1}, {"tokens": 5})
    checkpointer.close()
    return folder


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


def test_a_listing_that_claims_nothing_is_not_believed(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, {"t": torch.zeros(3)}, {})
    checkpointer.wait()
    path = checkpointer.newest()
    assert path is not None
    for text in ('{"files": {}}', "[]", "null", '{"files": {}, "format": 99, "sha256": ""}'):
        (path / "manifest.json").write_text(text)
        assert checkpointer.newest() is None


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
    assert isinstance(failure.value, OSError) and "\n" not in str(failure.value)
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
    with pytest.raises(CheckpointError, match=str(folder)):
        checkpointer.wait()
    assert [(kind, step, what["rule"]) for kind, step, _, what in events.heard] == [
        ("alert", 1, "checkpoint"),
        ("alert", 2, "checkpoint"),
    ]
    folder.unlink()
    checkpointer.save(3, {"t": torch.ones(3)}, {})
    checkpointer.wait()
    assert [path.name for path in list_checkpoints(folder)] == ["step_00000003"]


def test_a_step_whose_save_failed_can_be_saved_again(checkpointer: Checkpointer, folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    checkpointer.save(1, {"t": torch.ones(3)}, {})
    with pytest.raises(CheckpointError):
        checkpointer.wait()
    folder.unlink()
    checkpointer.save(1, {"t": torch.ones(3)}, {})
    checkpointer.wait()
    assert [path.name for path in list_checkpoints(folder)] == ["step_00000001"]


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from trainer.checkpoint import Checkpointer, list_checkpoints, read
from trainer.checkpoint.manifest import verify

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
quiet = lambda kind, step, message, **what: None
weights = [torch.zeros(n) for n in (1 << 20, 1000, 1)]
random.seed(int(sys.argv[3]))
torch.set_num_threads(1)  # other threads would not survive the fork
acknowledged = 0
seconds = None  # that a save takes on this disk
while rounds > 0 or acknowledged < 5:
    assert rounds > -200, "no save is ever done"
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:  # resume from the newest checkpoint, saving as fast as it can, until killed
        checkpointer = Checkpointer(folder, 2, quiet)
        assert not [p for p in folder.glob(".*")] if folder.exists() else True, "leftovers"
        newest = checkpointer.newest()
        step = 0 if newest is None else read(newest)[0]["step"]
        os.write(send, b"%d\\n" % step)
        while True:
            step += 1
            for weight in weights:
                weight.fill_(step)
            checkpointer.save(step, {"step": step, "weights": weights}, {})
            checkpointer.wait()
            os.write(send, b"%d\\n" % step)
    os.close(send)
    os.read(receive, 100)  # it is about to save
    if seconds is None:
        start = time.perf_counter()
        os.read(receive, 100)
        seconds = time.perf_counter() - start
    time.sleep(random.uniform(0, 3 * seconds))
    rounds -= 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reported = b""
    while piece := os.read(receive, 1 << 16):
        reported += piece
    os.close(receive)
    acknowledged = max([acknowledged, *map(int, reported.split())])
    visible = list_checkpoints(folder)
    for path in visible:  # whatever is visible is whole, and is what its name says
        verify(path)
        state = read(path)[0]
        assert path.name == f"step_{state['step']:08d}"
        assert all((weight == state["step"]).all() for weight in state["weights"])
    newest = state["step"] if visible else 0
    assert newest >= acknowledged, (newest, acknowledged)
print(acknowledged, flush=True)
os._exit(0)
"""


def test_sigkill_at_any_moment_leaves_whole_checkpoints_and_no_leftovers(
    folder: Path, events: Any, run_python: Callable[..., Any]
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    done = run_python("-c", KILLS, folder, 12, seed)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    Checkpointer(folder, 2, events).close()
    assert all(path.name.startswith("step_") for path in folder.iterdir())
    assert 1 <= len(list_checkpoints(folder)) <= 3  # a third one if the kill came before the oldest was deleted


def test_leftovers_of_a_killed_process_are_cleaned_up_and_never_read(folder: Path, events: Any) -> None:
    for name in (".writing_step_00000009", ".deleting_step_00000001"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rank00000.safetensors").write_text("half")
    assert newest_checkpoint(folder, events) is None
    checkpointer = Checkpointer(folder, 2, events)
    assert list(folder.iterdir()) == []
    checkpointer.save(9, {"t": torch.ones(1)}, {})
    checkpointer.close()
    assert [path.name for path in folder.iterdir()] == ["step_00000009"]


def test_a_process_that_ends_normally_finishes_its_last_save(folder: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from trainer.checkpoint import Checkpointer\n"
        "c = Checkpointer(Path(sys.argv[1]), 2, lambda *a, **k: None); c.save(1, {'t': torch.ones(1 << 22)}, {})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""
    assert read(folder / "step_00000001")[0]["t"].sum() == 1 << 22


def test_checkpoints_later_than_the_one_gone_on_from_are_out_of_use_until_replaced(folder: Path, events: Any) -> None:
    checkpointer = Checkpointer(folder, 0, events)
    for step in (1, 2, 3):
        checkpointer.save(step, {"t": torch.tensor(step)}, {})
    checkpointer.wait()
    assert [path.name for path in set_aside_after(folder, 1)] == ["step_00000002.set_aside", "step_00000003.set_aside"]
    newest = checkpointer.newest()
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
