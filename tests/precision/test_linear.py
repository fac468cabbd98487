"""Linear and GroupedLinear compute what their plan row says: the three GEMMs against an oracle in float64.

The oracle quantises by its own arithmetic and multiplies in float64, so what may differ is FP32 accumulation and the
rounding of results to BF16.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from precision import Feed, GroupedLinear, Linear, Operand, Plan, PrecisionConfig, ScalingArena, begin_step, bind
from precision.formats import BY_NAME, Format
from precision.fused import quantize_for

Recipe = Callable[..., PrecisionConfig]
RECIPES: dict[str, tuple[str, dict[str, object]]] = {
    "delayed": ("fp8_delayed", {}),
    "current": ("fp8_jit", {"scaling__granularity": "tensor", "scaling__power_of_two": False}),
    "current_power_of_two": ("fp8_jit", {"scaling__granularity": "tensor", "scaling__margin": 1}),
    "row": ("fp8_jit", {}),
    "block": ("fp8_block", {}),
    "block_any_scale": ("fp8_block", {"scaling__power_of_two": False}),
    "bf16": ("bf16", {}),
    "fp32": ("fp32", {}),
}


def read_back(x: Tensor, fmt: Format, dims: tuple[int, ...], config: PrecisionConfig) -> Tensor:
    """x cast to FP8 with one scale over `dims` and read back, float64."""
    amax = x.double().abs().amax(dims, keepdim=True).float()
    limit = torch.full_like(amax, fmt.max)  # number / tensor would round twice
    scale = torch.where(amax > 0, limit / (amax * 2.0**config.scaling.margin), torch.ones_like(amax))
    if config.scaling.power_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale.double()))).float()
    scaled = (x.float() * scale).double().clamp(-fmt.max, fmt.max)
    digits, lowest = (3, -6) if fmt.name == "e4m3" else (2, -14)
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=1e-300))).clamp(min=lowest)
    step = torch.exp2(exponent - digits)
    return ((torch.round(scaled / step) * step).float() * scale.reciprocal()).double()


def tiled(x: Tensor, fmt: Format, rows: int, columns: int, config: PrecisionConfig) -> Tensor:
    """The same in tiles, cut at the edges."""
    out = torch.empty_like(x, dtype=torch.float64)
    for r in range(0, x.shape[0], rows):
        for c in range(0, x.shape[1], columns):
            out[r : r + rows, c : c + columns] = read_back(x[r : r + rows, c : c + columns], fmt, (0, 1), config)
    return out


def operands(
    x: Tensor, w: Tensor, dy: Tensor, config: PrecisionConfig, name: str, whole: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Left and right factor of y, dx and dw; `whole` are x and dy of all groups, which share tensor-wide scales."""
    forward, backward = BY_NAME[config.scaling.forward.value], BY_NAME[config.scaling.backward.value]
    if name in ("bf16", "fp32"):
        x, w, dy = x.double(), w.double(), dy.double()
        return (x, w.t()), (dy, w), (dy.t(), x)
    if name == "row":
        xq, wq, dyq = (read_back(t, f, (1,), config) for t, f in ((x, forward), (w, forward), (dy, backward)))
        again = []
        for t, f, every in ((xq, forward, whole[0]), (dyq, backward, whole[1])):
            scales = f.max / every.double().abs().amax(1).float()
            lowest = f.smallest / torch.exp2(torch.floor(torch.log2(scales.double()))).min()
            again.append(torch.round(t / lowest) * lowest)
        return (xq, wq.t()), (dyq, read_back(w, forward, (0,), config)), (again[1].t(), again[0])
    if name.startswith("block"):
        xq, dyq = tiled(x, forward, 1, 128, config), tiled(dy, backward, 1, 128, config)
        wq = tiled(w, forward, 128, 128, config)
        return (xq, wq.t()), (dyq, wq), (tiled(dy, backward, 128, 1, config).t(), tiled(xq, forward, 128, 1, config))

    def tensor_wide(t: Tensor, every: Tensor, fmt: Format) -> Tensor:
        return read_back(torch.cat([t, every]), fmt, (0, 1), config)[: len(t)]

    xq, dyq = tensor_wide(x, whole[0], forward), tensor_wide(dy, whole[1], backward)
    wq = read_back(w, forward, (0, 1), config)
    return (xq, wq.t()), (dyq, wq), (dyq.t(), xq)


def bound(config: PrecisionConfig, inner: int, outer: int) -> tuple[Linear, ScalingArena]:
    """A linear with random weights, and its scales."""
    plan = Plan(config, 1)
    layer = Linear(plan.gemm("layers.0.ffn.down", "ffn", inner, outer))
    torch.nn.init.normal_(layer.weight)
    return layer, bind(layer, plan, "cpu")


