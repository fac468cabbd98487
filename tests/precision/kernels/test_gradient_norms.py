"""The norms of gradients, in Triton's interpreter, are those of float64, in one pass over whatever lies wherever."""

import math

import pytest
import torch

norms = pytest.importorskip("precision.kernels.gradient_norms", reason="Triton is missing")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU: tests/gpu/test_adamw.py")
SHAPES = [(1,), (64,), (37,), (8, 16), (0, 5), (50, 100), (3, 64)]  # chunks of 64


def test_norms_are_those_of_float64() -> None:
    """Missing ones, at odd addresses, not contiguous, empty; and where they have moved."""
    kernel = norms.GradientNorms([math.prod(shape) for shape in SHAPES], torch.device("cpu"), block=64)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shape, generator=generator) * 10.0 ** (i - 3) for i, shape in enumerate(SHAPES)]
        gradients: list[torch.Tensor | None] = [*drawn]
        if seed == 1:
            gradients[3], gradients[5] = drawn[3].view(16, 8).t(), None
            gradients[2] = torch.cat([torch.zeros(1), drawn[2]])[1:]
        exact = torch.stack([torch.zeros(()) if g is None else g.double().norm() for g in gradients])
        torch.testing.assert_close(kernel(gradients), exact.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_number_is_seen_in_its_tensor_alone(bad: float) -> None:
    gradients = [torch.ones(100), torch.ones(200)]
    gradients[1][150] = bad
    ours = norms.GradientNorms([100, 200], torch.device("cpu"), block=64)(gradients)
    assert ours[0] == 10 and not ours[1].isfinite()
