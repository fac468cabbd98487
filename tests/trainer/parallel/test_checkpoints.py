"""Checkpoints of ranks that share a model: what any number of them saved, any other number resumes from.

Four ranks run this file as a program, over gloo: one scene after the other, in each of which some of them are the ranks
of a run, and the others wait.
"""

import json
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import config_of
from run_lines import events, metrics
from small import SMALL, write_corpus

from trainer.checkpoint import (
    Checkpointer,
    CheckpointError,
    ShardView,
    checkpoint_name,
    list_checkpoints,
    read,
    saved_shapes,
)
from trainer.checkpoint.state_tree import split
from trainer.launch.liveness.exit_report import pending_operation
from trainer.launch.world import World
from trainer.trainer import Trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are killed")

RANKS = 4
FSDP, HSDP = "parallel=fsdp", ("parallel=hsdp", "parallel.shard=2")
RUN = [*SMALL, "precision=fp32", "precision.backend=reference", "trainer.microbatch_size=1", "optim.decay_fraction=0"]
RUN += ["checkpoint.every=2", "checkpoint.keep=2", "data.validation_fraction=0.05", "optim.lr=1e-3"]
RUN += ["optim=muon_wsd", "optim.muon.iteration=fp32"]  # both optimizers' states: AdamW has embedding, head and norms


@dataclass
class Scene:
    """A run of `size` ranks, to step `steps`. kind: train; copy: save what was loaded, elsewhere; held, full, broken:
    saves without a run."""

    name: str
    size: int
    keys: tuple[str, ...] = ()
    steps: int = 8
    kind: str = "train"


SCENES = [
    Scene("whole", 1),
    Scene("a", 4, (*HSDP, "parallel.expert=4"), 2),
    Scene("a", 2, (FSDP, "parallel.expert=2"), 4),
    Scene("a", 4, (*HSDP, "parallel.expert=4"), kind="copy"),
    Scene("a", 1, (), 6),
    Scene("a", 4, (FSDP, "parallel.expert=2"), 8),
    Scene("a", 4, HSDP, kind="copy"),
    Scene("damaged", 4, (FSDP,), 7),
    Scene("from", 2, (FSDP, "parallel.expert=2", "run.init_from={runs}/a", "precision=bf16"), 1),
    Scene("from", 4, (*HSDP, "precision=fp8_delayed"), 2),
    Scene("held", 2, kind="held"),
    Scene("full", 2, kind="full"),
    Scene("broken", 2, kind="broken"),
    Scene("killed", 4, (FSDP, "checkpoint.every=1"), 10),
]


def quiet(kind: str, step: int, message: str, **what: Any) -> None:
    """Ignores the event."""


def overrides(folder: Path, scene: Scene) -> list[str]:
    places = [f"data.path={folder / 'corpus'}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder / 'runs'}"]
    keys = [key.format(runs=folder / "runs") for key in scene.keys]
    return [*RUN, *places, f"run.name={scene.name}", "run.resume=auto", f"trainer.max_steps={scene.steps}", *keys]


# ------------------------------------------------------------------------------------------------ the ranks' side of it


def train(scene: Scene, world: World, folder: Path) -> None:
    trainer = Trainer(config_of(overrides(folder, scene)), [], world)
    loader, streams = trainer.run.loader, folder / "streams"
    streams.mkdir(exist_ok=True)
    following = loader.next

    def noted(*share: int) -> torch.Tensor:
        tokens = following(*share)
        if world.is_first:  # the whole batch: of how many ranks does not matter
            batch = loader.gather(loader.served).numpy()
            with (streams / scene.name).open("a") as file:
                file.write(f"{batch.flatten().tolist()}\n")
        return tokens

    loader.next = noted  # type: ignore[method-assign]
    trainer.train()


