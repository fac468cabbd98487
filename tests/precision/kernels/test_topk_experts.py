"""The kernel that chooses experts takes those that plain top-k takes, whatever the shape."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is missing")

from precision.kernels.topk_experts import choose
from precision.topk_experts import plain_choice

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [  # tokens, experts, chosen, groups, groups kept
    (1, 2, 1, 1, 1), (7, 8, 2, 1, 1), (130, 8, 8, 1, 1), (33, 64, 6, 1, 1), (5, 6, 3, 3, 2), (70, 10, 4, 5, 2),
    (64, 32, 4, 4, 2), (19, 72, 5, 9, 3), (40, 256, 8, 8, 4), (3, 384, 8, 1, 1), (0, 8, 2, 2, 1),
]  # fmt: skip


def scores(tokens: int, experts: int) -> tuple[Tensor, Tensor]:
    """No two of a token's are equal, nor the sums of two groups': not with these seeds."""
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    score, bias = torch.rand(tokens, experts, generator=generator), torch.randn(experts, generator=generator) / 8
    return score.to(DEVICE), bias.to(DEVICE)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_choice_is_that_of_plain_ops(shape: tuple[int, int, int, int, int], biased: bool) -> None:
    tokens, experts, *rest = shape
    score, bias = scores(tokens, experts)
    given = score, bias if biased else None, *rest
    ours = choose(*given)
    assert ours.dtype == torch.int64
    assert torch.equal(ours, plain_choice(*given))


@pytest.mark.parametrize("groups", [1, 4])
def test_of_equal_scores_each_expert_is_taken_at_most_once(groups: int) -> None:
    chosen = choose(torch.full((50, 16), 0.5, device=DEVICE), None, 4, groups, 1)
    assert torch.equal(chosen, torch.arange(4, device=DEVICE).expand(50, 4)), "the first ones"


@pytest.mark.parametrize("groups", [1, 4])
def test_a_nan_counts_as_the_largest(groups: int) -> None:
    """The step will be skipped; until then nothing may reach beyond the experts."""
    score, bias = scores(20, 12)
    score[:, 7] = torch.nan
    score[3] = torch.nan
    chosen = choose(score, bias, 3, groups, max(1, groups - 1))
    assert (chosen == 7)[torch.arange(20, device=DEVICE) != 3].any(-1).all()
    assert ((chosen >= 0) & (chosen < 12)).all()
    assert all(len(set(row)) == 3 for row in chosen.tolist())
