"""Ranks gather and quantise a weight as often as the layout says, and experts that no other rank has not at all."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layouts import EP, FP32, FSDP, HSDP, KEPT, Case, Curves, main

WIRE = *FSDP, "precision=fp8_delayed", "parallel.fp8_all_gather=true"
JIT = "precision=fp8_jit"
KEYS = {
    1: {"fp8_jit": (JIT,)},
    2: {
        "fsdp fp32": (*FSDP, FP32),
        "fsdp fp32 kept": (*FSDP, FP32, KEPT),
        "ep fp32": (*EP, FP32),
        "ep fp32 kept": (*EP, FP32, KEPT),
        "freed wire": WIRE,
        "kept wire": (*WIRE, KEPT),
        "fsdp fp8_jit": (*FSDP, JIT),
        "ep fp8_jit": (*EP, JIT),
    },
    4: {"ep fp32": (*EP, FP32), "ep over groups fp32": (*HSDP, "parallel.expert=4", FP32)},
}
CASES = {size: {name: Case(keys, steps=2) for name, keys in cases.items()} for size, cases in KEYS.items()}


@pytest.fixture(scope="module")
def curves(ask_ranks: Callable[..., Any]) -> dict[int, Curves]:
    """What each world size computed."""
    return ask_ranks(__file__, CASES)


@pytest.mark.parametrize(
    ("kept", "freed"), [("fsdp fp32 kept", "fsdp fp32"), ("kept wire", "freed wire"), ("ep fp32 kept", "ep fp32")]
)
def test_kept_weights_are_gathered_once_a_step(curves: dict[int, Curves], kept: str, freed: str) -> None:
    """The others twice in each of two microbatches, but for the last block, embedding and head."""
    once, again = curves[2][kept], curves[2][freed]
    assert again[0]["arrived"] > 2.4 * once[0]["arrived"] and once[1]["arrived"] == once[0]["arrived"]
    for key in ("loss/total", "norm", "scale", "amax"):
        assert [line[key] for line in once] == [line[key] for line in again]


@pytest.mark.parametrize(
    ("size", "name"),
    [(2, name) for name in CASES[2] if name.split()[0] == "ep"] + [(4, "ep over groups fp32"), (4, "ep fp32")],
)
def test_experts_that_no_other_rank_has_are_not_gathered(curves: dict[int, Curves], size: int, name: str) -> None:
    shared = (size, name) == (4, "ep fp32")
    assert all((line["experts"] > 0) is shared and line["arrived"] > 0 for line in curves[size][name])


def test_gathered_weights_are_quantised_once_a_step_as_in_one_process(curves: dict[int, Curves]) -> None:
    """In two microbatches; where they are gathered, in each forward and backward pass."""
    one, alone, gathered = (
        [line["quantised"] for line in lines]
        for lines in (curves[1]["fp8_jit"], curves[2]["ep fp8_jit"], curves[2]["fsdp fp8_jit"])
    )
    assert alone == one and len(set(one)) == 1 and min(gathered) > 2 * one[0] > 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), CASES)
