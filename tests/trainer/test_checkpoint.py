"""Checkpoints: nothing is lost on the way, what is damaged is named, what is killed leaves the one before."""

import json
import math
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpoint,
    list_checkpoints,
    newest_checkpoint,
    read,
    read_meta,
    set_aside_after,
)
from trainer.checkpoint.storage import DTYPE_CODES
from trainer.checkpoint.tree import join, split

# torch.distributed.checkpoint says so on one process, and pytest resets the filter that silences it.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FILES = ("manifest.json", "rank00000.safetensors", "state.json", "tensors.json")


class Events:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, str, dict[str, Any]]] = []

    def __call__(self, kind: str, step: int, message: str, **what: Any) -> None:
        self.heard.append((kind, step, message, what))

    @property
    def messages(self) -> str:
        return "\n".join(message for _, _, message, _ in self.heard)


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def checkpointer(folder: Path, events: Events) -> Iterator[Checkpointer]:
    made = Checkpointer(folder, 2, events)
    yield made
    made.close()


def assert_same(left: Any, right: Any) -> None:
    """Same structure, types, dtypes, shapes and bits."""
    assert type(left) is type(right), (left, right)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, float) and math.isnan(left):
        assert math.isnan(right)
    else:
        assert left == right


def save_and_read(checkpointer: Checkpointer, state: dict[str, Any], meta: dict[str, Any] | None = None) -> Any:
    checkpointer.save(1, state, meta or {})
    checkpointer.wait()
    newest = checkpointer.newest()
    assert newest is not None
    return read(newest)


# ---------------------------------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("dtype", list(DTYPE_CODES), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 7), (3, 1, 129)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(
    checkpointer: Checkpointer, dtype: torch.dtype, shape: Any
) -> None:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(shape)  # every bit pattern: NaNs with payload, infinities, subnormals
    state, _ = save_and_read(checkpointer, {"t": tensor})
    assert_same(state["t"], tensor)


def test_views_shared_memory_and_transposes_come_back(checkpointer: Checkpointer) -> None:
    base = torch.arange(60.0)
    state = {
        "whole": base,
        "tied": base,
        "row": base[7],
        "overlap": base[3:9],
        "strided": base[::7],
        "transposed": base.view(6, 10).t(),
        "parameter": nn.Parameter(base[:4]),
    }
    back, _ = save_and_read(checkpointer, state)
    assert_same(back, {name: tensor.detach().clone().contiguous() for name, tensor in state.items()})


def test_a_model_its_optimizer_and_the_rng_come_back_and_go_on_identically(checkpointer: Checkpointer) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model, optimizer = make()
    steps(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    checkpointer.save(3, state, {})
    expected = steps(model, optimizer)

    checkpointer.wait()
    back, _ = read(checkpointer.newest() or Path())
    model, optimizer = make()
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    torch.set_rng_state(back["rng"])
    assert_same(steps(model, optimizer), expected)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=5)
