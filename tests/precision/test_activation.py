"""FOG's activations without a gate, against the formulas in float64 under autograd."""

import pytest
import torch
from torch import Tensor

from precision import Gelu, Xielu

ENDS = [3, 3, 10, 11]  # rows of four experts; the second has none


def rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ENDS[-1], 33, generator=generator) * 3
    x[0, :4] = torch.tensor([0.0, 1e-7, -1e-7, -30.0])
    return x, torch.rand(ENDS[-1], generator=generator), torch.randn(x.shape, generator=generator)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def xielu(x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    a_p, a_n = torch.log1p(positive.exp()), 0.5 + torch.log1p(negative.exp())
    return torch.where(x > 0, a_p * x * x, a_n * (torch.expm1(x.clamp(max=0)) - x)) + x / 2


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["gelu", "xielu", "xielu of experts"])
def test_values_and_gradients_are_the_formulas(kind: str, weighted: bool) -> None:
    x, weight, dy = rows()
    layer = Gelu() if kind == "gelu" else Xielu(4 if kind.endswith("experts") else 1)
    if isinstance(layer, Xielu):
        layer.reset()
        with torch.no_grad():
            layer.positive.add_(torch.arange(len(layer.positive)) * 0.25)
    offsets = torch.tensor(ENDS, dtype=torch.int32) if kind.endswith("experts") else None
    ours = [x.requires_grad_(), weight.requires_grad_(), *layer.parameters()]
    theirs = [each.detach().double().requires_grad_() for each in ours]
    h = layer(x, weight if weighted else None, offsets)
    (h * dy).sum().backward()
    exact_x, exact_weight, *exact_a = theirs
    if offsets is not None:
        exact_a = [
            a.repeat_interleave(torch.tensor(ENDS).diff(prepend=torch.zeros(1, dtype=torch.int64))) for a in exact_a
        ]
        exact_a = [a[:, None] for a in exact_a]
    exact = gelu(exact_x) if kind == "gelu" else xielu(exact_x, *exact_a)
    exact = exact * exact_weight[:, None] if weighted else exact
    (exact * dy.double()).sum().backward()
    assert h.dtype == x.dtype
    torch.testing.assert_close(h.double(), exact, rtol=1e-5, atol=1e-5)  # FP32, sums of 33 to 363 numbers below 100
    for one, other in zip(ours, theirs, strict=True):
        if other.grad is not None:
            assert one.grad is not None
            torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4)


def test_xielu_starts_as_its_authors_wrote_it() -> None:
    activations = pytest.importorskip("transformers.activations")
    theirs = activations.XIELUActivation(dtype=torch.float32)
    ours = Xielu()
    ours.reset()
    x = rows()[0]
    torch.testing.assert_close(ours(x), theirs(x))
    assert torch.allclose(ours.positive, theirs.alpha_p.float()) and torch.allclose(
        ours.negative, theirs.alpha_n.float()
    )


def test_bf16_is_rounded_once() -> None:
    x = rows()[0].bfloat16()
    for layer in (Gelu(), Xielu()):
        if isinstance(layer, Xielu):
            layer.reset()
        wide = layer(x.float()).bfloat16()
        assert torch.equal(layer(x), wide)


def test_experts_keep_their_own_parameters() -> None:
    layer = Xielu(4)
    layer.reset()
    with torch.no_grad():
        layer.positive.copy_(torch.arange(4.0))
    layer.keep(range(1, 3))
    assert layer.positive.tolist() == [1.0, 2.0]
