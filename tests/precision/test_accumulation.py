"""Sums of FP8 products: rounded once, in FP32 by default; `fast` cuts them as a Hopper GPU's tensor cores do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from precision import GroupedLinear, Linear, Plan, PrecisionConfig, begin_step, bind
from precision.backends import GradOperand, WeightOperand
from precision.backends.products import truncated_matmul
from precision.backends.reference import ReferenceBackend
from precision.config import Granularity
from precision.formats import read_back
from precision.rows import GemmRecipe

Recipe = Callable[..., PrecisionConfig]
RECIPES = ("fp8_delayed", "fp8_jit", "fp8_block")
# what scripts/bench/sums.py measured on an H200 (docs/benchmarks.md): the mean of the error over the mean of the sum
MEASURED = {2048: 1.2e-2, 16384: 1.4e-1, 65536: 4.3e-1}


def of_mean_one(*shape: int) -> Tensor:
    """FP8 numbers of mean 1 and variance 1, scaled to their format's range."""
    x = torch.randn(shape) + 1
    return (x * (448 / x.abs().max())).to(torch.float8_e4m3fn).float()


def bias(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want).mean() / want.mean())


@pytest.mark.parametrize("length", MEASURED)
def test_the_emulation_loses_what_the_tensor_cores_lose(length: int) -> None:
    torch.manual_seed(0)
    a, w = of_mean_one(8, length), of_mean_one(length, 8)
    want = a.double() @ w.double()
    assert 1 / 1.5 < -bias(truncated_matmul(a, w), want) / MEASURED[length] < 1.5
    assert abs(bias(truncated_matmul(a, w, promoted=128), want)) < 1e-3


def test_the_emulation_is_exact_where_nothing_is_cut() -> None:
    """Integers whose sums have 14 bits."""
    torch.manual_seed(0)
    a, w = torch.randint(-4, 5, (7, 100)).float(), torch.randint(-4, 5, (100, 5)).float()
    assert torch.equal(truncated_matmul(a, w), a @ w)
    assert torch.equal(truncated_matmul(a[:, :0], w[:0]), torch.zeros(7, 5))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("recipe_name", ["fp8_delayed", "fp8_jit"])
def test_a_layer_accumulates_as_its_plan_row_states(recipe: Recipe, recipe_name: str, grouped: bool) -> None:
    """Each of the three GEMMs over 2,048 numbers of one sign, and the others over 16."""
    for rows, inner, outer in ((16, 2048, 16), (2048, 16, 16), (16, 16, 2048)):
        made: dict[str, list[Tensor]] = {}
        for sums in ("fp32", "fast"):
            torch.manual_seed(0)
            plan = Plan(recipe(recipe_name, accumulation=sums), 1, None)
            row = plan.gemm("a", "ffn", inner, outer)
            layer = GroupedLinear(row) if grouped else Linear(row)
            layer.weight.data.copy_(torch.rand_like(layer.weight))
            begin_step(layer, bind(layer, plan, "cpu"))
            x = torch.rand(rows, inner).to(torch.bfloat16).requires_grad_()
            y = layer(x, torch.tensor([rows], dtype=torch.int32)) if isinstance(layer, GroupedLinear) else layer(x)
            y.backward(torch.rand_like(y))
            assert layer.weight.grad is not None and x.grad is not None
            made[sums] = [y.detach(), layer.weight.grad, x.grad]
        for exact, fast, length in zip(made["fp32"], made["fast"], (inner, rows, outer), strict=True):
            assert (bias(fast, exact.double()) < -4e-3) == (length == 2048)


