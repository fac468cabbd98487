"""Sums of FP8 products on a Hopper GPU, by the kernels that train: no bias with `accumulation: fp32`, in any shape."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from composed import config_of, model_of

from precision.backends.availability import cuda_problem
from precision.hardware import detect

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
MODES = ("tensor", "row", "block")
ROWS, FEW, WIDE = 65536, 16384, 8192  # rows that a weight gradient sums over; fewer of wide ones, to save memory
RAGGED = 320  # no whole tiles: another kernel


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`scripts/bench/sums.py`."""
    if (problem := cuda_problem(detect("cuda"))) is not None:
        pytest.skip(problem)
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("sums")


def shapes(model: str, kind: str) -> set[tuple[int, int]]:
    """Out and in features of the model's FP8 GEMMs: of linears or experts (`grouped`)."""
    config = config_of([f"model={model}", "+recipe=fp8_delayed"])
    _, plan = model_of(config)
    rows = [row for row in plan.gemms.values() if row.recipe.is_fp8 and (row.groups > 1) == (kind == "grouped")]
    return {(row.out_features, row.in_features) for row in rows}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("model", ["moonlight_16b", "deepseek_v3"])
def test_fp32_sums_have_no_bias(sums: ModuleType, model: str, kind: str, mode: str) -> None:
    wide = shapes(model, kind)
    assert wide
    for width, length in sorted(wide | {(k, n) for n, k in wide}):  # forward, and the input gradient
        bias, _ = sums.error(f"{kind} nt", sums.MODES[mode], length, 1.0, False, width)
        assert abs(bias) < 1e-3, f"sums over {length}, {width} wide"
    for width in sorted({n for n, _ in wide} | {RAGGED}):
        rows = ROWS if width <= WIDE else FEW
        bias, _ = sums.error(f"{kind} wgrad", sums.MODES[mode], rows, 1.0, False, width)
        assert abs(bias) < 1e-3, f"weight gradient over {rows} rows, {width} wide"


@pytest.mark.parametrize("kernel", ["linear nt", "linear wgrad", "grouped nt", "grouped wgrad"])
@pytest.mark.parametrize("mode", ["tensor", "row"])
def test_fast_sums_lose_as_much_as_the_emulation(sums: ModuleType, kernel: str, mode: str) -> None:
    """The reference's emulation of the tensor cores, on other numbers of mean 1. cuBLAS, which serves linears, may cut
    a sum into parts, four at most here, that it adds up in FP32."""
    from precision.backends.products import truncated_matmul

    torch.manual_seed(0)
    for length in (2048, 16384):
        x, w = torch.randn(64, length, device="cuda") + 1, torch.randn(length, 64, device="cuda") + 1
        x, w = ((t * (448 / t.abs().max())).to(torch.float8_e4m3fn).float() for t in (x, w))
        want = x.double() @ w.double()
        parts = (1, 4) if kernel.startswith("linear") else (1, 1)
        most, least = (float((truncated_matmul(x, w, length // n).double() - want).mean() / want.mean()) for n in parts)
        bias, _ = sums.error(kernel, sums.MODES[mode], length, 1.0, True)
        assert least / 1.5 >= bias >= most * 1.5, f"sums over {length}"
