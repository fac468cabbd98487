"""The verdict on a step: one number that is not finite, wherever it is, skips the step, and its place is named."""

from collections.abc import Callable

import pytest
import torch

from precision import AmaxProbe, Linear, Plan, PrecisionConfig, ScalingArena
from trainer.config.recovery import RecoveryConfig, RewindConfig, SpikesConfig
from trainer.step.guard import StepGuard

LOSSES = 4
PARAMETERS = ["a.weight", "b.weight"]
Make = Callable[..., StepGuard]


@pytest.fixture
def make(recipe: Callable[..., PrecisionConfig]) -> Make:
    """make(spikes=False): a guard over the rows of one FP8 layer and a probe."""

    def guard(spikes: bool = False) -> StepGuard:
        plan = Plan(recipe("fp8_delayed", backend="reference"), 1)
        slots = [*Linear(plan.gemm("a", "ffn", 32, 32)).slots(), *AmaxProbe("w").slots()]
        arena = ScalingArena(slots, plan.config.scaling, True, "cpu")
        assert arena.names == ["a:input", "a:weight", "a:grad", "w", "w:grad"]
        config = RecoveryConfig(2, SpikesConfig(spikes, 8, 2, 6.0), RewindConfig(2, 0, 1.0, 0))
        return StepGuard(arena, PARAMETERS, config)

    return guard


@pytest.fixture
def guard(make: Make) -> StepGuard:
    return make()


PLACES = {
    **{("amax", i): f"{name} (forward)" for i, name in ((0, "a:input"), (1, "a:weight"), (3, "w"))},
    **{("amax", i): f"{name} (backward)" for i, name in ((2, "a"), (4, "w"))},
    **{("loss", i): "loss (forward)" for i in range(LOSSES)},
    **{("norm", i): f"{name} (weight gradient)" for i, name in enumerate("ab")},
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("what", "index"), PLACES)
def test_one_nonfinite_number_skips_the_step(guard: StepGuard, what: str, index: int, value: float) -> None:
    numbers = {"amax": guard._arena.amax.fill_(1.0), "loss": torch.ones(LOSSES), "norm": torch.ones(2)}
    good = guard.judge(1, numbers["loss"], numbers["norm"])
    assert bool(good.ok) and not bool(good.spike)
    guard.count(good)
    numbers[what][index] = value
    bad = guard.judge(2, numbers["loss"], numbers["norm"])
    assert not bool(bad.ok) and not bool(bad.spike)
    assert guard.places[int(bad.place)] == PLACES[what, index]
    guard.count(bad)
    assert guard.state_dict() == {"committed": 1, "skipped": 1, "spiked": 0, "overflowed": 0, "spikes": None}


def test_of_several_places_the_first_in_the_order_of_a_step_is_named(guard: StepGuard) -> None:
    """Forward, loss, backward from the last block to the first, weight gradients."""
    amax, losses, norms = guard._arena.amax.fill_(1.0), torch.ones(LOSSES), torch.full((2,), torch.nan)

    def first() -> str:
        return guard.places[int(guard.judge(1, losses, norms).place)]

    assert first() == "a (weight gradient)"
    amax[2] = torch.nan
    assert first() == "a (backward)"
    amax[4] = torch.nan
    assert first() == "w (backward)"
    losses[3] = torch.nan
    assert first() == "loss (forward)"
    amax[3] = torch.nan
    assert first() == "w (forward)"
    amax[1] = torch.nan
    assert first() == "a:weight (forward)"


@pytest.mark.parametrize("spikes", [False, True])
def test_counters_and_what_is_usual_survive_in_a_checkpoint(make: Make, spikes: bool) -> None:
    guard, other = make(spikes), make(spikes)
    for step, loss in enumerate((2.0, 2.1, torch.nan, 1.9, 90.0), start=1):
        guard.count(guard.judge(step, torch.full((LOSSES,), loss), torch.ones(2)))
    state = guard.state_dict()
    assert [state[key] for key in ("committed", "skipped", "spiked")] == ([3, 2, 1] if spikes else [4, 1, 0])
    other.load_state_dict(state)
    readings = [each.judge(6, torch.full((LOSSES,), 3.0), torch.ones(2)).reading or () for each in (guard, other)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*readings, strict=True))
    other.count(other.judge(6, torch.ones(LOSSES), torch.ones(2)))
    assert other.state_dict()["committed"] == state["committed"] + 1
    other.load_state_dict({**state, "spikes": None})  # of a run that did not detect them yet
    readings = [each.judge(7, torch.ones(LOSSES), torch.ones(2)).reading or () for each in (other, make(spikes))]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*readings, strict=True))
