"""In FP16 ranks scale the loss together, and drop what is bad on one of them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layouts import EP, FSDP, Case, Curves, differences, main

FP16 = "precision=fp16", "precision.loss_scale.initial=268435456", "precision.loss_scale.interval=2"  # 2^28
CASES = {
    1: {"fp16": Case(FP16, steps=12)},
    2: {
        "fsdp fp16": Case((*FSDP, *FP16), steps=12),
        "ep fp16": Case((*EP, "precision=fp16"), steps=3, spoil=1),
    },
}


@pytest.fixture(scope="module")
def curves(ask_ranks: Callable[..., Any]) -> dict[int, Curves]:
    """What each world size computed."""
    return ask_ranks(__file__, CASES)


def test_in_fp16_ranks_scale_the_loss_as_one_process_does(curves: dict[int, Curves]) -> None:
    """From too high a scale down, and up again."""
    ours, theirs = curves[2]["fsdp fp16"], curves[1]["fp16"]
    for key in ("optim/loss_scale", "ok", "overflow"):
        assert [line[key] for line in ours] == [line[key] for line in theirs]
    assert {line["overflow"] for line in ours} == {0, 1} and len({line["optim/loss_scale"] for line in ours}) > 3
    assert max(differences(ours, theirs)) < 2.0**-10 * theirs[0]["loss/total"], "a rounding of FP16"


def test_in_fp16_a_bad_step_on_one_rank_is_skipped_by_all(curves: dict[int, Curves]) -> None:
    lines = curves[2]["ep fp16"]
    assert [(line["ok"], line["overflow"], line["optim/loss_scale"]) for line in lines] == [
        (1, 0, 2**16), (0, 0, 2**16), (1, 0, 2**15)
    ]  # fmt: skip
    assert lines[1]["norm"] == lines[0]["norm"] != lines[2]["norm"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), CASES)
