"""The layer of experts equals a dense loop over them, gradients included, with experts that get no token, too."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import DeepSeek
from models.moe import MoE

Build = Callable[..., DeepSeek]


def dense(moe: MoE, x_TD: Tensor, batch: int) -> Tensor:
    """The layer as a loop over all experts."""
    routing = moe.gate((x_TD @ moe.router.weight.t()).unflatten(0, (batch, -1)))
    expert, weight = routing.expert.flatten(0, 1), routing.weight.flatten(0, 1)

    def ffn(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (x @ gate_up.t()).chunk(2, -1)
        return (F.silu(gate) * up) @ down.t()

    y_TD = ffn(x_TD, moe.shared.first.weight, moe.shared.down.weight)
    for e in range(moe.gate.num_experts):
        weight_T = torch.where(expert == e, weight, 0.0).sum(1)
        y_TD = y_TD + weight_T[:, None] * ffn(x_TD, moe.experts.first.weight[e], moe.experts.down.weight[e])
    return y_TD


@pytest.mark.parametrize(("batch", "length"), [(2, 20), (1, 1), (3, 2)])
@pytest.mark.parametrize("starved", [False, True])
def test_layer_and_gradients_equal_a_dense_loop(batch: int, length: int, starved: bool, build: Build) -> None:
    model = build()
    moe = model.get_submodule("layers.1.moe")
    assert isinstance(moe, MoE)
    assert moe.gate.bias is not None
    if starved:  # three experts get no token
        moe.gate.bias[:3] = -10.0
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(batch * length, model.config.hidden_size, generator=generator).requires_grad_()
    y, _, load = moe(x, batch)
    if starved:
        assert load[:3].tolist() == [0, 0, 0]
    expected = dense(moe, x, batch)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(y.shape, generator=generator)
    weights = list(moe.parameters())
    ours = torch.autograd.grad(y, [x, *weights], upstream)
    theirs = torch.autograd.grad(expected, [x, *weights], upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
