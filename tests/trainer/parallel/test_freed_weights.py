"""Weights of two ranks, in our kernels, that are freed between their passes give what weights give that stay, and are
made no more often than that needs: the transposed copy for a backward pass alone, parts quantised once, and experts
that no other rank has once a step.

The ranks run this file as a program, over gloo, the kernels in Triton's interpreter.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import config_of
from ranks import joined

import trainer.step.engine
from precision.backends import cuda
from precision.hardware import Gpu
from precision.kernels import ffn_ops, weights
from trainer.launch.world import World
from trainer.parallel import gather
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

RUN = ["trainer.device=cpu", "precision=fp8_delayed", "precision.backend=cuda", "optim.warmup_steps=1"]
RUN += ["trainer.global_batch_size=4", "trainer.microbatch_size=1", "trainer.sequence_length=8", "optim.lr=5e-4"]
RUN += ["model.vocab_size=128", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2"]
RUN += ["model.kv_lora_rank=32", "model.qk_nope_head_dim=32", "model.qk_rope_head_dim=32", "model.v_head_dim=32"]
RUN += ["model.num_dense_layers=0", "model.moe_intermediate_size=64", "model.num_experts=2"]
RUN += ["model.num_experts_per_token=1", "model.num_mtp_layers=0", "data=text", "data.path=."]
RUN += ["parallel=fsdp", "parallel.fp8_all_gather=true", "compile.enabled=false"]
WAYS = {way: [f"parallel.reshard_after_forward={way == 'freed'}".lower()] for way in ("kept", "freed")}
CASES = WAYS | {f"{way}, experts spread": [*keys, "parallel.expert=2"] for way, keys in WAYS.items()}
WEIGHTS, STACKS = 7, 2  # of each of two blocks; of these, of experts


def train(keys: list[str], world: World, made: Counter[str]) -> dict[str, float]:
    """Loss and norm of a step of two microbatches, how often a weight that had travelled was transposed and a part of
    one quantised, and how often one of experts was made from its master, with its transposed copy."""
    config = config_of([*RUN, *keys])
    engine = build_engine(config, world.device, world=world)
    made.clear()
    tokens = torch.randint(0, 128, (4, 9), generator=torch.Generator().manual_seed(3))
    result = train_step(engine, 1, engine.share_of(tokens), config.trainer.microbatch_size)
    assert bool(result.verdict.ok)
    metrics = {key: float(result.metrics[key]) for key in ("loss/total", "optim/grad_norm")}
    made_of = {key: made[key] for key in ("transposed", "quantised", "experts")}
    return metrics | made_of | {"amax": float(engine.arena.amax.double().sum())}


def main(out: Path) -> None:
    with joined() as world:
        trainer.step.engine.detect = lambda device: Gpu("NVIDIA H200", (9, 0))
        made, transpose, cast = Counter[str](), cuda.transpose_weight, cuda.cast_weight

        def count(data: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            made["transposed"] += 1
            return transpose(data, out)

        def count_experts(master: torch.Tensor, *args: Any, **more: Any) -> Any:
            made["experts"] += master.dim() == 3 and (*args, *more.values())[-1]
            return cast(master, *args, **more)

        cuda.transpose_weight = ffn_ops.transpose_weight = weights.transpose_weight = count
        cuda.cast_weight = count_experts
        quantise = gather.Fp8GatherFormat._quantised

        def count_part(self: gather.Fp8GatherFormat, shape: torch.Size) -> tuple[torch.Tensor, ...]:
            made["quantised"] += 1
            return quantise(self, shape)

        gather.Fp8GatherFormat._quantised = count_part
        seen = {name: train(keys, world, made) for name, keys in CASES.items()}
        if world.is_first:
            out.write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def seen(ask_ranks: Callable[..., Any]) -> dict[str, dict[str, float]]:
    """What each case came to."""
    return ask_ranks(__file__, [2])[2]


@pytest.mark.parametrize(("where", "stay"), [("", 0), (", experts spread", STACKS)])
def test_freed_weights_are_those_that_stay(seen: dict[str, dict[str, float]], where: str, stay: int) -> None:
    kept, freed = seen[f"kept{where}"], seen[f"freed{where}"]
    assert kept.pop("transposed") == 2 * (WEIGHTS - stay), "once a step"
    assert freed.pop("transposed") == 2 * 2 * (WEIGHTS - stay), "once a microbatch, not in each of its passes"
    each = WEIGHTS - stay
    assert kept.pop("quantised") == 2 * each, "once a step"
    assert freed.pop("quantised") == each + 2 * each, "those of the last block, which are not freed, twice"
    assert kept["experts"] == 2 * stay, "once a step"
    assert kept == freed


if __name__ == "__main__":
    main(Path(sys.argv[1]))
