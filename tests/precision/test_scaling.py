"""Scales are finite and use the format's range; histories take in good steps only."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from precision.config import ScalingConfig
from precision.formats import E4M3, E5M2, saturating_cast
from precision.scaling import ScalingArena, Slot, absolute_max, record_amax, scale_from_amax

amaxes = st.floats(0, 2.0**127, width=32) | st.sampled_from([0.0, 1e-45, 1e-38, 3.3e38, math.inf, math.nan])
JUMP = 16.0
YES, NO = torch.tensor(True), torch.tensor(False)


def arena(count: int = 1, history: int = 4, delayed: bool = True) -> tuple[ScalingArena, Slot]:
    names = [f"w.{i}" for i in range(count)]
    slot = Slot(names, E4M3, stacked=count > 1)
    config = ScalingConfig(history=history, max_jump=JUMP)
    return ScalingArena([slot, Slot(["watched"], None)], config, delayed, "cpu"), slot


def record(slot: Slot, amax: torch.Tensor) -> None:
    assert slot.amax is not None
    record_amax(slot.amax, amax)


def step(a: ScalingArena, slot: Slot, amax: float, ok: torch.Tensor = YES) -> float:
    a.begin_step()
    record(slot, torch.tensor(amax))
    a.commit(ok & a.finite())
    return a.scale[0].item()


@given(amax=amaxes, margin=st.integers(0, 4), power=st.booleans())
def test_scale_is_finite_and_maps_amax_into_range(amax: float, margin: int, power: bool) -> None:
    scale = scale_from_amax(torch.tensor(amax), E4M3.max, margin, power)
    assert torch.isfinite(scale) and scale > 0
    if amax == 0 or not math.isfinite(amax):
        assert scale == 1
        return
    scaled = scale.double().item() * amax
    assert scaled <= E4M3.max / 2**margin * (1 + 1e-6)
    if amax > 1e-30:
        assert scaled > E4M3.max / 2**margin / (2 if power else 1) * (1 - 1e-6)
    if power:
        assert math.frexp(scale.item())[0] == 0.5


@given(xs=st.lists(st.floats(width=32), max_size=30))
def test_amax_sees_what_a_cast_hides(xs: list[float]) -> None:
    x = torch.tensor(xs, dtype=torch.float32)
    amax = absolute_max(x)
    if any(map(math.isnan, xs)):
        assert amax.isnan()
    else:
        assert amax.item() == max(map(abs, xs), default=0.0)
    assert amax.shape == () and amax.dtype == torch.float32
    assert not torch.isinf(saturating_cast(x, torch.tensor(1.0), E5M2).float()).any()


@given(seen=st.lists(amaxes, min_size=1, max_size=12))
def test_delayed_scale_follows_the_last_good_steps(seen: list[float]) -> None:
    a, slot = arena(history=4)
    good: list[float] = []
    for amax in seen:
        scale = step(a, slot, amax)
        if math.isfinite(amax):
            highest = torch.tensor(max(good[-4:], default=0.0)) * JUMP
            good.append(torch.tensor(amax).minimum(highest if highest > 0 else torch.tensor(math.inf)).item())
        peak = max(good[-4:], default=0.0)
        expected = scale_from_amax(torch.tensor(peak), E4M3.max, 0, False).item() if peak > 0 else 0.0
        assert scale == expected
        assert torch.isfinite(a.history).all()


def test_a_skipped_step_changes_no_bit() -> None:
    a, slot = arena()
    step(a, slot, 3.0)
    before = a.history.clone(), a.scale.clone()
    step(a, slot, 5.0, ok=NO)
    step(a, slot, math.nan)
    step(a, slot, math.inf)
    assert torch.equal(a.history, before[0]) and torch.equal(a.scale, before[1])


def test_a_huge_value_is_forgotten_after_the_history() -> None:
    a, slot = arena(history=3)
    step(a, slot, 1e30)
    scales = [step(a, slot, 1.0) for _ in range(3)]
    assert scales[1] < 1e-20 and scales[2] == E4M3.max


def test_one_absurd_value_leaves_usual_numbers_in_the_range_of_the_format() -> None:
    """Without a bound, 1e30 in a history casts usual numbers to zero until it is forgotten."""
    a, slot = arena(history=3)
    step(a, slot, 1.0)
    assert step(a, slot, 1e30) == E4M3.max / JUMP
    assert [step(a, slot, 1.0) for _ in range(3)] == [E4M3.max / JUMP, E4M3.max / JUMP, E4M3.max]


def test_a_jump_that_lasts_is_followed() -> None:
    a, slot = arena()
    step(a, slot, 1.0)
    assert [step(a, slot, 1e3) for _ in range(3)] == [E4M3.max / JUMP, E4M3.max / JUMP**2, torch.tensor(448 / 1e3)]


def test_microbatches_raise_the_amax_and_nan_sticks() -> None:
    a, slot = arena()
    for value, expected in ((2.0, 2.0), (1.0, 2.0), (7.0, 7.0)):
        record(slot, torch.tensor(value))
        assert a.amax[0] == expected
    record(slot, torch.tensor(math.nan))
    record(slot, torch.tensor(1.0))
    assert a.amax[0].isnan() and not a.finite()
    assert a.amax[1] == 0, "other rows are left alone"


def test_a_silent_expert_keeps_its_scale_while_others_move() -> None:
    a, slot = arena(count=3, history=2)
    for values in ([1.0, 2.0, 0.0], [4.0, 0.0, 0.0]):
        a.begin_step()
        record(slot, torch.tensor(values))
        a.commit(YES)
    assert a.scale[:3].tolist() == [448 / 4, 448 / 2, 0.0]


def test_state_goes_round_and_follows_names() -> None:
    a, slot = arena(count=3)
    for value in (4.0, 3.0, 2.0, 1.0):  # a whole history; the oldest is the largest
        a.begin_step()
        record(slot, torch.tensor([value, 2 * value, 3 * value]))
        a.commit(YES)
    same, _ = arena(count=3)
    assert same.load_state_dict(a.state_dict()) == []
    assert torch.equal(same.history, a.history) and torch.equal(same.scale, a.scale)
    longer, _ = arena(count=4, history=8)
    assert longer.load_state_dict(a.state_dict()) == ["w.3"]
    assert torch.equal(longer.history[:3, :4], a.history[:3]) and torch.equal(longer.scale[:3], a.scale[:3])
    shorter, _ = arena(count=3, history=2)
    assert shorter.load_state_dict(a.state_dict()) == []
    assert torch.equal(shorter.history[:3], a.history[:3, :2]), "the newest"
    current, _ = arena(count=3, delayed=False)
    assert current.load_state_dict(a.state_dict()) == []
    assert same.load_state_dict(current.state_dict()) == same.names, "from current scaling there is no history to take"
