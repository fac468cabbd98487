"""Newton-Schulz against the singular value decomposition in FP64."""

import pytest
import torch
from torch import Tensor

from trainer.config import Coefficients
from trainer.optim.orthogonalise import FEWEST, flops, orthogonalise, polynomials

SHAPES = [(24, 40), (40, 24), (32, 32)]
BF16_ROUNDING = 2.0**-8


def gaussian(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def ill_conditioned(rows: int, columns: int, condition: float) -> Tensor:
    left, _, right = torch.linalg.svd(gaussian(2, rows, columns).double(), full_matrices=False)
    return ((left * torch.logspace(0, -torch.tensor(condition).log10().item(), left.shape[-1])) @ right).float()


def polynomial_of(u: Tensor, kind: Coefficients, steps: int | None = None) -> Tensor:
    """U p(S) V^T, FP64: what the iteration computes without rounding."""
    left, singular, right = torch.linalg.svd(u.double(), full_matrices=False)
    s = singular / singular.norm(dim=-1, keepdim=True)
    for a, b, c in polynomials(kind, steps):
        s = a * s + b * s**3 + c * s**5
    return (left * s[..., None, :]) @ right


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("kind", Coefficients)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_polynomial_of_the_singular_values(kind: Coefficients, shape: tuple[int, int]) -> None:
    """The largest derivative at 0 multiplies a rounding error: the product of all a, 3.4^10 at most."""
    for u in (gaussian(2, *shape), ill_conditioned(*shape, 1e3)):
        ours = orthogonalise(u, polynomials(kind), torch.float32)
        assert relative(ours, polynomial_of(u, kind)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_converging_ones_reach_the_orthogonal_factor(dtype: torch.dtype) -> None:
    """The bands hold for well conditioned matrices; square Gaussian ones have singular values near 0."""
    u = ill_conditioned(24, 40, 10.0)
    left, _, right = torch.linalg.svd(u.double(), full_matrices=False)
    for kind in (Coefficients.deepseek_v4, Coefficients.polar_express):
        o = orthogonalise(u, polynomials(kind), dtype)
        band = 1e-2 + (2 * 24**0.5 * BF16_ROUNDING if dtype is torch.bfloat16 else 0.0)
        singular = torch.linalg.svdvals(o.double())
        assert 1 - band < singular.min() and singular.max() < 1 + band
        assert relative(o, left @ right) < 5 * band


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_transposition_and_company_change_nothing(shape: tuple[int, int], dtype: torch.dtype) -> None:
    u, triples = gaussian(3, *shape), polynomials(Coefficients.quintic)
    o = orthogonalise(u, triples, dtype)
    for power in (-20, 20):
        assert torch.equal(orthogonalise(u * 2.0**power, triples, dtype), o)
    if shape[0] != shape[1]:
        assert torch.equal(orthogonalise(u.mT, triples, dtype).mT, o)
    torch.testing.assert_close(orthogonalise(u[1:2], triples, dtype), o[1:2])


def test_zeros_stay_zeros_and_a_single_direction_is_finite() -> None:
    triples = polynomials(Coefficients.quintic)
    assert not orthogonalise(torch.zeros(1, 8, 12), triples, torch.bfloat16).any()
    rank_one = torch.outer(torch.arange(1.0, 9), torch.ones(12))[None]
    assert orthogonalise(rank_one, triples, torch.bfloat16).isfinite().all()


def test_steps_are_those_asked_for() -> None:
    assert [len(polynomials(kind)) for kind in Coefficients] == [5, 10, 8]
    assert [len(polynomials(kind, FEWEST[kind])) for kind in Coefficients] == list(FEWEST.values())
    assert polynomials(Coefficients.deepseek_v4, 4)[1:] == [
        *polynomials(Coefficients.quintic, 1),
        *polynomials(Coefficients.deepseek_v4)[-2:],
    ]
    express = polynomials(Coefficients.polar_express, 12)
    assert len(express) == 12 and express[-1] == (1.875, -1.25, 0.375)
    assert flops(2, 3, 1) == flops(3, 2, 1) == 2 * (2 * 2 * 3) + 2 * 2**3 + 2 * 2 * 2 * 3
