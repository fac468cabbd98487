"""Weights that are quantised before they are gathered give the same run, bit for bit, as those quantised after.

The ranks run this file as a program, over gloo: all cases of a world size one after the other, each both ways.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import config_of, model_of
from ranks import joined
from torch import Tensor

from precision import gemm_layers
from precision.config import BackendChoice
from precision.hardware import Gpu
from trainer.config import Switch
from trainer.forecast.memory import is_gathered_in_fp8
from trainer.forecast.preflight import check
from trainer.launch.world import World
from trainer.parallel import gather, mesh
from trainer.parallel.mesh import Degrees
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

HOPPER = Gpu("NVIDIA H200", (9, 0))
STEPS = 2
LARGE = 2**15  # numbers: stacks of experts and some other weights travel by themselves, the rest together
RUN = ["trainer.device=cpu", "precision.backend=reference", f"trainer.max_steps={STEPS}", "optim.warmup_steps=1"]
RUN += ["trainer.global_batch_size=4", "trainer.microbatch_size=1", "trainer.sequence_length=32", "optim.lr=5e-4"]
RUN += ["model.vocab_size=512", "model.hidden_size=128", "model.num_layers=2", "model.num_mtp_layers=0"]
RUN += ["model.num_experts=4", "data=text", "data.path=."]
FSDP, HSDP = ["parallel=fsdp"], ["parallel=hsdp", "parallel.shard=2"]
EP = [*FSDP, "parallel.expert=2"]
TENSOR = ["precision=fp8_jit", "precision.scaling.granularity=tensor"]
ODD = ["model.moe_intermediate_size=208"]  # a part of these rows is no whole number of blocks, or of four
CASES = {
    2: {
        "delayed": [*FSDP, "precision=fp8_delayed"],
        "block": [*FSDP, "precision=fp8_block"],
        "block odd": [*FSDP, "precision=fp8_block", *ODD],
        "delayed spread": [*EP, "precision=fp8_delayed"],
        "current with head": [*FSDP, *TENSOR, "precision.table.lm_head=fp8"],
    },
    4: {
        "delayed groups": [*HSDP, "precision=fp8_delayed"],
        "current spread": [*HSDP, "parallel.expert=2", *TENSOR],  # by none
    },
}


def digest(tensors: list[Tensor]) -> str:
    made = hashlib.sha256()
    for t in tensors:
        made.update(t.detach().clone().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def train(keys: list[str], world: World) -> dict[str, list[str]]:
    """What each step computed with and came to, and an evaluation after each."""
    config = config_of([*RUN, *keys])
    engine = build_engine(config, world.device, world=world)
    operands: list[str] = []
    layers = [layer for layer in gemm_layers(engine.model) if layer.recipe.is_fp8]

    def note(layer: torch.nn.Module, args: tuple) -> None:
        operands.append(digest([t for t in layer.operand or () if t is not None]))  # type: ignore[union-attr]

    for layer in layers:
        layer.register_forward_pre_hook(note)
    wires = [local_wire(layer) for layer in layers]
    seen: dict[str, list[str]] = {"loss": [], "norm": [], "amax": [], "scale": [], "validation": []}
    generator = torch.Generator().manual_seed(3)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 512, (4, 33), generator=generator)
        result = train_step(engine, step, engine.share_of(tokens), config.trainer.microbatch_size)
        assert bool(result.verdict.ok)
        seen["loss"].append(float(result.metrics["loss/total"]).hex())
        seen["norm"].append(float(result.metrics["optim/grad_norm"]).hex())
        seen["amax"].append(digest([engine.arena.amax]))
        seen["scale"].append(digest([engine.arena.scale]))
        with torch.no_grad():
            loss = engine.model.loss(engine.model.hidden(tokens[:, :-1]), tokens[:, 1:])
        seen["validation"].append(float(loss).hex())
        engine.microbatch.release()
    return seen | {"operands": operands, "wires": wires}


def local_wire(layer: torch.nn.Module) -> str:
    """How its weight travels, or "stays"."""
    send = getattr(gather.local(layer.weight), "fsdp_pre_all_gather", None)  # type: ignore[arg-type]
    return "stays" if send is None else type(send.__self__).__name__


def main(out: Path) -> None:
    with joined() as world:
        mesh.LARGE = LARGE
        seen = {}
        for name, keys in CASES[world.size].items():
            ways = [[*keys, f"parallel.fp8_all_gather={way}"] for way in ("false", "true")]
            seen[name] = [world.gather(train(way, world)) for way in ways]
        if world.is_first:
            out.write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def seen(ask_ranks: Callable[..., Any]) -> dict[int, dict]:
    """By world size and case: gathered in BF16, gathered in FP8; of each rank."""
    return ask_ranks(__file__, CASES)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in CASES for name in CASES[size]])
def test_quantising_before_the_gather_is_quantising_after_it(seen: dict[int, dict], size: int, name: str) -> None:
    after, before = seen[size][name]
    for mine, theirs in zip(before, after, strict=True):
        for key in ("operands", "loss", "norm", "amax", "scale", "validation"):
            assert mine[key] == theirs[key], key
        stay = {"stays"} if name == "delayed spread" else set()  # experts that no other rank has
        assert set(theirs["wires"]) == {"GatherFormat"} | stay
        travels = mine["wires"].count("Fp8GatherFormat")
        some = "block" in name or "spread" in name
        assert travels > 0 if some else travels == len(mine["wires"])


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["precision=bf16"], "parallel.fp8_all_gather=true: no weight computes in FP8"),
        (["precision=fp8_jit"], "parallel.fp8_all_gather=true: .*granularity=row"),
        (
            ["precision=fp8_delayed", "parallel.shard=1", "parallel.replicate=2"],
            "true: parallel.shard=1 cuts",
        ),
    ],
)
def test_it_is_refused_where_nothing_can_travel_so(keys: list[str], why: str) -> None:
    config = config_of([*RUN, *FSDP, *keys, "parallel.fp8_all_gather=true"])
    with pytest.raises(ValueError, match=why):
        check(config, 2)


@pytest.mark.parametrize(
    ("precision", "gpu", "on"),
    [("fp8_delayed", HOPPER, True), ("fp8_block", HOPPER, True), ("bf16", HOPPER, False), ("fp8_delayed", None, False)],
)
def test_fp8_all_gather_auto_is_on_where_there_are_kernels(precision: str, gpu: Gpu | None, on: bool) -> None:
    config = config_of([*RUN, *FSDP, f"precision={precision}"])
    config.precision.backend = BackendChoice.cuda if gpu else BackendChoice.reference
    _, plan = model_of(config, gpu)
    assert config.parallel.fp8_all_gather is Switch.auto
    assert (
        any(is_gathered_in_fp8(config.parallel.fp8_all_gather, row, Degrees(shard=2)) for row in plan.gemms.values())
        is on
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
