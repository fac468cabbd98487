"""Routing: who is chosen, with which weight, and what the balance loss says."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import RouterScoring
from models.router import Gate, balance_loss, count_choices


def gate(**overrides: Any) -> Gate:
    plain = {
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_groups": 1,
        "num_groups_per_token": 1,
        "scoring": RouterScoring.sigmoid,
        "normalize": True,
        "scaling_factor": 1.0,
        "balance_loss_weight": 1e-4,
        "force_balanced": False,
    }
    made = Gate(**{**plain, **overrides})
    if made.bias is not None:
        made.bias.zero_()
    return made


@st.composite
def routings(draw: st.DrawFn) -> tuple[Gate, Tensor]:
    """A gate of any shape with any bias, and logits for it."""
    groups = draw(st.integers(1, 4))
    in_group = draw(st.integers(2, 5))
    kept = draw(st.integers(1, groups))
    chosen = draw(st.integers(1, kept * in_group))
    scoring = draw(st.sampled_from(RouterScoring)) if groups == 1 else RouterScoring.sigmoid
    made = gate(
        num_experts=groups * in_group,
        num_experts_per_token=chosen,
        num_groups=groups,
        num_groups_per_token=kept,
        scoring=scoring,
        normalize=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
    )
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    if made.bias is not None:
        made.bias.normal_(0, draw(st.sampled_from([0.0, 0.1, 3.0])), generator=generator)
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 7)), groups * in_group
    return made, torch.randn(shape, generator=generator) * draw(st.sampled_from([0.01, 1.0, 10.0]))


@settings(max_examples=150, deadline=None)
@given(routings())
def test_every_token_gets_k_different_experts_from_few_enough_groups(case: tuple[Gate, Tensor]) -> None:
    made, logits = case
    routing = made(logits)
    for chosen in routing.expert.flatten(0, 1).tolist():
        assert len(set(chosen)) == made.num_chosen
        in_group = made.num_experts // made.num_groups
        assert len({expert // in_group for expert in chosen}) <= made.num_groups_kept
    assert routing.load.sum() == logits.shape[0] * logits.shape[1] * made.num_chosen
    assert torch.equal(routing.load, routing.expert.flatten().bincount(minlength=made.num_experts))


@settings(max_examples=150, deadline=None)
@given(routings())
def test_the_choice_is_that_of_a_literal_reading_of_the_paper(case: tuple[Gate, Tensor]) -> None:
    made, logits = case
    score = logits.softmax(-1) if made.scoring is RouterScoring.softmax else logits.sigmoid()
    biased = score if made.bias is None else score + made.bias
    in_group = made.num_experts // made.num_groups
    for token, chosen in zip(biased.flatten(0, 1).tolist(), made(logits).expert.flatten(0, 1).tolist(), strict=True):
        groups = [range(g * in_group, (g + 1) * in_group) for g in range(made.num_groups)]
        best = sorted(groups, key=lambda group: sum(sorted((token[e] for e in group), reverse=True)[:2]), reverse=True)
        candidates = [e for group in best[: made.num_groups_kept] for e in group]
        expected = sorted(candidates, key=lambda e: token[e], reverse=True)[: made.num_chosen]
        assert sorted(token[e] for e in chosen) == sorted(token[e] for e in expected)


@settings(max_examples=100, deadline=None)
@given(routings())
def test_weights_are_the_scores_of_the_chosen_and_sum_to_the_factor_when_normalised(case: tuple[Gate, Tensor]) -> None:
    made, logits = case
    routing = made(logits)
    score = logits.softmax(-1) if made.scoring is RouterScoring.softmax else logits.sigmoid()
    raw = score.gather(-1, routing.expert)
    if made.normalize:
        torch.testing.assert_close(routing.weight.sum(-1), torch.full(logits.shape[:2], made.scaling_factor))
        raw = raw / raw.sum(-1, keepdim=True)
    torch.testing.assert_close(routing.weight, raw * made.scaling_factor)


def test_the_bias_chooses_but_never_enters_the_weights() -> None:
    logits = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    made = gate(num_experts_per_token=8)  # everybody is chosen: only the weights can differ
    assert made.bias is not None
    without = made(logits)
    made.bias.copy_(torch.linspace(-2, 2, 8))
    by_expert = [r.weight.gather(-1, r.expert.argsort(-1)) for r in (made(logits), without)]
    torch.testing.assert_close(*by_expert)

    made = gate()
    assert made.bias is not None
    made.bias[3] = 10.0
    assert (made(logits).expert == 3).any(-1).all(), "a large bias draws every token"


def test_a_token_is_routed_the_same_in_any_company() -> None:
    made = gate(num_groups=4, num_groups_per_token=2)
    logits = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))
    together, alone = made(logits), made(logits[1:2, 4:5])
    assert torch.equal(together.expert[1, 4], alone.expert[0, 0])
    assert torch.equal(together.weight[1, 4], alone.weight[0, 0])


@settings(max_examples=30, deadline=None)
@given(routings())
def test_balance_loss_equals_the_literal_double_loop(case: tuple[Gate, Tensor]) -> None:
    made, logits = case
    score = logits.softmax(-1) if made.scoring is RouterScoring.softmax else logits.sigmoid()
    routing = made(logits)
    B, S, E = logits.shape
    total = 0.0
    for b in range(B):
        for i in range(E):
            f = E / (made.num_chosen * S) * sum(i in routing.expert[b, t].tolist() for t in range(S))
            P = sum((score[b, t, i] / score[b, t].sum()).item() for t in range(S)) / S
            total += f * P / B
    assert abs(routing.balance_loss.item() - 1e-4 * total) < 1e-9 + 1e-5 * 1e-4 * total


def test_balance_loss_is_one_at_balance_and_its_gradient_lowers_the_busy_expert() -> None:
    share = torch.full((2, 4, 8), 1 / 8, requires_grad=True)
    assert balance_loss(share, torch.ones(2, 8, dtype=torch.int64), 2) == 1.0
    count = count_choices(torch.tensor([[[0, 1]] * 4] * 2), 8)
    (grad,) = torch.autograd.grad(balance_loss(share, count, 2), share)
    assert (grad[..., :2] > grad[..., 2:].max()).all()


def test_forced_balance_gives_equal_loads_and_keeps_the_scores_as_weights() -> None:
    made = gate(force_balanced=True, num_experts_per_token=3)
    logits = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    routing = made(logits)
    assert routing.load.tolist() == [12] * 8
    raw = logits.sigmoid().gather(-1, routing.expert)
    torch.testing.assert_close(routing.weight, raw / raw.sum(-1, keepdim=True))
