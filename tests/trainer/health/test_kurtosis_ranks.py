"""Kurtosis of ranks that share heads, positions, experts or blocks is that of one process.

The ranks run this file as a program, over gloo: all cases of a world size one after the other.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import composed
import pytest
import torch
from ranks import run_cases
from small import SMALL_MODEL

from precision import observe
from precision.observe import sampling
from trainer.health.activations import KINDS, BlockKurtosis
from trainer.launch.world import World
from trainer.parallel.blocks import parallelize
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

BATCH, LENGTH = 4, 24
ALL_ROWS = BATCH * LENGTH * 2
RUN = ["trainer.device=cpu", "precision.backend=reference", "precision=fp32", "data=text", "data.path=."]
RUN += [f"trainer.global_batch_size={BATCH}", "trainer.microbatch_size=1", f"trainer.sequence_length={LENGTH}"]
RUN += [*SMALL_MODEL, "model.num_heads=4", "model.init_std=0.3", "trainer.max_steps=1", "optim.warmup_steps=1"]
TENSOR, CONTEXT = "parallel.tensor=2", "parallel.context=2"
CASES: dict[int, dict[str, list[str]]] = {
    2: {"context": [CONTEXT], "tensor, compiled": [TENSOR]},
    4: {
        "tensor, context, expert": [TENSOR, CONTEXT, "parallel.expert=2"],
        "tensor, pipeline": [TENSOR, "parallel.pipeline=2"],
    },
}
# a sum of 96 products, the longest here, in another order differs by 96 roundings at most, and kurtosis by 8 times that
ROUNDING = 8 * 96 * torch.finfo(torch.float32).eps


def ignored(*_: Any) -> None:
    """Does not look at casts."""


def kurtosis(name: str, keys: list[str], world: World) -> dict[str, list[float]]:
    """The first step's, of all rows, by kind and block."""
    config = composed.config_of([*RUN, *keys])
    engine = build_engine(config, world.device, world=world)
    if name.endswith("compiled"):
        parallelize(engine.model, config.recompute, True, "eager")
    found = BlockKurtosis(engine.model.iter_blocks())
    tokens = torch.randint(320, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    with sampling(ignored):
        train_step(engine, 1, engine.share_of(tokens), config.trainer.microbatch_size)
    means = {kind: mean.tolist() for kind, mean in found.means(world).items()}
    assert all(other == means for other in world.gather(means)), "the same on every rank"
    return means


@pytest.fixture(scope="module")
def runs(ask_ranks: Callable[..., Any]) -> dict[int, Any]:
    """What each world size computed."""
    return ask_ranks(__file__, CASES)


@pytest.fixture(scope="module")
def of_one() -> dict[str, list[float]]:
    """What one process computes."""
    with mock.patch.object(observe, "SAMPLE_ON_CPU", ALL_ROWS):
        return kurtosis("one", [], World(torch.device("cpu")))


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in CASES for name in CASES[size]])
def test_kurtosis_is_that_of_one_process(
    runs: dict[int, Any], of_one: dict[str, list[float]], size: int, name: str
) -> None:
    ours = runs[size][name]
    assert set(ours) == set(of_one) == set(KINDS)
    for kind in KINDS:
        assert ours[kind] == pytest.approx(of_one[kind], rel=ROUNDING, abs=0), kind


if __name__ == "__main__":
    observe.SAMPLE_ON_CPU = ALL_ROWS
    run_cases(CASES, kurtosis, Path(sys.argv[1]))