def copy(scene: Scene, world: World, folder: Path) -> None:
    """Resume, and save at once: bit for bit what was there."""
    trainer = Trainer(config_of(overrides(folder, scene)), [], world)
    copies = Checkpointer(folder / "copies", 0, quiet, world)
    copies.save(trainer.step, trainer.run.state(), {"size": world.size})
    copies.close()
    trainer.run.close(None)


def held(world: World, folder: Path) -> None:
    """Files are written only once `save` has returned and training has changed the weight."""
    from trainer.checkpoint import storage

    write, trains = storage.write_pieces, threading.Event()

    def later(*args: Any) -> Any:
        assert trains.wait(60), "training waits for the write"
        return write(*args)

    storage.write_pieces = later
    weight = torch.zeros(8, 16)
    state = {"weight": ShardView(weight, torch.Size([8 * world.size, 16]), (8 * world.rank, 0))}
    checkpointer = Checkpointer(folder / "held", 0, quiet, world)
    checkpointer.reserve(state)
    for step in (1, 2):
        weight.fill_(step)
        trains.clear()
        checkpointer.save(step, state, {})
        weight.zero_()
        if world.is_first:
            trains.set()
            time.sleep(0.2)  # its thread has written, and waits for the other's
            (folder / "hanging").write_text(str(pending_operation()))
        world.barrier()
        trains.set()
        checkpointer.wait()
    checkpointer.close()
    storage.write_pieces = write


def full(world: World, folder: Path) -> None:
    """The second save finds no room for rank 1's file."""
    weight = torch.ones(1 << 10, 1 << 10)
    state = {"weight": ShardView(weight, torch.Size([2 << 10, 1 << 10]), (world.rank << 10, 0))}
    heard: list[str] = []

    def note(kind: str, step: int, message: str, **what: Any) -> None:
        heard.append(message)

    checkpointer = Checkpointer(folder / "full", 0, note, world)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2, 3):
        if (world.rank, step) == (1, 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # as on a full disk
        checkpointer.save(step, state, {})
        try:
            checkpointer.wait()
        except CheckpointError as error:
            heard.append(f"raised: {error}")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpointer.close()
    (folder / f"full{world.rank}.json").write_text(json.dumps(heard))


def broken(world: World, folder: Path) -> None:
    """Rank 1 meets with a bug as it saves."""
    dtype = torch.complex64 if world.rank == 1 else torch.float32
    state = {"weight": ShardView(torch.ones(8, 8, dtype=dtype), torch.Size([16, 8]), (8 * world.rank, 0))}
    checkpointer = Checkpointer(folder / "broken", 0, quiet, world)
    checkpointer.save(1, state, {})
    try:
        checkpointer.close()
    except Exception as error:
        (folder / f"broken{world.rank}").write_text(f"{type(error).__name__}: {error}")


def die_while_saving(rank: int, step: int) -> None:
    """Rank 2 is killed when it has written half of its file."""
    from trainer.checkpoint import storage

    write = storage.write_pieces

    def killed(path: Path, pieces: Any) -> Any:
        written = write(path, pieces)
        if rank == 2 and checkpoint_name(step) in path.parent.name:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    storage.write_pieces = killed


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def prepare(scene: Scene, runs: Path) -> None:
    """What a scene finds, before any of its ranks resumes."""
    if scene.name in ("damaged", "killed"):
        shutil.copytree(runs / "a", runs / scene.name)
    if scene.kind == "copy" and not (runs / "kept").exists():
        shutil.copytree(runs / "a", runs / "kept")
    if scene.name == "damaged":
        damage(runs / "damaged" / "checkpoints" / checkpoint_name(8) / "rank00001.safetensors")


def main(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    for number, scene in enumerate(SCENES):
        began, done = folder / f"began{number}", folder / f"done{number}"
        if rank == 0:
            prepare(scene, folder / "runs")
            began.touch()
        while not began.exists() or (rank >= scene.size and not done.exists()):
            time.sleep(0.05)
        if rank >= scene.size:
            continue
        world = World(torch.device("cpu"), rank, rank, scene.size, scene.size)
        if scene.size > 1:
            meet = f"file://{folder}/meet{number}"
            dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=scene.size)
        if scene.name == "killed":
            die_while_saving(rank, scene.steps)
        if scene.kind in ("held", "full", "broken"):
            {"held": held, "full": full, "broken": broken}[scene.kind](world, folder)
        else:
            {"train": train, "copy": copy}[scene.kind](scene, world, folder)
        if scene.size > 1:
            dist.barrier()
            dist.destroy_process_group()
        done.touch()


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, programs: Any) -> Path:
    """The folder in which all scenes have been played."""
    folder = tmp_path_factory.mktemp("scenes")
    write_corpus(folder / "corpus")
    ranks = [programs.start(__file__, rank, folder) for rank in range(RANKS)]
    try:
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    last = folder / f"began{len(SCENES) - 1}"
    assert last.exists(), "\n".join(errors)
    assert ranks[2].returncode == -signal.SIGKILL, errors[2]
    return folder


