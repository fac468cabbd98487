"""Large weights and their gradients, which travel without FSDP's copies, are those that travel with them, bit for bit.

The ranks run this file as a program, over gloo: each case once as it is, once with everything left to FSDP.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import config_of
from ranks import joined

from trainer.launch.world import World
from trainer.parallel import large, mesh
from trainer.parallel.shard_views import is_shared, local
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

STEPS, MICROBATCHES = 2, 2
RUN = ["trainer.device=cpu", "compile.enabled=false", "optim.warmup_steps=1", "optim.lr=5e-4"]
RUN += ["model.vocab_size=128", "model.hidden_size=64", "model.num_layers=2", "model.num_dense_layers=0"]
RUN += ["model.num_mtp_layers=0", "model.num_experts=4", "trainer.microbatch_size=1", "trainer.sequence_length=16"]
RUN += ["data=text", "data.path=."]
EACH, ONCE = ([f"parallel.reduce_each_microbatch={way}"] for way in ("true", "false"))
FSDP, HSDP = ["parallel=fsdp"], ["parallel=hsdp", "parallel.shard=2"]
LARGE = 4096  # head, embedding, stacks of experts, and some others
CASES = {
    2: {
        "once": [*FSDP, *ONCE],
        "kept and recomputed": [*FSDP, *EACH, "parallel.reshard_after_forward=false", "recompute=full"],
        "uneven": [*FSDP, *EACH, "model.num_experts=3"],
        "fp8": [*FSDP, *EACH, "precision=fp8_delayed", "parallel.fp8_all_gather=true"],
        "quantised on arrival": [*FSDP, *EACH, "precision=fp8_jit"],
    },
    4: {"groups": [*HSDP, *EACH], "spread": [*FSDP, *EACH, "parallel.expert=2"], "spread once": [*HSDP, *ONCE]},
}


def train(keys: list[str], world: World) -> dict[str, Any]:
    """Losses and norms of some steps, and a sum of all masters."""
    batch = world.size * MICROBATCHES
    fp32 = [] if any(key.startswith("precision=") for key in keys) else ["precision=fp32"]
    config = config_of([*RUN, f"trainer.global_batch_size={batch}", *fp32, *keys])
    engine = build_engine(config, world.device, world=world)
    weights = [p for p in engine.model.parameters() if is_shared(p) and is_large(p)]
    times = STEPS * (MICROBATCHES if EACH[0] in keys else 1)
    seen: dict[str, Any] = {"numbers": [], "wanted": times * len(weights)}
    generator = torch.Generator().manual_seed(3)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 128, (batch, 17), generator=generator)
        result = train_step(engine, step, engine.share_of(tokens), config.trainer.microbatch_size)
        assert bool(result.verdict.ok)
        seen["numbers"] += [float(result.metrics[key]).hex() for key in ("loss/total", "optim/grad_norm")]
    engine.microbatch.release()
    wholes = [
        whole
        for _, group in large.groups(engine.model)
        if isinstance(group.all_gather, large.LargeWeights)
        for whole in group.all_gather._buffers
    ]
    assert all(whole.numbers.numel() for whole in wholes), "each has been gathered"
    assert not any(whole.numbers.untyped_storage().size() for whole in wholes), "and freed"
    seen["wholes"] = [len(wholes), len(weights)]
    masters = torch.cat([local(p).detach().double().flatten() for p in engine.model.parameters()])
    seen["numbers"].append(float((masters * torch.arange(len(masters))).sum()).hex())
    return seen


def is_large(weight: torch.Tensor) -> bool:
    """Cut evenly, of LARGE numbers."""
    shards = weight.device_mesh.size(weight.device_mesh.ndim - 1)  # type: ignore[attr-defined]
    return shards > 1 and weight.numel() >= LARGE and weight.shape[0] % shards == 0


def main(out: Path) -> None:
    with joined() as world:
        take, messages = large.LargeGradients._reduce, []

        def count(self: large.LargeGradients, group: Any, shard: Any, whole: torch.Tensor) -> None:
            take(self, group, shard, whole)
            if whole.grad is None:
                messages.append(shard)

        large.LargeGradients._reduce = count
        seen = {}
        for name, keys in CASES[world.size].items():
            messages.clear()
            mesh.LARGE = LARGE
            ours = train(keys, world) | {"messages": len(messages)}
            mesh.LARGE = 1 << 62
            seen[name] = [world.gather(way) for way in (ours, train(keys, world))]
        if world.is_first:
            out.write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def seen(ask_ranks: Callable[..., Any]) -> dict[int, dict]:
    """By world size and case: as it is, and with FSDP's copies; of each rank."""
    return ask_ranks(__file__, CASES)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in CASES for name in CASES[size]])
def test_gradients_without_a_copy_are_the_same(seen: dict[int, dict], size: int, name: str) -> None:
    for ours, theirs in zip(*seen[size][name], strict=True):
        assert ours["messages"] == ours["wanted"] > 0
        assert ours["wholes"][0] == ours["wholes"][1] > 0 and theirs["wholes"][0] == 0
        assert ours["numbers"] == theirs["numbers"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
