"""An operator of ours is one of PyTorch's: in compiled graphs, with what it changes in place, and without gradients."""

import pytest
import torch
from torch import Tensor

from precision.operators import operator


@operator("test_scaled", mutates_args=("largest",))
def scaled(x: Tensor, largest: Tensor, by: float, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x times `by` and its sum; raises `largest`."""
    torch.maximum(largest, x.abs().amax(), out=largest)
    y = x * by if more is None else x * by + more
    return y, y.sum()


@torch.library.register_fake(scaled)
def _(x: Tensor, largest: Tensor, by: float, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(())


class Twice(torch.autograd.Function):
    """2 x by way of the operator."""

    @staticmethod
    def forward(ctx, x: Tensor, largest: Tensor) -> Tensor:
        return scaled(x, largest, 2.0)[0]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return scaled(grads[0], torch.zeros(()), 2.0)[0], None


def test_by_its_name_and_its_schema() -> None:
    assert scaled is torch.ops.octet.test_scaled.default
    assert "Tensor(a1!) largest" in str(scaled._schema)
    x, largest = torch.randn(3, 4), torch.zeros(())
    torch.library.opcheck(scaled, (x, largest, 3.0, x), test_utils=("test_schema", "test_faketensor"))


def test_results_carry_no_gradient_whatever_the_mode() -> None:
    x, largest = torch.randn(5, requires_grad=True), torch.zeros(())
    y, total = scaled(x, largest, 3.0, more=x)
    assert not y.requires_grad and not total.requires_grad and not largest.requires_grad
    torch.testing.assert_close(y, 4 * x.detach())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiled_it_is_the_same(backend: str) -> None:
    torch._dynamo.reset()
    largest = torch.zeros(2)

    def step(x: Tensor) -> Tensor:
        return Twice.apply(x.sin(), largest[1]).square().sum()

    compiled, gradients, amaxes = torch.compile(step, fullgraph=True, backend=backend), [], []
    values = torch.randn(6)
    for run in (step, compiled):
        x = values.clone().requires_grad_()
        run(x).backward()
        gradients.append(x.grad)
        amaxes.append(largest.clone())
        largest.zero_()
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(*amaxes, rtol=1e-6, atol=0)
    assert amaxes[0][1] == values.sin().abs().max() and amaxes[0][0] == 0
