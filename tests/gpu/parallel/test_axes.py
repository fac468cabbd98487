"""Two GPUs that share sequences (context), heads and vocabulary (tensor), blocks (pipeline) or Muon's matrices train as
one does, over NCCL, with our kernels.

The ranks run this file as a program: all cases one after the other.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composed import config_of

from trainer.launch.world import World
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

OUT, STEPS, BATCH, LENGTH = "--out", 5, 4, 256
RUN = [
    "trainer.max_steps=20",
    "optim.warmup_steps=2",
    "optim.lr=5e-4",
    "data=text",
    "data.path=.",
    "trainer.device=cuda",
]
RUN += [f"trainer.global_batch_size={BATCH}", "trainer.microbatch_size=1", f"trainer.sequence_length={LENGTH}"]
EAGER, COMPILED = "compile.enabled=false", "compile.enabled=true"
RECIPES = {"fp32": ["precision=fp32", EAGER], "bf16": ["precision=bf16", "precision.backend=cuda", COMPILED]}
RECIPES |= {name: [f"precision={name}", "precision.backend=cuda", EAGER] for name in ("fp8_delayed", "fp8_block")}
RECIPES |= {"muon": ["precision=fp32", EAGER, "optim=muon_wsd"]}
AXES = [f"parallel.{axis}=2" for axis in ("context", "tensor", "pipeline")]
ZBV = "parallel.pipeline=2 parallel.stages_per_rank=2 parallel.schedule=zbv compile.enabled=auto"
AXES += [ZBV]
CASES = [(recipe, axis) for recipe in RECIPES for axis in AXES if recipe != "muon"]
CASES += [("muon", f"parallel.{axis}=2") for axis in ("shard", "tensor", "pipeline")]


def train(recipe: str, axis: str, world: World) -> list[float]:
    """Losses of some steps."""
    config = config_of([*RUN, *RECIPES[recipe], *(axis.split() if world.is_distributed else [])])
    torch._dynamo.reset()
    engine = build_engine(config, world.device, world=world)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, config.model.vocab_size, (BATCH, LENGTH + 1), generator=generator).to(world.device)
        result = train_step(engine, step, engine.share_of(tokens), config.trainer.microbatch_size)
        assert bool(result.verdict.ok)
        losses.append(float(result.metrics["loss/total"]))
    return losses


def main(out: str) -> None:
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if size > 1:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    world = World(device, rank, rank, size, size)
    cases = CASES if size > 1 else [(recipe, "") for recipe in RECIPES]
    curves = {f"{recipe} {axis}".strip(): train(recipe, axis, world) for recipe, axis in cases}
    if world.is_first:
        Path(out).write_text(json.dumps(curves))
    if world.is_distributed:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def curves(start_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses by case; of one GPU under the recipe's name alone."""
    made: dict[str, list[float]] = {}
    for size in (1, 2):
        out = tmp_path_factory.mktemp("ranks") / "curves.json"
        start_ranks(__file__, size, OUT, out)
        made |= json.loads(out.read_text())
    return made


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("recipe", "axis"), CASES)
def test_two_gpus_train_as_one_does(curves: dict[str, list[float]], recipe: str, axis: str) -> None:
    one, two = curves[recipe], curves[f"{recipe} {axis}"]
    exact = recipe in ("fp32", "muon")
    assert two[0] == pytest.approx(one[0], rel=1e-5 if exact else 1e-3)
    assert two == pytest.approx(one, rel=1e-4 if exact else 5e-3)


if __name__ == "__main__":
    main(sys.argv[2])
