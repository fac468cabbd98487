"""Ranks that share weights and experts look together: training does not notice, all say the same, which is what one
process says.

Two ranks run this file as a program, over gloo.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import composed
import pytest
import torch
from ranks import joined
from small import SMALL_MODEL
from torch import Tensor

from trainer.config import Config
from trainer.health import shadow
from trainer.health.health import Health
from trainer.health.stragglers import Stragglers
from trainer.launch.world import World
from trainer.parallel import large, mesh
from trainer.parallel.gather import local
from trainer.step.engine import Engine, build_engine
from trainer.step.metrics import copy_to_host
from trainer.step.train_step import train_step

CPU = torch.device("cpu")
RANKS, STEPS, BATCH = 2, 2, 4
LARGE = 2**13  # numbers: stacks of experts, head and embedding travel by themselves
RUN = ["trainer.device=cpu", "precision.backend=reference", f"trainer.max_steps={STEPS}", "optim.warmup_steps=1"]
RUN += [f"trainer.global_batch_size={BATCH}", "trainer.microbatch_size=1", "trainer.sequence_length=24", "data=text"]
RUN += [*SMALL_MODEL, "data.path=."]
FSDP = ["parallel=fsdp"]
CASES = {
    "delayed, experts spread": [
        *FSDP,
        "precision=fp8_delayed",
        "parallel.expert=2",
        "parallel.reduce_each_microbatch=true",
    ],
    "block": [*FSDP, "precision=fp8_block", "parallel.fp8_all_gather=true"],
}


def config_of(keys: list[str]) -> Config:
    return composed.config_of([*RUN, *keys])


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(320, (BATCH, 25), generator=generator) for _ in range(STEPS)]


def state(engine: Engine) -> list[Tensor]:
    """This rank's parts, copied."""
    moments = [t for tensors in engine.optimizer.state_dict().values() for t in tensors.values()]
    shared = [local(t).detach() for t in (*engine.model.parameters(), *moments)]
    return [t.clone() for t in (*shared, engine.arena.amax, engine.arena.history, *engine.model.router_bias)]


def left(engine: Engine) -> list[int]:
    """Bytes of large weights that are still gathered, and gradients that wait for their messages."""
    gathers = [group.all_gather for _, group in large.groups(engine.model)]
    wholes = [whole for gather in gathers if isinstance(gather, large.LargeWeights) for whole in gather._buffers]
    assert any(whole.numbers.numel() for whole in wholes)
    held = sum(whole.numbers.untyped_storage().size() for whole in wholes)
    return [held, len(engine.microbatch._large._pending)]  # type: ignore[attr-defined]


def train(config: Config, world: World, every: int) -> tuple[list[Tensor], dict[str, Any]]:
    """The state after the last step, and all that was said of it."""
    engine, said = build_engine(config, CPU, world=world), dict[str, Any]()
    health = Health(replace(config.health, every=every, shadow_every=every), engine, said.update, BATCH, 1)
    for step, tokens in enumerate(batches(), start=1):
        health.before(step, engine.share_of(tokens))
        with health.inside(step, logged=True):
            result = train_step(engine, step, engine.share_of(tokens), 1)
        assert bool(result.verdict.ok)
        if every:
            said |= health.report(step, copy_to_host(health.collect(result.load, result.verdict.ok)))
    if every:
        shadow.compare(engine, engine.share_of(batches()[0])[:1], BATCH)
        said["left"] = left(engine)
    return state(engine), said


def waiting(world: World) -> dict[str, float]:
    """What is said of two ranks of which the second waits for its data in each of two steps, on a clock of its own."""
    stragglers, said, now = Stragglers(world, compares=True), dict[str, float](), 0.0
    with mock.patch.object(time, "perf_counter", side_effect=lambda: now):
        for _ in range(2):
            with stragglers.waits_for_data():
                now += 0.25 * world.rank
            said = stragglers.read(seconds=1.0, gpus=[])
    return said