trees = st.recursive(
    scalars | st.builds(lambda value: torch.tensor(value, dtype=torch.float64), st.floats()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(state=st.dictionaries(keys, trees, max_size=4))
@example(state={"$tensor": {"$tuple": [1], 3: torch.ones(2)}, "x": {"$dict": 0}, "y": ({0: {}},)})
def test_any_tree_survives_json(state: dict[str, Any]) -> None:
    skeleton, tensors = split(state)
    assert_same(join(json.loads(json.dumps(skeleton)), tensors), state)


@pytest.mark.parametrize(
    "leaf", [{1, 2}, object(), b"x", 1j, torch.float32, Path("x")], ids=lambda leaf: type(leaf).__name__
)
def test_a_leaf_that_would_not_come_back_is_refused_by_its_path(checkpointer: Checkpointer, leaf: Any) -> None:
    with pytest.raises(TypeError, match="at 'a/1'"):
        checkpointer.save(1, {"a": [0, leaf]}, {})
    with pytest.raises(TypeError, match="keys are str or int"):
        checkpointer.save(1, {"a": {None: 0}}, {})


def test_two_tensors_under_one_path_are_refused(checkpointer: Checkpointer) -> None:
    with pytest.raises(ValueError, match="two tensors at 'a/b'"):
        checkpointer.save(1, {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}, {})


def test_a_dtype_without_a_name_is_reported_not_swallowed(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, {"z": torch.zeros(2, dtype=torch.complex64)}, {})
    with pytest.raises(TypeError, match=r"z is torch\.complex64"):
        checkpointer.wait()


def test_nothing_is_unpickled(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer.save(1, {"t": torch.ones(3), "n": {"x": (1, 2.5)}}, {"tokens": 7})
    checkpointer.wait()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    path = checkpointer.newest()
    assert path is not None
    assert sorted(entry.name for entry in path.iterdir()) == sorted(FILES)
    state, meta = read(path)
    assert_same(state, {"t": torch.ones(3), "n": {"x": (1, 2.5)}})
    assert meta == read_meta(path) == {"tokens": 7}


def test_files_open_with_plain_safetensors(checkpointer: Checkpointer) -> None:
    from safetensors.torch import load_file

    checkpointer.save(1, {"model": {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(3).bfloat16()}}, {})
    checkpointer.wait()
    path = checkpointer.newest()
    assert path is not None
    tensors = load_file(path / FILES[1])
    assert_same(tensors["model/w"], torch.arange(6.0).view(2, 3))


# ---------------------------------------------------------------------------------------------------- in the background


def test_what_changes_after_save_returned_is_not_in_the_checkpoint(folder: Path, events: Events) -> None:
    checkpointer = Checkpointer(folder, 0, events)
    weight, log = torch.zeros(1 << 18), {"values": [0]}
    for step in range(1, 6):
        weight.fill_(step)
        log["values"][0] = step
        checkpointer.save(step, {"weight": weight, "log": log}, {})
        weight.fill_(-1)
        log["values"][0] = -1
    checkpointer.close()
    assert [path.name for path in list_checkpoints(folder)] == [
        f"step_{step:08d}" for step in range(1, 6)
    ]  # 0 keeps all
    for step, path in enumerate(list_checkpoints(folder), start=1):
        state, _ = read(path)
        assert_same(state, {"weight": torch.full((1 << 18,), float(step)), "log": {"values": [step]}})


def test_host_buffers_are_reused(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    write = checkpointer._write

    def spy(step: int, tensors: dict[str, Tensor], text: str) -> None:
        seen.append(tensors["weight"].data_ptr())
        write(step, tensors, text)

    monkeypatch.setattr(checkpointer, "_write", spy)
    weight = torch.zeros(1000)
    for step in (1, 2, 3):
        checkpointer.save(step, {"weight": weight}, {})
    checkpointer.wait()
    assert len(set(seen)) == 1 and seen[0] != weight.data_ptr()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_saved_as_they_were_when_save_was_called(folder: Path, events: Events) -> None:
    checkpointer = Checkpointer(folder, 0, events)
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
    for step, path in enumerate(list_checkpoints(folder), start=1):
        state, _ = read(path)
        assert_same(state["weight"], torch.full((1 << 24,), float(step)))
        assert_same(state["row"], torch.full((4,), float(step)))
        assert_same(state["step"], torch.tensor(float(step)))
        assert_same(state["host"], torch.tensor(step))


def test_the_newest_are_kept_and_a_saved_step_is_not_saved_again(
    checkpointer: Checkpointer, folder: Path, events: Events
) -> None:
    for step in (1, 2, 3, 4, 4):
        checkpointer.save(step, {"t": torch.tensor(step)}, {})
        checkpointer.wait()
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000003", "step_00000004"]
    assert [step for _, step, _, _ in events.heard] == [1, 2, 3, 4]


def test_a_negative_keep_is_refused(folder: Path, events: Events) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.keep=-1"):
        Checkpointer(folder, -1, events)
    assert not folder.exists()


# ---------------------------------------------------------------------------------------------------- damage


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
    checkpointer: Checkpointer, events: Events, file: str, damage: Any
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    checkpointer = Checkpointer(folder, 1, Events())
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
    assert newest_checkpoint(copy.parent, Events()) is None
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


# ---------------------------------------------------------------------------------------------------- a full disk


def test_a_full_disk_costs_one_checkpoint_and_nothing_else(
    checkpointer: Checkpointer, folder: Path, events: Events
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
    assert events.heard[-1][3] == {"path": str(folder / "step_00000002"), "failed": True}
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    checkpointer.wait()  # said once
    checkpointer.save(3, big, {})
    checkpointer.wait()
    assert [path.name for path in list_checkpoints(folder)] == ["step_00000001", "step_00000003"]


def test_training_goes_on_after_a_failed_save(checkpointer: Checkpointer, folder: Path, events: Events) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    for step in (1, 2):
        checkpointer.save(step, {"t": torch.ones(3)}, {})
    with pytest.raises(CheckpointError, match=str(folder)):
        checkpointer.wait()
    assert [(step, what["failed"]) for _, step, _, what in events.heard] == [(1, True), (2, True)]
    folder.unlink()
    checkpointer.save(3, {"t": torch.ones(3)}, {})
    checkpointer.wait()
    assert [path.name for path in list_checkpoints(folder)] == ["step_00000003"]


# ---------------------------------------------------------------------------------------------------- kills, leftovers


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
while rounds:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:  # go on from the newest checkpoint, saving as fast as it can, until killed
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


def test_sigkill_at_any_moment_leaves_whole_checkpoints_and_no_leftovers(folder: Path, events: Events) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    command = [sys.executable, "-c", KILLS, str(folder), "20", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    assert int(done.stdout) >= 5
    Checkpointer(folder, 2, events).close()
    assert all(path.name.startswith("step_") for path in folder.iterdir())
    assert 1 <= len(list_checkpoints(folder)) <= 3  # a third one if the kill came before the oldest was deleted


def test_leftovers_of_a_killed_process_are_cleaned_up_and_never_read(folder: Path, events: Events) -> None:
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
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert read(folder / "step_00000001")[0]["t"].sum() == 1 << 22


def test_checkpoints_later_than_the_one_gone_on_from_are_out_of_use_until_replaced(
    folder: Path, events: Events
) -> None:
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


# ---------------------------------------------------------------------------------------------------- many ranks


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


def test_shards_are_read_and_written_on_another_world_size(tmp_path: Path) -> None:
    """FSDP2 on two processes fills its shards from what one process wrote; one process reads what the two wrote."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainer.checkpoint.checkpointer import save_tensors
    from trainer.checkpoint.storage import SafetensorsReader

    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    state = {
        f"{layer}.{kind}": tensor
        for layer, n in ((0, 5), (1, 3))
        for kind, tensor in (("weight", torch.randn(n, 8 if n == 5 else 5)), ("bias", torch.randn(n)))
    }  # 5 and 3 rows: uneven shards
    save_tensors(source, state)
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

    from trainer.checkpoint.checkpointer import save_tensors
    from trainer.checkpoint.storage import SafetensorsReader

    save_tensors(tmp_path, {"t": torch.ones(3)})
    into = {"t": torch.ones(3, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException, match=r"t was saved as torch.float32"):
        load(into, storage_reader=SafetensorsReader(tmp_path), planner=DefaultLoadPlanner(False, False), no_dist=True)
