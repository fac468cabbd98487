"""Spikes: what jumps up is one, what falls, drifts or wobbles is none, and nothing bad becomes usual."""

import math

import pytest
import torch

from trainer.config.recovery import SpikesConfig
from trainer.step.spikes import SpikeWatch

CPU = torch.device("cpu")


def watch(window: int = 32, min_steps: int = 16, threshold: float = 6.0) -> SpikeWatch:
    return SpikeWatch(SpikesConfig(True, window, min_steps, threshold), CPU)


def step(spikes: SpikeWatch, loss: float, norm: float) -> list[bool]:
    """One step; it enters the window unless it is a spike. Returns whether loss and norm were one."""
    reading = spikes.read(torch.tensor(loss), torch.tensor(norm))
    spikes.commit(reading, ~reading.spiked.any())
    return reading.spiked.tolist()


def noisy(count: int, seed: int = 0) -> list[tuple[float, float]]:
    """Steps of a healthy run: the loss wobbles by 2 %, the norm, with a long tail, by 30 %."""
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)).tolist()
    return [(3.0 * math.exp(0.02 * a), 0.5 * math.exp(0.3 * b)) for a, b in noise]


def test_a_healthy_run_has_none() -> None:
    spikes = watch()
    assert not any(any(step(spikes, *numbers)) for numbers in noisy(500))


def test_a_loss_that_falls_fast_and_a_norm_that_falls_with_it_have_none() -> None:
    spikes = watch()
    for i, (loss, norm) in enumerate(noisy(400)):
        assert not any(step(spikes, loss * (1 + 2 * math.exp(-i / 20)), norm * (1 + 20 * math.exp(-i / 10)))), i


@pytest.mark.parametrize(
    ("loss", "norm", "is_spike"), [(2, 1, [True, False]), (1, 20, [False, True]), (9, 99, [True] * 2)]
)
def test_a_jump_up_is_a_spike_and_a_drop_is_not(loss: float, norm: float, is_spike: list[bool]) -> None:
    spikes = watch()
    for numbers in noisy(40):
        step(spikes, *numbers)
    assert step(spikes, 3.0 * loss, 0.5 * norm) == is_spike
    assert step(spikes, 3.0 / loss, 0.5 / norm) == [False, False]


def test_there_are_no_spikes_before_min_steps() -> None:
    spikes = watch()
    for numbers in noisy(15):
        step(spikes, *numbers)
    assert step(spikes, 300.0, 50.0) == [False, False]  # the 16th
    assert step(spikes, 300.0, 50.0) == [True, True]


def test_spikes_and_what_is_not_finite_never_become_usual() -> None:
    """However often they come: nor do they hide one another."""
    spikes = watch()
    for numbers in noisy(32):
        step(spikes, *numbers)
    values, seen = spikes.values.clone(), int(spikes.seen)
    for bad in (math.nan, math.inf, 1e30, 6.0, 5.0):
        for _ in range(40):
            assert step(spikes, bad, bad) == [True, True]
    assert torch.equal(values, spikes.values) and int(spikes.seen) == seen == 32
    assert step(spikes, 3.0, 0.5) == [False, False]


def test_a_constant_loss_has_room_to_breathe() -> None:
    """Its deviation is 0; six times the floors are 13 % of the loss and 82 % of the norm."""
    spikes = watch()
    for _ in range(40):
        step(spikes, 1.0, 1.0)
    assert step(spikes, 1.1, 1.8) == [False, False]
    assert step(spikes, 1.15, 1.8) == [True, False]
    assert step(spikes, 1.1, 1.9) == [False, True]


def test_one_outlier_in_the_window_does_not_hide_the_next() -> None:
    """As it would with a mean and a standard deviation: 10 then lies within six of them."""
    spikes = watch(threshold=3.0)
    for i, (loss, norm) in enumerate(noisy(32)):
        step(spikes, 100.0 if i == 3 else loss, norm)  # before anything counts as one
    usual = torch.tensor([100.0] + [3.0] * 31)
    assert usual.mean() + 6 * usual.std() > 10
    assert step(spikes, 10.0, 0.5) == [True, False]


@pytest.mark.parametrize("window", [32, 16, 64])
def test_what_is_usual_survives_in_a_window_of_any_length(window: int) -> None:
    spikes, steps = watch(), noisy(50)
    for numbers in steps:
        step(spikes, *numbers)
    other = watch(window)
    other.load_state_dict(spikes.state_dict())
    count = min(window, 32)
    assert int(other.seen) == count
    torch.testing.assert_close(
        other.values[0, :count].exp(), torch.tensor([loss for loss, _ in steps[: -count - 1 : -1]])
    )
    for numbers in noisy(20, seed=1):
        ours = spikes.read(*map(torch.tensor, numbers))
        theirs = other.read(*map(torch.tensor, numbers))
        if window == 32:
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        step(spikes, *numbers)
        step(other, *numbers)