def main(out: Path) -> None:
    with joined() as world:
        mesh.LARGE = LARGE
        said: dict[str, dict[str, Any]] = {"waiting": waiting(world)}
        for name, keys in CASES.items():
            config = config_of(keys)
            alone, _ = train(config, world, 0)
            watched, said[name] = train(config, world, 1)
            assert len(alone) == len(watched)
            assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True)), name
            assert len(set(map(json.dumps, world.gather(said[name])))) == 1, "all ranks say the same"
        if world.is_first:
            out.write_text(json.dumps(said))


@pytest.fixture(scope="module")
def said(ask_ranks: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """What two ranks say in the last step, by case; that training did not notice, they have seen to."""
    return ask_ranks(__file__, [RANKS])[RANKS]


def test_the_rank_that_waits_for_its_data_is_named(said: dict[str, dict[str, Any]]) -> None:
    assert set(said["waiting"]) == {"ranks/data_wait", "ranks/data_rank"}
    assert said["waiting"]["ranks/data_rank"] == 1 and said["waiting"]["ranks/data_wait"] == 0.25


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_seen(said: dict[str, dict[str, Any]], name: str) -> None:
    line = said[name]
    names = line["names"]["fp8"]
    delayed = name.startswith("delayed")
    clipped = config_of([]).health.alerts.saturated if delayed else 0.0  # a scale of their own amax clips none
    for what, most in (("saturated", clipped), ("underflown", 0.02), ("error", None)):
        values = line["fp8"][what]
        assert len(values) == len(names)
        for tensor, value in zip(names, values, strict=True):
            # half a step is at most 2^-4 of a number in E4M3, 2^-3 in E5M2, and so for norms; the few clipped fit in
            rounding = 2.0**-3 if delayed and tensor.endswith(":grad") else 2.0**-4
            assert value is not None and value <= (rounding if most is None else most), (what, tensor, value)
    assert all(value > 1 for place in line["blocks"].values() for value in place)
    assert math.isfinite(line["shadow/loss_gap"])
    assert 0 < line["optim/update_ratio"] < 0.1
    assert [sum(block) for block in line["load"]] == [BATCH * 24 * 2] * 2


@pytest.mark.parametrize("name", CASES)
def test_a_shadow_holds_no_weights_and_gradients_afterwards(said: dict[str, dict[str, Any]], name: str) -> None:
    assert said[name]["left"] == [0, 0]


def one_process(precision: str) -> tuple[Engine, shadow.Shadow]:
    """The engine after the first step, and what it says of the second's tokens: the ranks' first sequences."""
    engine = build_engine(config_of([f"precision={precision}"]), CPU)
    first, second = batches()
    train_step(engine, 1, engine.share_of(first), 1)
    return engine, shadow.compare(engine, second[::2], BATCH)


def test_gradients_are_as_far_from_bf16_as_those_of_one_process(said: dict[str, dict[str, Any]]) -> None:
    """The first step's scales are those of what travels together, so that the casts are others, and their errors as
    large: in the squared sine of each angle, of which one is what the other is on average."""
    engine, seen = one_process("fp8_delayed")
    ranks = said["delayed, experts spread"]["shadow"]["cosine"]
    ours = torch.tensor([ranks[name] for name in shadow.module_names(engine)], dtype=torch.float64)
    assert len(ranks) == len(ours)
    here, there = (float((1 - cosine.square()).mean()) for cosine in (ours, seen.cosine))
    assert there / 4 < here < 4 * there, "a factor of 2 in the error; another model's gradient is orthogonal"


def test_one_process_reports_the_same(said: dict[str, dict[str, Any]]) -> None:
    engine, seen = one_process("fp8_block")
    second = batches()[1]
    ranks = said["block"]
    assert float(seen.loss_gap) == pytest.approx(ranks["shadow/loss_gap"], abs=2e-5)
    names = shadow.module_names(engine)
    for name, cosine in zip(names, seen.cosine.tolist(), strict=True):
        assert cosine == pytest.approx(ranks["shadow"]["cosine"][name], abs=2e-3), name
    result = train_step(engine, 2, engine.share_of(second), 1)
    norm, changed = engine.optimizer.norms(result.verdict.ok)
    ratio = float(changed / norm)
    assert ranks["optim/update_ratio"] == pytest.approx(ratio, rel=1e-3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
