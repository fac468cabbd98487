"""Compiled blocks of ranks that share weights."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layouts import FSDP, Case, Curves, differences, main

MIXED = "precision=fp8_delayed", "precision.rules.last_blocks=1", "model.num_dense_layers=0", "model.num_mtp_layers=0"
MIXED = *FSDP, *MIXED, "model.num_layers=3"
CASES = {
    2: {
        "mixed": Case(MIXED, steps=2),
        "mixed compiled": Case((*MIXED, "recompute=full"), steps=2, compiled="eager"),
    }
}


@pytest.fixture(scope="module")
def curves(ask_ranks: Callable[..., Any]) -> dict[int, Curves]:
    """What each world size computed."""
    return ask_ranks(__file__, CASES)


def test_compiled_blocks_share_graphs_but_not_those_of_another_precision(curves: dict[int, Curves]) -> None:
    plain, compiled = curves[2]["mixed"], curves[2]["mixed compiled"]
    assert compiled[-1]["graphs"] == 2, "of three blocks with experts, the last is in BF16"
    assert max(differences(plain, compiled)) < 1e-3
    assert compiled[0]["amax"] == plain[0]["amax"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), CASES)
