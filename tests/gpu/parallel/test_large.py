"""Large weights that are gathered straight on two GPUs, where kernels run long after the host has moved on: the run is
the one in which FSDP copies them.

Two runs from one seed need not agree to the bit on a GPU (sums by atomics), so they are the measure: a run without
copies may be as far from the first run with them as a few times the second one is. The ranks run this file as a
program.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import config_of

from trainer.launch.world import World
from trainer.parallel import mesh
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

STEPS, BATCH, LENGTH = 6, 8, 4096
RUN = ["parallel=fsdp", "model=moonlight_16b", "model.num_layers=3", "model.vocab_size=32768", "data=text"]
RUN += [f"trainer.sequence_length={LENGTH}", "trainer.microbatch_size=2", f"trainer.global_batch_size={BATCH}"]
RUN += ["compile.enabled=false", "optim.warmup_steps=2", "optim.lr=1e-4", "trainer.max_steps=20", "data.path=."]
FREED = ["parallel.reshard_after_forward=true", "parallel.reduce_each_microbatch=true"]
CASES = {
    "bf16": ["precision=bf16", *FREED],
    "fp8_delayed": ["precision=fp8_delayed", *FREED],
    "fp8_block": ["precision=fp8_block", *FREED],
    "fp8_jit kept": ["precision=fp8_jit", "parallel.reshard_after_forward=false"],
}
WAYS = {"straight": mesh.LARGE, "copied": 1 << 62, "copied again": 1 << 62}


def train(keys: list[str], world: World) -> list[float]:
    """Losses of some steps. The host waits for none of them."""
    config = config_of([*RUN, *keys])
    engine = build_engine(config, world.device, world=world)
    generator = torch.Generator().manual_seed(3)
    shape = BATCH, LENGTH + 1
    batches = [torch.randint(0, config.model.vocab_size, shape, generator=generator).cuda() for _ in range(STEPS)]
    results = [
        train_step(engine, i, engine.share_of(tokens), config.trainer.microbatch_size)
        for i, tokens in enumerate(batches, 1)
    ]
    assert all(bool(result.verdict.ok) for result in results)
    return [float(result.metrics["loss/total"]) for result in results]


def pools() -> list[float]:
    """Bytes reserved for the steps' stream, and for others."""
    here, sizes = torch.cuda.current_stream().cuda_stream, [0.0, 0.0]
    for segment in torch.cuda.memory_snapshot():
        sizes[segment["stream"] != here] += segment["total_size"]
    return sizes


def main(out: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    world = World(device, rank, rank, size, size)
    curves: dict[str, dict[str, list[float]]] = {}
    reserved: dict[str, list[float]] = {}
    for name, keys in CASES.items():
        curves[name] = {}
        for way, bound in WAYS.items():
            mesh.LARGE = bound
            curves[name][way] = train(keys, world)
            if way == "straight":
                reserved[name] = pools()
            gc.collect()
            torch.cuda.empty_cache()
    if world.is_first:
        out.write_text(json.dumps({"curves": curves, "reserved": reserved}))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(ask_ranks: Callable[..., Any]) -> dict[str, Any]:
    """Losses by case and way; memory by case."""
    return ask_ranks(__file__, [2])[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CASES)
def test_large_weights_without_copies_train_the_same(found: dict[str, Any], name: str) -> None:
    ours, theirs, again = (torch.tensor(found["curves"][name][way], dtype=torch.float64) for way in WAYS)
    assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-6)
    noise = float((again - theirs).norm())
    assert float((ours - theirs).norm()) <= max(4 * noise, 1e-4 * float(theirs.norm()))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CASES)
def test_memory_is_that_of_the_steps(found: dict[str, Any], name: str) -> None:
    """What one stream has freed another one cannot have: messages leave little in pools of their own."""
    steps, elsewhere = found["reserved"][name]
    assert elsewhere < 0.1 * steps


if __name__ == "__main__":
    main(Path(sys.argv[1]))
