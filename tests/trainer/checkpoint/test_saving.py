"""Saving: what comes back, what a save costs the trainer, how many stay."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.checkpoint import Checkpointer, ShardView, list_checkpoints, read, read_meta
from trainer.checkpoint.state_tree import join, split
from trainer.checkpoint.storage import DTYPE_CODES

FILES = ("manifest.json", "rank00000.safetensors", "state.json", "tensors.json")


def save_and_read(checkpointer: Checkpointer, state: dict[str, Any], meta: dict[str, Any] | None = None) -> Any:
    checkpointer.save(1, state, meta or {})
    checkpointer.wait()
    return read(checkpointer.folder / "step_00000001")


@pytest.mark.parametrize("dtype", list(DTYPE_CODES), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 7), (3, 1, 129)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(
    checkpointer: Checkpointer, dtype: torch.dtype, shape: Any, assert_same: Any
) -> None:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(shape)  # every bit pattern: NaNs with payload, infinities, subnormals
    state, _ = save_and_read(checkpointer, {"t": tensor})
    assert_same(state["t"], tensor)


def test_views_shared_memory_and_transposes_come_back(checkpointer: Checkpointer, assert_same: Any) -> None:
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


def test_a_model_its_optimizer_and_the_rng_resume_identically(checkpointer: Checkpointer, assert_same: Any) -> None:
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
    back, _ = read(checkpointer.folder / "step_00000003")
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


@settings(max_examples=40)
@given(state=st.dictionaries(keys, trees, max_size=4))
@example(state={"$tensor": {"$tuple": [1], 3: torch.ones(2)}, "x": {"$dict": 0}, "y": ({0: {}},)})
def test_any_tree_survives_json(state: dict[str, Any], assert_same: Any) -> None:
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


def test_nothing_is_unpickled(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, assert_same: Any) -> None:
    checkpointer.save(1, {"t": torch.ones(3), "n": {"x": (1, 2.5)}}, {"tokens": 7})
    checkpointer.wait()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    path = checkpointer.folder / "step_00000001"
    assert sorted(entry.name for entry in path.iterdir()) == sorted(FILES)
    state, meta = read(path)
    assert_same(state, {"t": torch.ones(3), "n": {"x": (1, 2.5)}})
    assert meta == read_meta(path) == {"tokens": 7}


def test_files_open_with_plain_safetensors(checkpointer: Checkpointer, assert_same: Any) -> None:
    from safetensors.torch import load_file

    checkpointer.save(1, {"model": {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(3).bfloat16()}}, {})
    checkpointer.wait()
    path = checkpointer.folder / "step_00000001"
    tensors = load_file(path / FILES[1])
    assert_same(tensors["model/w"], torch.arange(6.0).view(2, 3))


def test_changes_after_save_returned_are_not_in_the_checkpoint(folder: Path, events: Any, assert_same: Any) -> None:
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

    def spy(step: int, parts: dict[str, ShardView], *more: Any) -> None:
        seen.append(parts["weight"].data.data_ptr())
        write(step, parts, *more)

    monkeypatch.setattr(checkpointer, "_write", spy)
    weight = torch.zeros(1000)
    for step in (1, 2, 3):
        checkpointer.save(step, {"weight": weight}, {})
    checkpointer.wait()
    assert len(set(seen)) == 1 and seen[0] != weight.data_ptr()


def test_the_newest_are_kept_and_a_saved_step_is_not_saved_again(
    checkpointer: Checkpointer, folder: Path, events: Any
) -> None:
    for step in (1, 2, 3, 4, 4):
        checkpointer.save(step, {"t": torch.tensor(step)}, {})
        checkpointer.wait()
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000003", "step_00000004"]
    assert [step for _, step, _, _ in events.heard] == [1, 2, 3, 4]


def test_a_smaller_keep_reports_what_the_next_save_deletes(folder: Path, events: Any) -> None:
    first = Checkpointer(folder, 0, events)
    for step in (1, 2, 3, 4):
        first.save(step, {"t": torch.tensor(step)}, {})
    first.close()
    events.heard.clear()
    Checkpointer(folder, 4, events).warn_of_deletions(4)  # as before: each save replaces one
    Checkpointer(folder, 2, events).warn_of_deletions(4, before=2)  # the row began with step 1
    messages = [message for _, _, message, _ in events.heard]
    assert messages == ["checkpoint.keep=2: the next save deletes 2 checkpoints, step_00000002 to step_00000003"]
    again = Checkpointer(folder, 2, events)
    again.save(5, {"t": torch.tensor(5)}, {}, before=2)
    again.close()
    assert [int(path.name[-1]) for path in list_checkpoints(folder)] == [1, 4, 5]


def test_a_negative_keep_is_refused(folder: Path, events: Any) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.keep=-1"):
        Checkpointer(folder, -1, events)
    assert not folder.exists()
