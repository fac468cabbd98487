"""Fused ops: values and gradients against plain autograd in FP32, operands shared by their consumers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from precision import (
    Feed,
    GroupedLinear,
    Linear,
    Operand,
    Plan,
    PrecisionConfig,
    bind,
    combine_rows,
    gather_rows,
    rms_norm,
    swiglu,
)

Recipe = Callable[..., PrecisionConfig]


TERMS = 64  # of the longest sum here, rounded up


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Two ways to add the same terms: a sum of n terms is n roundings of FP32 from the true one, in any order. They are
    of the size of the tensor's largest value: where terms cancel, as in the gradient of a softmax, a small value has
    their error too."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TERMS * 2**-24 * float(b.detach().abs().max()))


def test_rms_norm_equals_autograd() -> None:
    x, gain = torch.randn(3, 5, 48, requires_grad=True), torch.rand(48, requires_grad=True)
    dy = torch.randn(3, 5, 48)
    plain = F.rms_norm(x, (48,), gain, 1e-6)
    ours = rms_norm(x, gain, 1e-6)
    assert isinstance(ours, Tensor)
    same([ours], [plain])
    same(list(torch.autograd.grad(ours, (x, gain), dy)), list(torch.autograd.grad(plain, (x, gain), dy)))


def test_rms_norm_survives_bf16_overflow_of_squares() -> None:
    x = torch.full((2, 32), 1e18, dtype=torch.bfloat16)
    out = rms_norm(x, torch.ones(32), 1e-6)
    assert isinstance(out, Tensor) and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), torch.ones(2, 32))


@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_equals_autograd(weighted: bool) -> None:
    gate_up = torch.randn(7, 32, requires_grad=True)
    weight = torch.rand(7, requires_grad=True) if weighted else None
    dy = torch.randn(7, 16)
    gate, up = gate_up.chunk(2, -1)
    plain = F.silu(gate) * up * (weight[:, None] if weight is not None else 1)
    ours = swiglu(gate_up, None, weight)
    assert isinstance(ours, Tensor)
    inputs = [gate_up] if weight is None else [gate_up, weight]
    same([ours], [plain])
    same(list(torch.autograd.grad(ours, inputs, dy)), list(torch.autograd.grad(plain, inputs, dy)))


def test_gather_and_combine_equal_autograd() -> None:
    tokens, chosen, width = 6, 2, 8
    order = torch.randperm(tokens * chosen)
    index, inverse = order // chosen, order.argsort().view(tokens, chosen)
    x = torch.randn(tokens, width, requires_grad=True)
    scale = torch.randn(tokens * chosen, 1)
    rows = gather_rows(x, index, inverse)
    assert isinstance(rows, Tensor)
    ours = combine_rows(rows * scale, index, inverse, torch.float32)
    plain = torch.zeros(tokens, width).index_add(0, index, x[index] * scale)
    same([ours], [plain])
    dy = torch.randn(tokens, width)
    same(list(torch.autograd.grad(ours, x, dy)), list(torch.autograd.grad(plain, x, dy)))


def layers(config: PrecisionConfig) -> tuple[Linear, Linear, GroupedLinear]:
    plan = Plan(config, 1)
    first = Linear(plan.gemm("layers.0.attn.q", "attn.q", 32, 48))
    second = Linear(plan.gemm("layers.0.attn.kv_a", "attn.kv_a", 32, 16))
    third = GroupedLinear(plan.gemm("layers.0.moe.experts.gate_up", "moe.experts", 32, 16, groups=2))
    modules = torch.nn.ModuleList([first, second, third])
    feed = Feed(first, second, third)
    assert feed.wants_tensor
    first.feed = feed  # type: ignore[assignment]
    for parameter in modules.parameters():
        torch.nn.init.normal_(parameter)
    bind(modules, plan, "cpu")
    return first, second, third


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_jit", "fp8_block"])
def test_one_quantisation_feeds_fp8_and_bf16_consumers(recipe: Recipe, name: str) -> None:
    first, second, third = layers(recipe(name))
    assert first.input_slot is third.input_slot, "one arena row for a tensor that is quantised once"
    x = torch.randn(5, 32, dtype=torch.bfloat16, requires_grad=True)
    gain = torch.ones(32, requires_grad=True)
    offsets = torch.tensor([2, 5], dtype=torch.int32)
    operand = rms_norm(x, gain, 1e-6, first.feed)  # type: ignore[arg-type]
    assert isinstance(operand, Operand) and operand.data.dtype == torch.float8_e4m3fn
    plain = rms_norm(x, gain, 1e-6)
    assert isinstance(plain, Tensor)
    for layer, args in ((first, ()), (second, ()), (third, (offsets,))):
        ours, theirs = layer(operand, *args), layer(plain, *args)
        assert torch.equal(ours, theirs), "the same numbers as quantising in the layer"
        dy = torch.randn_like(ours)
        grads = [torch.autograd.grad(y, (x, gain), dy, retain_graph=True) for y in (ours, theirs)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_block"])
def test_fp8_travels_to_the_experts(recipe: Recipe, name: str) -> None:
    _, _, experts = layers(recipe(name))
    index, inverse = torch.tensor([1, 0, 0, 1]), torch.tensor([[1, 2], [0, 3]])
    x = torch.randn(2, 32, dtype=torch.bfloat16, requires_grad=True)
    gain, feed = torch.ones(32), Feed(experts)
    rows = gather_rows(rms_norm(x, gain, 1e-6, feed), index, inverse)
    assert isinstance(rows, Operand) and rows.data.dtype == torch.float8_e4m3fn and not rows.kept
    assert rows.carrier.untyped_storage().nbytes() <= 4, "no BF16 copy beside the FP8"
    offsets = torch.tensor([1, 4], dtype=torch.int32)
    y = experts(rows, offsets)
    plain = rms_norm(x, gain, 1e-6)
    assert isinstance(plain, Tensor)
    want = experts(plain[index], offsets)
    assert torch.equal(y, want)
    dy = torch.randn_like(y)
    ours, theirs = torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(want, x, dy)[0]
    torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=1e-2)
