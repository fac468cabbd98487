"""Statistics of casts against what can be counted by hand; rows of the arena, stacks of experts as one."""

from collections.abc import Callable

import pytest
import torch

from precision import AmaxProbe, GroupedLinear, Linear, Plan, PrecisionConfig, ScalingArena
from precision.backends import get_backend
from precision.formats import E4M3, saturating_cast
from trainer.health import casts
from trainer.health.casts import Casts, Rows, cast_sums
from trainer.launch.world import World

Recipe = Callable[..., PrecisionConfig]
NONE = torch.zeros(())


def test_saturated_and_underflown_elements_are_counted() -> None:
    x = torch.tensor([[1.0, 500.0, -600.0, 448.0], [0.0, 1e-4, -1e-4, 2.0]], dtype=torch.bfloat16)
    data = saturating_cast(x, torch.ones(()), E4M3)
    elements, saturated, underflown, error, norm = cast_sums(x, data, torch.ones(()), E4M3).tolist()
    assert (elements, saturated, underflown) == (8, 2, 2)
    assert error == pytest.approx(52.0**2 + 152.0**2, rel=1e-2)
    assert norm == pytest.approx(float(x.double().square().sum()))


def test_the_largest_number_under_its_own_scale_does_not_saturate(recipe: Recipe) -> None:
    layer = Linear(Plan(recipe("fp8_jit", backend="reference"), 1).gemm("a", "ffn", 32, 32))
    for seed in range(50):
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
        data, inv = get_backend("reference").quantize(x, NONE, torch.zeros(()), E4M3, layer.recipe)
        assert cast_sums(x, data, inv, E4M3)[casts.SATURATED] == 0


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_jit", "fp8_block"])
@pytest.mark.parametrize("what", ["rows", "sequences", "weight", "stack"])
def test_scales_of_every_kind(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, name: str, what: str) -> None:
    """The error is a rounding's, whatever the scales; in pieces as at once."""
    gemm = Plan(recipe(name, backend="reference"), 1).gemm("a", "ffn", 320, 336).recipe
    backend, generator = get_backend("reference"), torch.Generator().manual_seed(0)
    if what in ("rows", "sequences"):
        x = torch.randn(300, 320, generator=generator).bfloat16() * torch.logspace(-3, 3, 300)[:, None].bfloat16()
        x = x.view(2, 150, 320) if what == "sequences" else x
        data, inv = backend.quantize(x, NONE, torch.zeros(()), E4M3, gemm)
    else:
        x = (
            torch.randn(336, 320, generator=generator)
            if what == "weight"
            else torch.randn(3, 336, 320, generator=generator)
        )
        rows = torch.zeros(3) if what == "stack" else NONE
        made = backend.quantize_weight(x, rows, torch.zeros_like(rows), E4M3, gemm, None)
        assert made.scale_inv is not None
        data, inv = made.data, made.scale_inv
    sums = cast_sums(x, data, inv, E4M3)
    assert sums[casts.ELEMENTS] == x.numel() and sums[casts.SATURATED] == 0
    assert 0.02 < float((sums[casts.ERROR] / sums[casts.NORM]).sqrt()) < 0.03
    monkeypatch.setattr(casts, "_AT_ONCE", 320 * 40)
    torch.testing.assert_close(cast_sums(x, data, inv, E4M3), sums, rtol=1e-6, atol=0)


@pytest.fixture
def arena(recipe: Recipe) -> tuple[ScalingArena, Linear, GroupedLinear]:
    plan = Plan(recipe("fp8_delayed", backend="reference"), 1)
    a = Linear(plan.gemm("a", "ffn", 32, 32))
    probe, experts = AmaxProbe("w"), GroupedLinear(plan.gemm("e", "moe.experts", 32, 16, 4, 1.0))
    slots = [*a.slots(), *probe.slots(), *experts.slots()]
    return ScalingArena(slots, plan.config.scaling, True, "cpu"), a, experts


def test_a_stack_of_experts_is_one_row(arena: tuple[ScalingArena, Linear, GroupedLinear]) -> None:
    made, a, experts = arena
    rows = Rows(made)
    assert rows.names == ["a:input", "a:weight", "a:grad", "e:input", "e:weight", "e:grad"]
    assert experts.weight_slot is not None and experts.weight_slot.place is not None and a.grad_slot is not None
    assert rows.at(int(experts.weight_slot.place)) == 4
    assert a.grad_slot.place is not None and rows.at(int(a.grad_slot.place)) == 2
    assert rows.at(3) is None  # a probe
    made.amax.copy_(torch.arange(11.0))
    made.scale.copy_(torch.tensor([1.0, 0, 3, 9, 9, 4, 8, 7, 0, 6, 5]))
    assert rows.largest(made.amax).tolist() == [0, 1, 2, 5, 9, 10]
    assert rows.smallest_positive(made.scale).tolist() == [1, torch.inf, 3, 4, 6, 5]


def test_shares_are_over_all_casts_of_a_row(arena: tuple[ScalingArena, Linear, GroupedLinear]) -> None:
    made, a, _ = arena
    seen = Casts(Rows(made), made.amax.device)
    assert a.input_slot is not None and a.input_slot.place is not None
    place = int(a.input_slot.place)
    for x in (torch.full((2, 32), 500.0), torch.ones(2, 32), torch.tensor([1.0, 1e-4]).repeat(4, 16)):
        seen(place, x, saturating_cast(x, torch.ones(()), E4M3), torch.ones(()), E4M3)
    seen(place, torch.ones(0, 32), torch.ones(0, 32).to(E4M3.dtype), torch.ones(()), E4M3)
    shares = seen.shares(World(made.amax.device))
    clipped, live = torch.full((2, 32), 500.0), torch.tensor([-1, 0], dtype=torch.int32)
    seen(place, clipped, saturating_cast(clipped, torch.ones(()), E4M3), torch.ones(()), E4M3, live)
    assert float(seen.shares(World(made.amax.device))["saturated"][0]) == pytest.approx(3 / 9), "one row is none"
    assert float(shares["saturated"][0]) == float(shares["underflown"][0]) == 0.25
    assert torch.isnan(shares["error"][1:]).all(), "nothing was cast there"