def codes(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Small integers in FP8: sums of their products are exact in FP32."""
    return torch.randint(-4, 5, shape).float().to(dtype)


def scales(recipe: GemmRecipe, *shape: int) -> Tensor:
    """Inverse scales as the recipe has them: any number where one serves a tensor, else powers of two."""
    if recipe.scales_tensors:
        return torch.rand(shape[:-2]) + 0.5
    return torch.randint(-2, 3, shape).float().exp2()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_results_are_rounded_once(
    recipe: Recipe, recipe_name: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that FP32 holds are scaled and rounded to the format of the result: what float64 computes, bit for bit."""
    monkeypatch.setattr("precision.backends.reference._IN_CACHE", 30 * 128)  # rows are scaled in parts
    torch.manual_seed(0)
    how = Plan(recipe(recipe_name), 1, None).gemm("a", "ffn", 256, 128, 2 if grouped else 1).recipe
    R, N, K = 100, 128, 256
    ends = torch.tensor([40, R], dtype=torch.int32) if grouped else None
    spans = [slice(0, 40), slice(40, R)] if grouped else [slice(0, R)]
    block = how.scaling.granularity is Granularity.block
    columns = 2 if block else 1
    x, dy, w = codes(R, K), codes(R, N, dtype=how.grad.dtype), codes(len(spans), N, K)
    x_inv, dy_inv = scales(how, R, columns), scales(how, R, 1)
    w_inv = scales(how, len(spans), 1 if block else N, columns)
    w_t_inv = w_inv if block or how.scales_tensors else scales(how, len(spans), 1, K)

    def rounded(a: Tensor, a_inv: Tensor, b: Tensor, b_inv: Tensor, out: torch.dtype) -> Tensor:
        if block:
            return (read_back(a, a_inv).double() @ read_back(b, b_inv).double().t()).to(out)
        return (a.double() @ b.double().t() * a_inv * b_inv).to(out)

    shape = (lambda t: t) if grouped else (lambda t: t[0])
    same = block or how.scales_tensors
    weight = WeightOperand(shape(w), shape(w_inv), None if same else shape(w), None if same else shape(w_t_inv))
    backend = ReferenceBackend()
    y = backend.forward(x, x_inv, weight, ends, how)
    dx = backend.dgrad(GradOperand(dy.bfloat16(), dy, dy_inv), weight, ends, how)
    dw = backend.wgrad(GradOperand(read_back(dy, dy_inv).bfloat16(), dy, dy_inv), x, x_inv, ends, how, torch.float32)
    for g, span in enumerate(spans):
        of_x, of_dy = (inv[span] if inv.dim() else inv for inv in (x_inv, dy_inv))
        of_w, of_w_t = (inv[g] if block or not inv[g].dim() else inv[g].view(1, -1) for inv in (w_inv, w_t_inv))
        turned = of_w_t.t() if block else of_w_t
        assert torch.equal(y[span], rounded(x[span], of_x, w[g], of_w, torch.bfloat16))
        assert torch.equal(dx[span], rounded(dy[span], of_dy, w[g].t().contiguous(), turned, torch.bfloat16))
        if how.scales_tensors:
            want = rounded(dy[span].t().contiguous(), of_dy, x[span].t().contiguous(), of_x, torch.float32)
        else:  # small integers times powers of two survive the second cast
            want = (read_back(dy[span], of_dy).double().t() @ read_back(x[span], of_x).double()).float()
        assert torch.equal(dw.view(len(spans), N, K)[g], want)


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("tiny", [1e-37, 1e-30])
def test_tiny_tensors_are_not_lost(recipe: Recipe, recipe_name: str, tiny: float) -> None:
    """Their scales are near the end of FP32's range, and their product with another's beyond it."""
    torch.manual_seed(0)
    plan = Plan(recipe(recipe_name), 1, None)
    layer = Linear(plan.gemm("a", "ffn", 256, 128))
    torch.nn.init.normal_(layer.weight)
    begin_step(layer, bind(layer, plan, "cpu"))
    x = (torch.rand(64, 256) * tiny).to(torch.bfloat16)
    want = x.double() @ layer.weight.detach().double().t()
    assert (layer(x).double() - want).norm() < 2**-4 * want.norm(), "E4M3 rounds by 2^-4 of a number at most"
