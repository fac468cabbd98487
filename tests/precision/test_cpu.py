"""Products on a CPU have FP32 sums, whichever instructions compute them."""

import math

import pytest
import torch
from torch import Tensor

from precision import cpu

SHAPES = [(1, 7, 1), (37, 13, 29), (128, 256, 128), (200, 2064, 96), (2064, 256, 512)]


def operands(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers that BF16 holds, with a mean, so that sums grow; in `dtype`."""
    (m, k, n), made = shape, torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=made).add_(1).bfloat16().to(dtype) for size in ((3, m, k), (3, k, n)))
    return a, b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_bf16_numbers_are_fp32(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    a, b = operands(shape, dtype)
    truth, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    for x, y in ((a, b), (a.mT.contiguous().mT, b), (a, b.mT.contiguous().mT)):
        for made, exact, sizes in (
            (cpu.multiply(x, y, torch.float32, True), truth, size),
            (cpu.multiply(x[0], y[0], torch.float32, True), truth[0], size[0]),
        ):
            assert made.dtype == torch.float32
            assert ((made - exact).abs() <= shape[1] * 2.0**-24 * sizes).all()  # any order of FP32 sums
    half = cpu.multiply(a, b, torch.bfloat16, True)
    assert ((half - truth).abs() <= 2.0**-8 * truth.abs() + shape[1] * 2.0**-24 * size).all()  # rounded once


def test_fp32_numbers_keep_their_bits() -> None:
    a, b = torch.tensor([[1 + 2.0**-20]]), torch.tensor([[1.0]])
    assert cpu.multiply(a, b, torch.float32, False).item() == 1 + 2.0**-20


def test_what_is_not_finite_stays_so() -> None:
    a, b = torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
    a[3, 5], a[9, 0] = math.nan, math.inf
    for out in (torch.float32, torch.bfloat16):
        made = cpu.multiply(a, b, out, True)
        assert made[3].isnan().all() and made[9].isinf().all()
        assert (made[[0, 63]] == 64).all()


def test_products_elsewhere_stay_fp32() -> None:
    """oneDNN's setting holds for one product, even one that fails."""
    a, b = operands((64, 64, 64), torch.float32)
    with pytest.raises(RuntimeError):
        cpu.multiply(a, b[:, :5], torch.float32, True)
    third = torch.full((64, 64), 1 / 3)
    assert torch.equal((third @ torch.eye(64)), third)
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # pyright: ignore[reportAttributeAccessIssue]


def test_compiled_products_are_the_same() -> None:
    a, b = operands((64, 96, 80), torch.float32)

    def product(x: Tensor, y: Tensor) -> Tensor:
        return cpu.multiply(x, y, torch.float32, True)

    assert torch.equal(torch.compile(product, backend="aot_eager", fullgraph=True)(a, b), product(a, b))
