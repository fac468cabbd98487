"""Gradients of stacks of experts that travel without FSDP's copy are those that travel with it, bit for bit.

The ranks run this file as a program, over gloo: each case once as it is, once with all gradients left to FSDP.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from trainer.build import build_engine
from trainer.config import load
from trainer.distributed import World
from trainer.parallel import reduce
from trainer.parallel.shards import local
from trainer.trainer import train_step

CONFIGS = Path(__file__).parents[3] / "configs"
STEPS, MICROBATCHES, BLOCKS, STACKS = 2, 2, 2, 2
RUN = ["trainer.device=cpu", "precision=fp32", "compile.enabled=false", "optim.warmup_steps=1", "optim.lr=5e-4"]
RUN += ["model.vocab_size=128", "model.hidden_size=64", "model.num_layers=2", "model.num_dense_layers=0"]
RUN += ["model.num_mtp_layers=0", "trainer.microbatch_size=1", "trainer.sequence_length=16"]
RUN += ["data=text", "data.path=."]
EACH, ONCE = ([f"parallel.reduce_each_microbatch={way}"] for way in ("true", "false"))
FSDP, HSDP = ["parallel=fsdp"], ["parallel=hsdp", "parallel.shard=2"]
CASES = {
    2: {
        "each": [*FSDP, *EACH],
        "once": [*FSDP, *ONCE],
        "kept": [*FSDP, *EACH, "parallel.reshard_after_forward=false"],
        "full": [*FSDP, *EACH, "recompute=full"],
        "uneven": [*FSDP, *EACH, "model.num_experts=7"],
    },
    4: {"groups": [*HSDP, *EACH], "spread": [*FSDP, *EACH, "parallel.expert=2"], "spread once": [*HSDP, *ONCE]},
}
MESSAGES = {name: STEPS * BLOCKS * STACKS * MICROBATCHES for cases in CASES.values() for name in cases}
MESSAGES |= {"uneven": 0, "once": MESSAGES["once"] // MICROBATCHES, "spread once": MESSAGES["once"] // MICROBATCHES}


def train(keys: list[str], world: World) -> dict[str, Any]:
    """Losses and norms of some steps, and a sum of all masters."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        batch = world.size * MICROBATCHES
        config = load(compose("train", overrides=[*RUN, f"trainer.global_batch_size={batch}", *keys]))
    engine = build_engine(config, world.device, world=world)
    seen: dict[str, Any] = {"numbers": [], "messages": 0}
    generator = torch.Generator().manual_seed(3)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 128, (batch, 17), generator=generator)
        result = train_step(engine, step, tokens, config.trainer.microbatch_size)
        assert bool(result.verdict.ok)
        seen["numbers"] += [float(result.metrics[key]).hex() for key in ("loss/total", "optim/grad_norm")]
    masters = torch.cat([local(p).detach().double().flatten() for p in engine.model.parameters()])
    seen["numbers"].append(float((masters * torch.arange(len(masters))).sum()).hex())
    return seen


def main(out: Path) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(torch.device("cpu"), rank, rank, size, size)
    torch.distributed.init_process_group("gloo")
    take, messages = reduce.StackedGradients._reduce, []

    def count(self: reduce.StackedGradients, group: Any, stack: Any, whole: torch.Tensor) -> None:
        take(self, group, stack, whole)
        if whole.grad is None:
            messages.append(stack)

    reduce.StackedGradients._reduce = count
    seen, cut_evenly = {}, reduce._cut_evenly
    for name, keys in CASES[size].items():
        messages.clear()
        ours = train(keys, world) | {"messages": len(messages)}
        reduce._cut_evenly = lambda shared: False
        seen[name] = [world.gather(way) for way in (ours, train(keys, world))]
        reduce._cut_evenly = cut_evenly
    if rank == 0:
        out.write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def seen(start_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    """By world size and case: as it is, and with FSDP's copies; of each rank."""
    made = {}
    for size in CASES:
        out = tmp_path_factory.mktemp("ranks") / "seen.json"
        start_ranks(__file__, size, out)
        made[size] = json.loads(out.read_text())
    return made


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in CASES for name in CASES[size]])
def test_without_a_copy_they_are_the_same(seen: dict[int, dict], size: int, name: str) -> None:
    for ours, theirs in zip(*seen[size][name], strict=True):
        assert ours["messages"] == MESSAGES[name] and theirs["messages"] == 0
        assert ours["numbers"] == theirs["numbers"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