def check(got: Tensor, factors: tuple[Tensor, Tensor], name: str, what: str) -> None:
    """Off by no more than the rounding of the result (BF16, twice where a scale multiplies it) and FP32 sums."""
    rounding = {"fp32": 0.0, "bf16": 2.0**-8}.get(name, 2.0**-7)
    want, size = factors[0] @ factors[1], factors[0].abs() @ factors[1].abs()
    allowed = rounding * want.abs() + 1e-6 * size
    worst = ((got.double() - want).abs() / (allowed + 1e-300)).max().item()
    assert worst <= 1, f"{what}: {worst:.2f} times the error allowed"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 16, 16), (37, 144, 272), (130, 128, 48)])
def test_a_linear_is_three_gemms_in_fp8(recipe: Recipe, name: str, rows: int, inner: int, outer: int) -> None:
    base, overrides = RECIPES[name]
    config = recipe(base, **overrides)
    torch.manual_seed(rows)
    layer, arena = bound(config, inner, outer)
    dtype = layer.recipe.output.dtype
    x = (torch.randn(rows, inner) * torch.logspace(-2, 2, rows)[:, None]).to(dtype).requires_grad_()
    dy = (torch.randn(rows, outer) * 1e-6).to(dtype)
    begin_step(layer, arena)
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    assert y.dtype == dtype and layer.weight.grad.dtype == torch.float32
    w = layer.weight.detach() if name == "fp32" else layer.weight.detach().bfloat16()
    want = operands(x.detach(), w, dy, config, name, (x.detach(), dy))
    for what, got, factors in zip(("y", "dx", "dw"), (y, x.grad, layer.weight.grad), want, strict=True):
        check(got.detach(), factors, name, what)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", [(5, 0, 131, 1), (0, 0, 7, 0), (40, 3, 2, 260)])
def test_grouped_gemms_with_uneven_and_empty_experts(recipe: Recipe, name: str, sizes: tuple[int, ...]) -> None:
    base, overrides = RECIPES[name]
    config = recipe(base, **overrides)
    torch.manual_seed(sum(sizes))
    inner, outer = 144, 32
    plan = Plan(config, 1)
    layer = GroupedLinear(plan.gemm("layers.0.moe.experts.down", "moe.experts", inner, outer, groups=len(sizes)))
    with torch.no_grad():
        layer.weight.normal_().mul_(torch.tensor([0.01, 1.0, 0.1, 10.0])[:, None, None])
    arena = bind(layer, plan, "cpu")
    dtype = layer.recipe.output.dtype
    x = torch.randn(sum(sizes), inner).to(dtype).requires_grad_()
    dy = (torch.randn(sum(sizes), outer) * 1e-4).to(dtype)
    begin_step(layer, arena)
    y = layer(x, torch.tensor(sizes).cumsum(0).int())
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    start = 0
    for g, size in enumerate(sizes):
        rows = slice(start, start := start + size)
        w = layer.weight[g].detach() if name == "fp32" else layer.weight[g].detach().bfloat16()
        want = operands(x.detach()[rows], w, dy[rows], config, name, (x.detach(), dy))
        for what, got, factors in zip(
            ("y", "dx", "dw"), (y[rows], x.grad[rows], layer.weight.grad[g]), want, strict=True
        ):
            if got.numel():
                check(got.detach(), factors, name, f"{what} of expert {g}")
    if arena.num_scaled:
        assert arena.finite() and (arena.amax > 0).all(), "weights of experts without tokens have an amax, too"


@pytest.mark.parametrize("name", ["delayed", "current", "row", "block"])
def test_a_row_of_zeros_costs_the_others_no_digits(recipe: Recipe, name: str) -> None:
    base, overrides = RECIPES[name]
    layer, arena = bound(recipe(base, **overrides), 32, 48)
    x, dy = torch.randn(40, 32, dtype=torch.bfloat16), torch.randn(40, 48, dtype=torch.bfloat16) * 1e-6
    x[3], dy[7] = 0, 0
    begin_step(layer, arena)
    layer(x.requires_grad_()).backward(dy)
    assert layer.weight.grad is not None
    exact = dy.float().t() @ x.detach().float()
    # half a step is at most u of a number, uniform roundings have a mean square of u^2 / 3, and the factors' add up
    scaling = layer.recipe.scaling
    squares = [(torch.finfo(BY_NAME[f.value].dtype).eps / 2) ** 2 / 3 for f in (scaling.forward, scaling.backward)]
    assert (layer.weight.grad - exact).norm() < sum(squares) ** 0.5 * exact.norm()


