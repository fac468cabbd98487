"""Every axis of the mesh, alone and with each other one, trains as one process does: 20 steps, in FP32 within 1e-5.

The first ten steps from the seed, the others from the checkpoint that one process wrote after ten. The ranks run this
file as a program, over gloo: all cases of a world size one after the other.
"""

import json
import os
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import composed
import pytest
import torch

from trainer.checkpoint import Checkpointer, checkpoint_name, read
from trainer.launch.world import World
from trainer.parallel.collectives import all_sum
from trainer.parallel.shard_views import copies, local
from trainer.step.engine import Engine, build_engine
from trainer.step.train_step import train_step

STEPS, SAVED, LENGTH, BATCH = 20, 10, 16, 4
RUN = ["trainer.device=cpu", "precision=fp32", "precision.backend=reference", f"trainer.max_steps={STEPS}"]
RUN += [f"trainer.global_batch_size={BATCH}", "trainer.microbatch_size=1", f"trainer.sequence_length={LENGTH}"]
RUN += ["model.vocab_size=64", "model.hidden_size=64", "model.num_layers=4", "model.num_mtp_layers=1"]
RUN += ["model.balance_loss_weight=0.01", "data=text", "data.path=.", "optim.lr=5e-4", "optim.warmup_steps=2"]
LOSSES = ("loss/total", "loss/lm", "loss/mtp", "loss/balance")

AXES: dict[str, tuple[str, ...]] = {
    axis: (f"parallel.{axis}=2",) for axis in ("replicate", "shard", "context", "tensor", "pipeline")
}
AXES["in turn"] = "parallel.pipeline=2", "parallel.stages_per_rank=2"
EXPERT = ("parallel.expert=2",)
ALONE = {**AXES, "shard expert": AXES["shard"] + EXPERT}
PAIRS = {f"{a} {b}": AXES[a] + AXES[b] for a, b in combinations(AXES, 2) if (a, b) != ("pipeline", "in turn")}
WITH_EXPERT = {f"{axis} expert": AXES[axis] + EXPERT for axis in ("replicate", "context", "tensor")}
FOUR = {"shard four expert": ("parallel.shard=4", *EXPERT)}
FOUR |= {f"shard {axis} expert": AXES["shard"] + AXES[axis] + EXPERT for axis in ("pipeline", "in turn")}
EIGHT = {
    "shard context in turn": AXES["shard"] + AXES["context"] + AXES["in turn"],
    "shard tensor pipeline expert": AXES["shard"] + AXES["tensor"] + AXES["pipeline"] + ("parallel.expert=4",),
    "replicate context tensor": AXES["replicate"] + AXES["context"] + AXES["tensor"],
}
CASES: dict[int, dict[str, tuple[str, ...]]] = {1: {"one": ()}, 2: ALONE | WITH_EXPERT, 4: PAIRS | FOUR, 8: EIGHT}


def gradients(engine: Engine, world: World) -> dict[str, list[float]]:
    """Sum and norm of each parameter's first moment, which after one step is a tenth of its gradient, of all parts."""
    names, sums = [], []
    for name, state in engine.optimizer.state_dict().items():
        moment = local(state["exp_avg"]).double()
        own = torch.zeros(2).double() if moment.is_meta else torch.stack([moment.sum(), moment.square().sum()])
        names.append(name)
        sums.append(own / copies(state["exp_avg"]))
    total, squares = all_sum([torch.stack(sums)], world)[0].unbind(1)
    return dict(zip(names, torch.stack([total, squares.sqrt()], 1).tolist(), strict=True))


def train(name: str, keys: tuple[str, ...], world: World, folder: Path) -> dict[str, Any]:
    """What each step says."""
    engine = build_engine(composed.config_of([*RUN, *keys]), world.device, world=world)
    generator = torch.Generator().manual_seed(3)
    lines, first = [], {}
    for step in range(1, STEPS + 1):
        if step == SAVED + 1 and world.many:
            engine.load_state(read(folder / "one" / checkpoint_name(SAVED), engine.restorable_tensors())[0])
        tokens = torch.randint(0, 64, (BATCH, LENGTH + 1), generator=generator)
        result = train_step(engine, step, engine.share_of(tokens), 1)
        lines.append({key: float(result.metrics[key]) for key in (*LOSSES, "optim/grad_norm")})
        first = first or gradients(engine, world)
        if step == SAVED and not world.many:
            checkpointer = Checkpointer(folder / name, 0, lambda *_, **__: None, world)
            checkpointer.save(step, engine.state(), {})
            checkpointer.close()
    return {"lines": lines, "gradients": first}


def main(out: Path, folder: Path) -> None:
    """As one of the ranks."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    control = None
    if size > 1:
        torch.distributed.init_process_group("gloo")
        control = cast(torch.distributed.ProcessGroup, torch.distributed.new_group(backend="gloo"))
    world, found = World(torch.device("cpu"), rank, rank, size, size, control=control), {}
    for name, keys in CASES[size].items():
        found[name] = train(name, keys, world, folder)
        if rank == 0:
            out.write_text(json.dumps(found))
    if size > 1:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def runs(ask_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What each world size computed."""
    return ask_ranks(__file__, CASES, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("size", "name"), [(size, name) for size in (2, 4, 8) for name in CASES[size]])
def test_losses_and_gradients_are_those_of_one_process(runs: dict[int, Any], size: int, name: str) -> None:
    ours, one = runs[size][name], runs[1]["one"]
    for key in LOSSES:
        assert [line[key] for line in ours["lines"]] == pytest.approx([line[key] for line in one["lines"]], abs=1e-5)
    for parameter, (total, norm) in one["gradients"].items():
        assert ours["gradients"][parameter][0] == pytest.approx(total, abs=1e-5 * max(norm, 1)), parameter
        assert ours["gradients"][parameter][1] == pytest.approx(norm, rel=1e-5, abs=1e-8), parameter


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
