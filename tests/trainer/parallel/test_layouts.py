"""Ranks that share a model train it as one process does: the same losses, scales and verdicts, for every layout.

The ranks run this file as a program, over gloo: all cases of a world size one after the other.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import EACH, EP, FP32, FSDP, HSDP, KEPT, Case, Curves, differences, main

SEEDS = range(4)


def over_seeds(name: str, *keys: str) -> dict[str, Case]:
    """A run of six steps from each of some seeds, of weights and data."""
    return {f"{name} {seed}": Case((*keys, f"trainer.seed={seed}"), steps=6, seed=seed) for seed in SEEDS}


XIELU = "model.activation=xielu"

CASES = {
    1: {"xielu": Case((XIELU, FP32), 2), "fp32": Case((FP32,), 2)}
    | {name: Case((f"precision={name}",), 2) for name in ("bf16", "fp8_delayed", "fp8_jit", "fp8_block")},
    2: {
        "fsdp fp32 kept each": Case((*FSDP, FP32, KEPT, EACH, "recompute=full"), 2),
        "fsdp fp32 selective": Case((*FSDP, FP32, "recompute=selective"), 2),
        "ep fp32 each": Case((*EP, FP32, EACH, "recompute=full"), 2),
        "fsdp xielu": Case((*FSDP, XIELU, FP32), 2),
        "ep xielu": Case((*EP, XIELU, FP32), 2),
        "fsdp fp8_delayed": Case((*FSDP, "precision=fp8_delayed"), 2),
        "fsdp fp8_jit": Case((*FSDP, "precision=fp8_jit"), 2),
        "fsdp fp8_block": Case((*FSDP, "precision=fp8_block"), 2),
        "ep fp8_jit": Case((*EP, "precision=fp8_jit"), 2),
        "spoilt": Case((*FSDP, "precision=fp8_delayed"), 3, spoil=1),
        "ep spoilt": Case((*EP, "precision=fp8_delayed"), 3, spoil=1),
    },
    4: {
        "hsdp fp32": Case((*HSDP, FP32), 2),
        "ddp fp32": Case(("parallel=hsdp", "parallel.shard=1", FP32), 2),
        "ep fp32": Case((*EP, FP32), 2),
        "ep over groups fp32": Case((*HSDP, "parallel.expert=4", FP32), 2),
        "hsdp fp8_block": Case((*HSDP, "precision=fp8_block"), 2),
        "spoilt": Case((*HSDP, FP32), 3, spoil=2),
    },
}
OVER_SEEDS = {
    1: over_seeds("seeds bf16", "precision=bf16") | over_seeds("seeds delayed", "precision=fp8_delayed"),
    2: over_seeds("seeds ep", *EP, "precision=fp8_delayed"),
}


@pytest.fixture(scope="module")
def curves(ask_ranks: Callable[..., Any]) -> dict[int, Curves]:
    """What each world size computed."""
    return ask_ranks(__file__, CASES)


@pytest.mark.parametrize(("size", "name"), [(s, n) for s in (2, 4) for n in CASES[s] if "fp32" in n])
def test_in_fp32_every_layout_has_the_curve_of_one_process(curves: dict[int, Curves], size: int, name: str) -> None:
    ours, theirs = curves[size][name], curves[1]["fp32"]
    assert max(differences(ours, theirs)) < 1e-5
    assert max(differences(ours, theirs, "loss/mtp")) < 1e-5
    assert max(differences(ours, theirs, "optim/grad_norm")) < 1e-3
    assert max(differences(ours, theirs, "norm")) < 1e-3
    assert max(differences(ours, theirs, "bias")) == 0, "loads are those of the whole batch"
    assert max(differences(ours, theirs, "moe/load_max_over_mean_worst")) == 0


@pytest.mark.parametrize("name", [name for name in CASES[2] if "xielu" in name])
def test_parameters_of_activations_are_shared_as_weights_are(curves: dict[int, Curves], name: str) -> None:
    ours, theirs = curves[2][name], curves[1]["xielu"]
    assert max(differences(ours, theirs)) < 1e-5
    assert max(differences(ours, theirs, "optim/grad_norm")) < 1e-3


@pytest.mark.parametrize(("size", "name"), [(s, n) for s in (2, 4) for n in CASES[s] if "fp8" in n])
def test_in_fp8_layouts_differ_less_than_fp8_from_bf16(curves: dict[int, Curves], size: int, name: str) -> None:
    recipe = name.split()[-1]
    one = curves[1][recipe][: len(curves[size][name])]
    assert sum(differences(curves[size][name], one)) < sum(differences(curves[1]["bf16"], one))


@pytest.mark.exhaustive
def test_spread_experts_differ_less_than_fp8_from_bf16_with_one_scale_a_tensor(ask_ranks: Callable[..., Any]) -> None:
    """Over some seeds: the first step scales by what travels together, which the layout decides, and any two FP8 runs
    whose first scales differ are about as far from each other as they are from BF16, so that one seed says nothing."""
    curves = ask_ranks(__file__, OVER_SEEDS, "seeds")
    ours = theirs = 0.0
    for seed in SEEDS:
        one = curves[1][f"seeds delayed {seed}"]
        ours += sum(differences(curves[2][f"seeds ep {seed}"], one))
        theirs += sum(differences(curves[1][f"seeds bf16 {seed}"], one))
    print(f"expert parallelism {ours / len(SEEDS):.4f}, BF16 {theirs / len(SEEDS):.4f}")
    assert ours < theirs


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_jit", "fp8_block"])
def test_the_first_step_in_fp8_is_the_same_bit_for_bit(curves: dict[int, Curves], recipe: str) -> None:
    """Every scale and amax; the loss but for the order in which four microbatches' losses are added up."""
    ours, theirs = curves[2][f"fsdp {recipe}"][0], curves[1][recipe][0]
    assert [ours[key] for key in ("scale", "amax")] == [theirs[key] for key in ("scale", "amax")]
    assert ours["loss/total"] == pytest.approx(theirs["loss/total"], rel=4 * torch.finfo(torch.float32).eps, abs=0)


@pytest.mark.parametrize(("size", "name"), [(2, "spoilt"), (2, "ep spoilt"), (4, "spoilt")])
def test_a_bad_step_on_one_rank_is_skipped_by_all(curves: dict[int, Curves], size: int, name: str) -> None:
    lines = curves[size][name]
    assert [line["ok"] for line in lines] == [1, 0, 1]
    before, dropped, after = lines
    for key in ("norm", "bias", "scale") if size == 2 else ("norm", "bias"):
        assert dropped[key] == before[key], "nothing of it was kept"
    assert after["norm"] != dropped["norm"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), OVER_SEEDS if sys.argv[2:] else CASES)