@pytest.mark.parametrize("name", ["delayed", "current", "row", "block"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_number_anywhere_shows_in_the_amaxes(recipe: Recipe, name: str, bad: float) -> None:
    base, overrides = RECIPES[name]
    layer, arena = bound(recipe(base, **overrides), 32, 48)
    for place in ("input", "grad", "weight"):
        x, dy = torch.randn(5, 32, dtype=torch.bfloat16), torch.randn(5, 48, dtype=torch.bfloat16)
        spoilt = {"input": x, "grad": dy, "weight": layer.weight.data}[place]
        keep = spoilt.view(-1)[7].item()
        spoilt.view(-1)[7] = bad
        begin_step(layer, arena)
        layer(x.requires_grad_()).backward(dy)
        assert not arena.finite()
        wrong = [name for name, fine in zip(arena.names, arena.amax.isfinite(), strict=True) if not fine]
        assert wrong == [f"layers.0.ffn.down:{place}"]
        spoilt.data.view(-1)[7] = keep


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
@pytest.mark.parametrize("name", ["delayed", "current", "row", "block"])
def test_zero_tiny_and_huge_inputs_give_finite_results(recipe: Recipe, name: str, value: float) -> None:
    base, overrides = RECIPES[name]
    plan = Plan(recipe(base, **overrides), 1)
    layer = Linear(plan.gemm("layers.0.ffn.down", "ffn", 32, 48))
    torch.nn.init.ones_(layer.weight)
    bind(layer, plan, "cpu")
    x = torch.full((3, 32), value, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.backward(torch.full_like(y, value))
    assert x.grad is not None and layer.weight.grad is not None
    exact = x.detach().float().sum(1)[0].item()
    torch.testing.assert_close(y.float(), torch.full_like(y, exact, dtype=torch.float32), rtol=0.07, atol=0)
    assert x.grad.isfinite().all() and (value == 0 or (x.grad > 0).all())


def test_delayed_scale_saturates_what_outgrows_it(recipe: Recipe) -> None:
    plan = Plan(recipe("fp8_delayed"), 1)
    layer = Linear(plan.gemm("layers.0.ffn.down", "ffn", 16, 16))
    with torch.no_grad():
        layer.weight.copy_(torch.eye(16))
    arena = bind(layer, plan, "cpu")
    for value, expected in ((2.0, 2.0), (8.0, 2.0), (8.0, 8.0)):  # the second step still scales for 2
        begin_step(layer, arena)
        y = layer(torch.full((1, 16), value, dtype=torch.bfloat16))
        assert y[0, 0].item() == expected
        arena.commit(arena.finite())


def test_weights_are_quantised_once_a_step_and_from_bf16(recipe: Recipe) -> None:
    base, overrides = RECIPES["current"]
    layer, arena = bound(recipe(base, **overrides), 64, 64)
    assert layer.operand is not None
    first = layer.operand.data.data_ptr()
    begin_step(layer, arena)
    assert layer.operand.data.data_ptr() == first, "made in place: compiled graphs keep pointing at it"
    through_bf16 = layer.weight.detach().bfloat16().float()
    scale = torch.tensor(448.0) / through_bf16.abs().max()  # 448 / tensor is 448 * (1 / tensor): rounded twice
    assert torch.equal(layer.operand.data.float(), (through_bf16 * scale).to(torch.float8_e4m3fn).float())


def test_only_fp8_is_kept_for_backward(recipe: Recipe) -> None:
    layer, _ = bound(recipe("fp8_delayed"), 32, 48)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True))
    assert {t.dtype for t in kept if t.numel() > 1} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_that_multiply_can_be_read(recipe: Recipe, name: str) -> None:
    """An operand's and the weight's, as plain numbers, have the product that the layer computes."""
    base, overrides = RECIPES[name]
    torch.manual_seed(0)
    layer, _ = bound(recipe(base, **overrides), 144, 272)
    x = torch.randn(2, 37, 144).to(layer.recipe.output.dtype)
    delivered = quantize_for(x, Feed(layer))
    read = delivered.read() if isinstance(delivered, Operand) else delivered
    assert isinstance(delivered, Operand) == layer.recipe.is_fp8 and not (layer.recipe.is_fp8 and torch.equal(read, x))
    with torch.no_grad():
        y = layer(delivered)
    check(y.flatten(0, 1), (read.double().flatten(0, 1), layer.plain_weight().double().t()), name, "y")
