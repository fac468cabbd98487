"""An observer sees every cast, as it was made, and leaves nothing behind."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from precision import (
    Feed,
    GroupedLinear,
    Linear,
    Plan,
    PrecisionConfig,
    bind,
    observe,
    refresh_weights,
    rms_norm,
    swiglu,
)
from precision.ffn import has_kernels
from precision.formats import Format, read_back
from precision.observe import every, is_observed, is_sampled, observing, sampling, unsampled

Recipe = Callable[..., PrecisionConfig]


def _nobody(place: int, x: Tensor, data: Tensor, inv: Tensor, fmt: Format, live: Tensor | None = None) -> None:
    """Sees and does nothing."""


class Net(nn.Module):
    """A norm that feeds two linears at once, then experts."""

    def __init__(self, plan: Plan):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(32))
        self.a, self.b = (Linear(plan.gemm(name, "ffn", 32, 64)) for name in "ab")
        self.experts = GroupedLinear(plan.gemm("experts", "moe.experts", 32, 16, 2, 1.0))
        self.feed, self.experts_feed = Feed(self.a, self.b), Feed(self.experts)

    def forward(self, x: Tensor) -> Tensor:
        operand = rms_norm(x, self.gain, 1e-6, self.feed)
        h = swiglu(self.a(operand) + self.b(operand), self.experts_feed)
        return self.experts(h, torch.tensor([3, 8], dtype=torch.int32))


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_jit", "fp8_block"])
def test_every_cast_is_shown_as_it_was_made(recipe: Recipe, name: str) -> None:
    torch.manual_seed(0)
    plan = Plan(recipe(name, backend="reference"), 1)
    net = Net(plan)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    arena = bind(net, plan, "cpu")
    seen: Counter[str] = Counter()

    def observer(place: int, x: Tensor, data: Tensor, inv: Tensor, fmt: Format, live: Tensor | None = None) -> None:
        seen[arena.names[place]] += 1
        assert data.shape == x.shape and data.dtype == fmt.dtype and not x.requires_grad
        if x.dim() == 2 and x.shape[0] == 8:
            assert (read_back(data, inv) - x).abs().max() <= 0.13 * x.abs().max()

    x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    with observing(observer):
        assert is_observed()
        refresh_weights(net, force=True)
        net(x).sum().backward()
    parts = ("input", "weight", "grad")
    experts = ("experts:input", "experts:weight.0", "experts:grad")
    assert seen == dict.fromkeys(("a:input", *(f"{n}:{p}" for n in "ab" for p in parts[1:]), *experts), 1)
    net(x).sum().backward()
    assert sum(seen.values()) == 8 and not is_observed()
    with sampling(observer):
        assert is_sampled() and not is_observed()
        with unsampled():
            net(x).sum().backward()
        assert sum(seen.values()) == 8
        refresh_weights(net, force=True)
        net(x).sum().backward()
    assert set(seen.values()) == {2} and not is_sampled()


def test_kernels_that_cast_on_the_way_step_aside(recipe: Recipe) -> None:
    pytest.importorskip("triton")
    plan = Plan(recipe("bf16", backend="reference"), 1)
    layer = Linear(plan.gemm("a", "ffn", 32, 32))
    layer.recipe = replace(layer.recipe, backend="cuda")
    assert has_kernels(layer, layer)
    x, gain = torch.randn(4, 32, dtype=torch.bfloat16), torch.ones(32)
    with observing(_nobody):
        assert not has_kernels(layer, layer)
        aside = rms_norm(x, gain, 1e-6, None, "cuda")
    plain = rms_norm(x, gain, 1e-6)
    assert isinstance(aside, Tensor) and isinstance(plain, Tensor) and torch.equal(aside, plain)


def test_an_observer_that_fails_does_not_stay() -> None:
    for watching in (observing, sampling):
        with pytest.raises(RuntimeError, match="no"), watching(_nobody):
            raise RuntimeError("no")
    assert not is_observed() and not is_sampled()


def test_rows_are_few_and_fall_in_step_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "SAMPLE_ON_CPU", 100)
    for rows in (0, 1, 99, 100, 101, 200, 300, 12_345):
        shown = range(rows)[every(torch.empty(rows, 0))]
        assert len(shown) <= 100 and (rows > 100 or len(shown) == rows)
        assert shown.step % 2 == 1 and len(shown) * shown.step >= rows
