"""The timeline of a run: what its spans and phases come to in steps and tokens."""

from dataclasses import replace
from typing import Any

import pytest
from composed import config_of

from precision.errors import UserError
from trainer.config import TrainerConfig
from trainer.config.phases import Amount, Shape, Unit, length, span
from trainer.config.timeline import Timeline, rates, steps_of_tree, with_epochs

RUN = ["trainer.global_batch_size=4", "trainer.microbatch_size=2", "trainer.sequence_length=10"]
V3 = "469B", "10T", "14.3T", "14.633T"


def trainer(*overrides: str) -> TrainerConfig:
    return config_of([*RUN, *overrides]).trainer


@pytest.mark.parametrize(
    ("value", "amount"),
    [
        (0, (0, Unit.steps)), (2000, (2000, Unit.steps)), (1e3, (1000, Unit.steps)), (0.02, (0.02, Unit.share)),
        ("2%", (0.02, Unit.share)), ("10B", (10**10, Unit.tokens)), ("1.5 T tokens", (15 * 10**11, Unit.tokens)),
        ("500k", (500_000, Unit.tokens)), (-1, None), (2.5, None), ("10", None), ("200%", None), (True, None),
        (float("nan"), None), (float("inf"), None), ("3 epochs", None), ("1e999B", None),
    ],
)  # fmt: skip
def test_a_span_is_steps_tokens_or_a_share(value: Any, amount: tuple[float, Unit] | None) -> None:
    assert span(value) == (None if amount is None else Amount(*amount))


@pytest.mark.parametrize(
    ("value", "amount"),
    [
        (10, (10, Unit.tokens)), (1e9, (10**9, Unit.tokens)), ("14.8T", (148 * 10**11, Unit.tokens)),
        ("3 epochs", (3, Unit.epochs)), ("0.5epochs", (0.5, Unit.epochs)), (0, None), (0.5, None), ("0 epochs", None),
        ("1e999 epochs", None),
    ],
)  # fmt: skip
def test_a_length_is_tokens_or_epochs(value: Any, amount: tuple[float, Unit] | None) -> None:
    assert length(value) == (None if amount is None else Amount(*amount))


@pytest.mark.parametrize("nothing", ["0%", "0K"])
def test_zero_is_never_in_any_unit(nothing: str) -> None:
    assert config_of([*RUN, f"eval.every='{nothing}'"]).eval.every == 0


def test_a_run_ends_with_the_first_of_steps_and_tokens() -> None:
    assert Timeline(trainer("trainer.max_steps=7")).steps == 7
    assert Timeline(trainer("trainer.max_steps=null", "trainer.max_tokens=401")).steps == 11, "40 tokens a step"
    assert Timeline(trainer("trainer.max_steps=7", "trainer.max_tokens=400")).steps == 7
    assert Timeline(trainer("trainer.max_steps=70", "trainer.max_tokens=400")).steps == 10
    with pytest.raises(UserError, match=r"trainer\.max_steps=null: the run has no end; set it, or trainer\.max_tokens"):
        Timeline(trainer("trainer.max_steps=null"))


def test_epochs_become_tokens_when_the_text_is_known() -> None:
    config = config_of([*RUN, "trainer.max_steps=null", "trainer.max_tokens=1.5 epochs"])
    assert Timeline(with_epochs(config, 1000).trainer).steps == 38
    assert Timeline(config.trainer).epochs == 1.5
    assert with_epochs(replace(config, trainer=trainer()), 1000).trainer == trainer()


def test_a_share_of_unknown_epochs_is_refused_as_that() -> None:
    """Not because the next phase would end before it."""
    for phases in ("{until: 50%}", "{until: 0.5}, {until: 2M}"):
        with pytest.raises(UserError, match=r"trainer\.max_tokens=2 epochs: .* text has to be read first; set tokens"):
            Timeline(trainer("trainer.max_tokens=2 epochs", f"trainer.phases=[{phases}, {{}}]"))


def test_spans_come_to_steps_and_intervals_do_not_drift() -> None:
    t = Timeline(trainer("trainer.max_steps=100"))
    assert [t.steps_of(value) for value in (30, 0.25, "1K", 0)] == [30, 25, 25, 0]
    assert [step for step in range(1, 101) if t.due(step, 0.25)] == [25, 50, 75, 100]
    thirds = [step for step in range(1, 11) if t.due(step, "0.1K")]
    assert thirds == [3, 5, 8, 10], "the first step at or after each 100 tokens"
    assert not any(t.due(step, never) for step in range(1, 101) for never in (0, "0%", "0B"))


def test_a_ramp_grows_by_what_it_began_with_in_equal_parts_of_tokens() -> None:
    t = Timeline(
        trainer("trainer.max_steps=30", "trainer.phases=[{until: 0.36K, global_batch_size: 16, batch_ramp: true}]")
    )
    assert [(each.first, each.before, each.batch) for each in t.segments] == [
        (1, 0, 4), (4, 120, 8), (6, 280, 12), (7, 400, 16),
    ]  # fmt: skip
    tokens = 0
    for step in range(1, 31):
        tokens += t.at(step).tokens
        assert t.tokens(step) == tokens
    assert t.read_by(5) == [(1, 4, 10), (4, 8, 10)]


