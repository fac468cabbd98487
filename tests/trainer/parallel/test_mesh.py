"""Degrees: what is left goes to -1, and what does not go together is refused with the fix named."""

from typing import Any

import pytest

from trainer.config import ParallelConfig, Switch
from trainer.parallel.mesh import Degrees, forecast_degrees, resolve


def parallel(**sizes: int) -> ParallelConfig:
    axes: dict[str, Any] = dict.fromkeys(("replicate", "shard", "expert", "context", "tensor", "pipeline"), 1) | sizes
    auto = Switch.auto
    return ParallelConfig(
        **axes, stages=None, timeout=9, reduce_each_microbatch=auto, fp8_all_gather=auto, reshard_after_forward=auto
    )


@pytest.mark.parametrize(
    ("sizes", "world", "expected"),
    [
        ({}, 1, Degrees(1, 1, 1)),
        ({"shard": -1}, 8, Degrees(1, 8, 1)),
        ({"shard": -1}, 1, Degrees(1, 1, 1)),
        ({"shard": 4, "replicate": -1}, 16, Degrees(4, 4, 1)),
        ({"shard": 4, "replicate": 2}, 8, Degrees(2, 4, 1)),
        ({"replicate": -1}, 4, Degrees(4, 1, 1)),
        ({"shard": -1, "expert": 2}, 8, Degrees(1, 8, 2)),
        ({"shard": 2, "replicate": -1, "expert": 4}, 8, Degrees(4, 2, 4)),
        ({"shard": -1, "expert": -1}, 8, Degrees(1, 8, 8)),
        ({"shard": -1, "context": 2}, 8, Degrees(1, 4, 1, 2)),
        ({"replicate": 2, "shard": -1, "context": 2, "expert": 8}, 8, Degrees(2, 2, 8, 2)),
        ({"replicate": -1, "context": 8, "expert": 8}, 16, Degrees(2, 1, 8, 8)),
        ({"replicate": 2, "shard": -1, "pipeline": 4}, 32, Degrees(2, 4, 1, 1, 4)),
        ({"shard": -1, "context": 2, "tensor": 4, "expert": 8}, 16, Degrees(1, 2, 8, 2, 1, 4)),
        ({"shard": -1, "tensor": 2, "pipeline": 2}, 8, Degrees(1, 2, 1, 1, 2, 2)),
    ],
)
def test_degrees(sizes: dict[str, int], world: int, expected: Degrees) -> None:
    assert resolve(parallel(**sizes), world) == expected
    assert expected.world == world
    assert expected.expert_replicate * expected.expert_shard * expected.expert == expected.stage


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({}, 4, r"parallel\.shard=1: .* the 4 processes; set parallel\.shard=-1"),
        (
            {"shard": 8},
            1,
            r"parallel\.shard=8: .* 8 ranks, and there is one process; start 8 with torchrun, or set .*=-1",
        ),
        ({"shard": 3, "replicate": -1}, 8, r"parallel\.shard=3: it does not divide the 8 processes; set 2, or start a"),
        ({"replicate": -1, "shard": -1}, 8, r"parallel\.replicate=-1: parallel\.shard=-1 takes what is left"),
        ({"shard": 0}, 1, r"parallel\.shard=0: out of range; set 1 or more"),
        ({"shard": -1, "expert": 3}, 8, r"parallel\.expert=3: .*; set 2"),
        ({"shard": 2, "replicate": -1, "expert": -2}, 8, r"parallel\.expert=-2: out of range"),
        ({"context": 0}, 1, r"parallel\.context=0: out of range; set 1 or more"),
        ({"shard": -1, "context": 3}, 8, r"parallel\.context=3: it does not divide the 8 processes; set 2, or start a"),
        ({"shard": -1, "tensor": 0}, 8, r"parallel\.tensor=0: out of range; set 1 or more"),
        (
            {"shard": -1, "context": 2, "tensor": 3},
            8,
            r"parallel\.tensor=3: it does not divide the 4 .*; set 2",
        ),
        ({"context": 2}, 8, r"parallel\.shard=1: .*parallel\.context=2 it needs 2 ranks, .*; start 2 with torchrun"),
        ({"shard": 2, "replicate": 3}, 8, r"parallel\.shard=2: .* it needs 6 ranks, .*; start 6 with torchrun$"),
        ({"shard": 2, "replicate": 1, "context": 2, "expert": 8}, 4, r"parallel\.expert=8: .*context=4 ranks.*; set 4"),
    ],
)
def test_incompatible_degrees_are_refused(sizes: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(parallel(**sizes), world)


def test_a_forecast_has_as_few_processes_as_the_degrees_allow() -> None:
    """`expert` subdivides the ranks of a stage."""
    assert forecast_degrees(parallel(shard=-1, pipeline=2, expert=4), 1) == Degrees(1, 4, 4, 1, 2)
    assert forecast_degrees(parallel(shard=-1, context=2, expert=3), 1) == Degrees(1, 3, 3, 2)
