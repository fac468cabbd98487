"""Two GPUs that share a model (FSDP over NCCL, our kernels) train it as one does, and no step waits for the host.

The ranks run this file as a program. By itself it also measures:

    torchrun --nproc_per_node=2 tests/gpu/parallel/test_fsdp.py [KEY=VALUE ...]      tokens a second and GPU, memory
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composed import config_of

from trainer.launch.world import World
from trainer.parallel import mesh
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

DEVICE = os.environ.get("FSDP_TEST_DEVICE", "cuda")
RUN = [
    f"trainer.device={DEVICE}",
    "trainer.max_steps=20",
    "optim.warmup_steps=2",
    "optim.lr=5e-4",
    "data=text",
    "data.path=.",
]
SMALL = ["trainer.global_batch_size=8", "trainer.microbatch_size=2", "trainer.sequence_length=256"]
RECIPES = ["bf16", "fp8_delayed", "fp8_jit", "fp8_block"]
CASES = {recipe: [f"precision={recipe}", "precision.backend=cuda", "compile.enabled=false"] for recipe in RECIPES}
CASES |= {"fp32": ["precision=fp32", "compile.enabled=false"]}
CASES |= {f"{r} compiled": [f"precision={r}", "precision.backend=cuda", "compile.enabled=true"] for r in RECIPES[:2]}
CASES |= {"fp8_delayed full": [*CASES["fp8_delayed"], "recompute=full"]}
IN_FP8 = ["fp8_delayed", "fp8_block", "fp8_delayed compiled"]  # weights that are quantised before they travel
CASES |= {f"{name} gathered": [*CASES[name], "parallel.fp8_all_gather=true"] for name in IN_FP8}
CASES = {name: keys if "gathered" in name else [*keys, "parallel.fp8_all_gather=false"] for name, keys in CASES.items()}
SPREAD = "parallel.expert=2"
CASES |= {f"{name} experts": [*CASES[name], SPREAD] for name in ("bf16 compiled", "fp8_delayed compiled")}
KEPT = ["bf16", "fp8_jit", "fp8_block gathered", "fp8_delayed compiled gathered", "fp8_delayed compiled experts"]
CASES |= {f"{name} freed": [*CASES[name], "parallel.reshard_after_forward=true"] for name in KEPT}
OUT = "--out"
LARGE = 4096  # numbers of a weight whose gradient travels by itself: most of this small model's
STEPS, QUIET = 6, 4  # the step that must not wait
SPEED = ["model=deepseek_300m", "trainer.global_batch_size=16", "trainer.microbatch_size=4"]
SPEED += ["trainer.sequence_length=2048", "compile.enabled=true"]


def train(keys: list[str], world: World) -> list[float]:
    """Losses of some steps."""
    share = ["parallel=fsdp"] if world.is_distributed else []
    spread = SPREAD in keys
    own = [key for key in keys if world.is_distributed or key != SPREAD]
    config = config_of([*RUN, *SMALL, *share, *own])
    torch._dynamo.reset()
    engine = build_engine(config, world.device, world=world)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, config.model.vocab_size, (8, 257), generator=generator).to(world.device)
        # the reference backend asks how many rows experts have, and tokens on their way are counted
        quiet = step == QUIET and "precision=fp32" not in keys and not spread
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")
        try:
            result = train_step(engine, step, engine.share_of(tokens), config.trainer.microbatch_size)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert bool(result.verdict.ok)
        losses.append(float(result.metrics["loss/total"]))
    return losses


def measure(keys: list[str], world: World) -> None:
    """Print tokens a second and GPU of steps after the first ones."""
    share = ["parallel=fsdp"] if world.is_distributed else []
    config = config_of([*RUN, *SPEED, *share, *keys])
    engine = build_engine(config, world.device, world=world)
    t = config.trainer
    tokens = torch.randint(0, config.model.vocab_size, (t.global_batch_size, t.sequence_length + 1)).to(world.device)
    warm, steps, began = 5, 15, 0.0
    for step in range(1, warm + steps + 1):
        if step == warm + 1:
            torch.cuda.synchronize()
            began = time.perf_counter()
        train_step(engine, step, engine.share_of(tokens), t.microbatch_size)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    if world.is_first:
        rate = t.global_batch_size * t.sequence_length / seconds / world.size
        memory = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"{' '.join(keys)}: {world.size} GPUs, {rate:,.0f} tokens/s a GPU, {seconds:.4f} s a step, {memory:.1f} GiB"
        )


def main(out: str | None) -> None:
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device(DEVICE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        backend, bound = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
        torch.distributed.init_process_group(backend, device_id=bound)
    world = World(device, rank, rank, size, size)
    if out is None:
        for recipe in ("bf16", "fp8_delayed"):
            measure([f"precision={recipe}", *sys.argv[1:]], world)
    else:
        mesh.LARGE = LARGE
        curves = {name: train(keys, world) for name, keys in CASES.items()}
        if world.is_first:
            Path(out).write_text(json.dumps(curves))
    if world.is_distributed:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def curves(
    start_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, list[float]]]:
    """Losses by number of GPUs and case."""
    made = {}
    for size in (1, 2):
        out = tmp_path_factory.mktemp("ranks") / "curves.json"
        start_ranks(__file__, size, OUT, out)
        made[size] = json.loads(out.read_text())
    return made


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CASES)
def test_two_gpus_train_as_one_does(curves: dict[int, dict[str, list[float]]], name: str) -> None:
    one, two = curves[1][name], curves[2][name]
    assert two[0] == pytest.approx(one[0], rel=1e-5 if name == "fp32" else 2e-4)
    assert two == pytest.approx(one, rel=1e-4 if name == "fp32" else 5e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", IN_FP8)
def test_weights_that_travel_in_fp8_give_the_same_numbers(curves: dict[int, dict[str, list[float]]], name: str) -> None:
    assert curves[2][f"{name} gathered"][0] == curves[2][name][0]
    assert curves[2][f"{name} gathered"] == pytest.approx(curves[2][name], rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", KEPT)
def test_weights_that_stay_give_the_same_numbers(curves: dict[int, dict[str, list[float]]], name: str) -> None:
    """A GPU with room keeps them for a step; the others of these runs free them after each pass."""
    assert curves[2][name][0] == curves[2][f"{name} freed"][0]
    assert curves[2][name] == pytest.approx(curves[2][f"{name} freed"], rel=1e-4)


if __name__ == "__main__":
    main(sys.argv[2] if sys.argv[1:2] == [OUT] else None)