def same(ours: Any, theirs: Any) -> None:
    """Asserts that two states are the same, bit for bit."""
    (skeleton, tensors), (other_skeleton, other_tensors) = split(ours), split(theirs)
    assert skeleton == other_skeleton and tensors.keys() == other_tensors.keys()
    for name, tensor in tensors.items():
        assert isinstance(tensor, torch.Tensor) and torch.equal(tensor, torch.as_tensor(other_tensors[name])), name


def losses(folder: Path, name: str) -> list[float]:
    return [line["loss/total"] for line in metrics(folder / "runs" / name, "loss/total")]


def test_4_2_1_and_4_ranks_are_one_run(played: Path) -> None:
    ours, whole = losses(played, "a"), losses(played, "whole")
    assert len(ours) == len(whole) == 8
    assert max(abs(a - b) for a, b in zip(ours, whole, strict=True)) < 1e-5
    assert (played / "streams" / "a").read_text() == (played / "streams" / "whole").read_text()


def test_names_and_shapes_know_no_layout(played: Path) -> None:
    ours, _ = read(played / "runs" / "a" / "checkpoints" / checkpoint_name(8))
    whole, _ = read(played / "runs" / "whole" / "checkpoints" / checkpoint_name(8))

    def shapes(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: shapes(value) for key, value in tree.items()}
        return (tree.shape, tree.dtype) if isinstance(tree, torch.Tensor) else tree

    assert shapes(ours) == shapes(whole)
    assert ours["model"]["layers.1.moe.experts.gate_up.weight"].shape[0] == 4
    torch.testing.assert_close(ours["model"], whole["model"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("step", "size"), [(4, 4), (8, 4)])
def test_another_layout_loads_what_was_saved(played: Path, step: int, size: int) -> None:
    state, meta = read(played / "copies" / checkpoint_name(step))
    saved, _ = read(played / "runs" / ("kept" if step == 4 else "a") / "checkpoints" / checkpoint_name(step))
    assert meta == {"size": size}
    same(state, saved)


def test_each_rank_writes_its_part_once(played: Path) -> None:
    folder = played / "copies" / checkpoint_name(8)
    files = [folder / f"rank{rank:05d}.safetensors" for rank in range(4)]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 1.6 * min(sizes), "replicas share the writing"
    alone = (played / "runs" / "whole" / "checkpoints" / checkpoint_name(8) / "rank00000.safetensors").stat().st_size
    assert sum(sizes) < 1.2 * alone


def test_a_rank_reads_only_what_it_holds(played: Path, tmp_path: Path) -> None:
    source = played / "runs" / "a" / "checkpoints" / checkpoint_name(8)
    index = json.loads((source / "tensors.json").read_text())
    name = "model/layers.1.moe.experts.gate_up.weight"
    pieces = index[name]["pieces"]
    assert len(pieces) == 4, "two experts each of two groups, cut in two"
    copy = shutil.copytree(source, tmp_path / source.name)
    for file in {piece["file"] for piece in pieces} - {pieces[0]["file"]}:
        (copy / file).unlink()
    offsets, shape = pieces[0]["offsets"], pieces[0]["shape"]
    part = ShardView(torch.empty(shape), torch.Size(index[name]["shape"]), tuple(offsets))
    box = tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
    nothing = {
        other.removeprefix("model/"): ShardView(torch.empty(0), shape, (0,) * len(shape))
        for other, shape in saved_shapes(source).items()
        if other.startswith("model/") and other != name
    }
    plain = name.removeprefix("model/")
    read(copy, {"model": {plain: part, **nothing}}, rest=False, verified=True)
    assert torch.equal(part.data, read(source)[0]["model"][plain][box])


def test_a_damaged_shard_is_named_and_the_checkpoint_before_used(played: Path) -> None:
    run = played / "runs" / "damaged"
    said = [event["message"] for event in events(run)]
    assert any("damaged checkpoint skipped" in m and "rank00001.safetensors" in m for m in said), said
    assert any(m.startswith("resumed from step_00000006") for m in said)
    assert losses(played, "damaged")[:7] == pytest.approx(losses(played, "whole")[:7], abs=1e-5)


def test_a_run_of_ranks_begins_from_weights_and_resumes_in_another_precision(played: Path) -> None:
    said = [event["message"] for event in events(played / "runs" / "from")]
    assert any(m.startswith("weights from") and "runs/a/checkpoints/step_00000008" in m for m in said), said
    assert any("precision recipe bf16 -> fp8_delayed" in m for m in said), said
    began, went_on = losses(played, "from")
    assert began < losses(played, "whole")[0] - 0.1 and abs(went_on - began) < 1


def test_a_rank_killed_while_it_saves_leaves_the_checkpoints_before(played: Path) -> None:
    run = played / "runs" / "killed"
    visible = [path.name for path in list_checkpoints(run / "checkpoints")]
    assert visible == [checkpoint_name(8), checkpoint_name(9)]
    assert any(path.name.startswith(".writing_") for path in (run / "checkpoints").iterdir())
    trainer = Trainer(config_of(overrides(played, Scene("killed", 1, (), 10))))
    assert trainer.run.folder.first_step == 9
    trainer.train()
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [checkpoint_name(9), checkpoint_name(10)]


def test_a_rank_that_cannot_write_costs_all_that_checkpoint_and_nothing_else(played: Path) -> None:
    first, second = (json.loads((played / f"full{rank}.json").read_text()) for rank in range(2))
    why = "step 2 could not be written to .*step_00000002: rank 1: File too large"
    assert [line.split()[0] for line in first] == ["saved", "step", "raised:", "saved"]
    assert re.match(why, first[1]) and re.match(f"raised: checkpoint of {why}", first[2])
    assert second == [first[2]], "rank 0 speaks for all"
    assert sorted(path.name for path in (played / "full").iterdir()) == [checkpoint_name(1), checkpoint_name(3)]


def test_a_bug_in_a_save_is_that_of_its_rank(played: Path) -> None:
    first, second = ((played / f"broken{rank}").read_text() for rank in range(2))
    assert second.startswith("TypeError: weight is torch.complex64"), second
    assert first == f"DistError: rank 1 could not save: {second.removeprefix('TypeError: ')}"


def test_training_changes_weights_before_they_are_written_and_the_file_has_them_as_they_were(played: Path) -> None:
    for step in (1, 2):
        state, _ = read(played / "held" / checkpoint_name(step))
        assert torch.equal(state["weight"], torch.full((16, 16), float(step)))


def test_a_rank_that_waits_for_the_file_of_another_does_not_hang(played: Path) -> None:
    assert (played / "hanging").read_text() == "None"


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
