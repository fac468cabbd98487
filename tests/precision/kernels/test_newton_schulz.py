"""The products of the Newton-Schulz iteration, in Triton's interpreter: those of plain PyTorch, in any shape."""

from typing import Any

import pytest
import torch
from torch import Tensor

newton_schulz = pytest.importorskip("precision.kernels.newton_schulz", reason="Triton is missing")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU: tests/gpu/test_muon.py")
BF16_ROUNDING, FP32_SUM = 2.0**-8, 1e-5
CUTS = [newton_schulz.Cut(rows, columns, 32) for rows, columns in ((32, 32), (32, 64), (64, 32))]
SHAPES = [(1, 64, 64), (2, 96, 160), (3, 40, 104), (2, 17 * 8, 72)]  # whole tiles, and not


def draw(*shape: int, mean: float = 0.0) -> Tensor:
    """mean: what coherent rows have; sums of one sign."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) + mean).bfloat16()


def check(ours: Tensor, exact: Tensor, terms: Tensor) -> None:
    """Rounded once, to BF16, after sums in FP32 of `terms` in size."""
    assert ((ours.double() - exact).abs() <= BF16_ROUNDING * exact.abs() + FP32_SUM * terms).all()


@pytest.mark.parametrize(("mean", "cut"), list(zip([0.0, 1.0, 1.0], CUTS, strict=True)), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(cut: Any, shape: tuple[int, int, int], mean: float) -> None:
    (k, m, _), x = shape, draw(*shape, mean=mean)
    factors = torch.linspace(0.5, 2.0, k)
    wide, f = x.double(), factors.double()[:, None, None]
    gram = torch.full((k, m, m), torch.nan, dtype=torch.bfloat16)
    newton_schulz.product(x, x, gram, None, factors, 1.0, 0.0, True, cut)
    check(gram, f * wide @ wide.mT, f * wide.abs() @ wide.mT.abs())
    assert torch.equal(gram, gram.mT)
    s, polynomial = gram.double(), torch.full_like(gram, torch.nan)
    newton_schulz.product(gram, gram, polynomial, gram, factors, 0.5, -2.0, True, cut)
    check(polynomial, f * (0.5 * s @ s - 2 * s), f * (s.abs() @ s.abs() + 2 * s.abs()))
    assert torch.equal(polynomial, polynomial.mT)
    out = torch.full_like(x, torch.nan)
    newton_schulz.product(gram, x, out, x, factors, 1.0, 3.0, False, cut)
    check(out, f * (s @ wide + 3 * wide), f * (s.abs() @ wide.abs() + 3 * wide.abs()))


@pytest.mark.parametrize("cut", CUTS[:1], ids=str)
def test_the_iteration_is_that_of_plain_products(cut: Any) -> None:
    """From matrices of any size; zeros stay zeros."""
    x = torch.cat([draw(1, 40, 72) * 2.0**-30, draw(1, 40, 72) * 1e3, torch.zeros(1, 40, 72).bfloat16()])
    factors = 1 / (x.double().norm(dim=(-2, -1)) + 1e-15)
    triples = [(3.4445, -4.7750, 2.0315)] * 5
    exact = x.double() * factors[:, None, None]
    for a, b, c in triples:
        gram = exact @ exact.mT
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    ours = newton_schulz.iterate(x.clone(), factors.float(), triples, cut).double()
    assert (ours[:2] - exact[:2]).norm() < 0.05 * exact[:2].norm() and not ours[2].any()


@pytest.mark.parametrize(("height", "width"), [(128, 256), (128, 128), (256, 128)])
@pytest.mark.parametrize("size", [128, 384, 1408, 2000])
def test_tiles_of_a_triangle_and_their_mirror_images_are_all_of_it(size: int, height: int, width: int) -> None:
    """Once each, but for tiles on the diagonal, which hold their own mirror images."""
    seen = torch.zeros(size, size, dtype=torch.int)
    table = newton_schulz.tile_table(size, size, height, width, True, torch.device("cpu"))
    for packed in table.tolist():
        m, n = (packed & 0xFFFF) * height, (packed >> 16) * width
        seen[m : m + height, n : n + width] += 1
        if m >= n + width:
            seen[n : n + width, m : m + height] += 1
    assert (seen == 1).all()