def test_v3_as_published() -> None:
    """Section 4.2 of arXiv 2412.19437."""
    config = config_of(["+recipe=v3_256xh200"])
    t = Timeline(config.trainer)
    assert 14.8e12 <= t.tokens(t.steps) < 14.8e12 + 15360 * 4096
    assert (t.at(1).batch, t.at(t.steps).batch) == (3072, 15360)
    for phase, until in zip(t.phases, (469e9, 10e12, 14.3e12, 14.633e12), strict=False):
        assert until <= t.tokens(phase.end) < until + 15360 * 4096
    ramp, constant, decay, low = (phase.end for phase in t.phases[:4])
    assert [t.weights(step).mtp for step in (1, constant, constant + 1, t.steps)] == [None, None, 0.1, 0.1]
    assert [t.weights(step).router_bias_rate for step in (decay, decay + 1, t.steps)] == [None, 0.0, 0.0]
    assert rates(t) == [(constant, decay, 2.2e-5, Shape.cosine), (low, t.steps, 7.3e-6, Shape.constant)]
    assert t.at(ramp).batch < 15360 == t.at(ramp + 1).batch


def test_losses_and_norms_may_rise_with_another_weight_or_length_or_a_smaller_batch() -> None:
    phases = "{until: 2, global_batch_size: 8}, {until: 4, lr: 1e-3}, {until: 6, mtp_loss_weight: 0.1}"
    phases += ", {until: 8, sequence_length: 20}, {until: 10, global_batch_size: 4}, {router_bias_update_rate: 0}"
    t = Timeline(trainer("trainer.max_steps=12", f"trainer.phases=[{phases}]"))
    assert [step for step in range(1, 13) if t.may_rise(step)] == [5, 7, 9]
    assert [t.shrinks(step) for step in range(1, 13)] == [1.0] * 8 + [2.0] + [1.0] * 3


def test_a_shorter_run_keeps_its_course() -> None:
    """`trainer.max_steps=N` for a trial: the first N steps are those of the whole run."""
    whole = Timeline(config_of(["+recipe=v3_256xh200"]).trainer)
    short = Timeline(config_of(["+recipe=v3_256xh200", "trainer.max_steps=20000"]).trainer)
    assert short.steps == 20000
    assert rates(short)[0] == rates(whole)[0], "the decay is as long as it was"
    assert all(short.at(step) == whole.at(step) for step in range(1, 20001, 500))


def test_shares_of_phases_and_of_moves_of_the_rate_are_of_tokens_if_the_length_is() -> None:
    phases = "[{until: 50%}, {global_batch_size: 8, lr: 0.1, lr_shape: linear, lr_until: 75%}]"
    t = Timeline(trainer(f"trainer.phases={phases}", "trainer.max_tokens=8K", "trainer.max_steps=120"))
    assert (t.steps, t.at(101).first, rates(t)) == (120, 101, [(100, 125, 0.1, Shape.linear)])


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        ("{}, {}", "trainer.phases[0].until=null: only the last phase ends with the run"),
        ("{until: 5}, {until: 5}", "trainer.phases[1].until=5: the previous phase ends at 5 steps; set more"),
        (
            "{until: 5}, {until: 100}, {until: 199K}, {until: 4K}",
            "trainer.phases[3].until=4K: the previous phase ends at",
        ),
        ("{until: 5, batch_ramp: true}", "trainer.phases[0].batch_ramp=true: it has no end; set"),
        (
            "{until: 5, global_batch_size: 6, batch_ramp: true}",
            "trainer.phases[0].global_batch_size=6: a ramp from 4 sequences has steps of that size; set a multiple",
        ),
        (
            "{until: 5, global_batch_size: 1000000000, batch_ramp: true}",
            "global_batch_size=1000000000: a ramp in steps of 4 sequences has 250,000,000 parts, and at most 10,000;",
        ),
    ],
)
def test_phases_that_do_not_follow_each_other_are_refused(phases: str, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        Timeline(trainer(f"trainer.phases=[{phases}]"))
    assert says in str(refusal.value)


def test_the_goal_of_a_run_of_any_age_is_read_from_its_config() -> None:
    assert steps_of_tree({"trainer": {"max_steps": 12, "unknown": 1}}) == 12
    assert steps_of_tree({}) is None and steps_of_tree(None) is None
    tree = {"max_steps": None, "max_tokens": "1K", "seed": 1, "global_batch_size": 4, "microbatch_size": 4}
    assert steps_of_tree({"trainer": tree | {"sequence_length": 10, "device": "cpu"}}) == 25
    of = {"trainer": tree | {"sequence_length": 10, "device": "cpu"}}
    assert [steps_of_tree(of, span) for span in (3, "0.2K", "20%", "often", [3])] == [3, 5, 5, None, None]
