"""The reference's grouped products on a GPU: what torch's grouped GEMM does not take is multiplied group by group."""

import pytest
import torch

from precision.backends import products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inner", [64, 20])
@pytest.mark.parametrize("sizes", [(5, 0, 131, 1), (0, 0, 7, 0), (137, 0, 0, 0)])
def test_grouped_products(dtype: torch.dtype, inner: int, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    offsets = torch.tensor(sizes, device="cuda").cumsum(0).int()
    a, b = (torch.randn(sum(sizes), width, device="cuda", dtype=dtype) for width in (inner, 32))
    w = torch.randn(len(sizes), 32, inner, device="cuda", dtype=dtype)
    y, dw = products.matmul(a, w.mT, offsets, dtype), products.matmul_over_rows(b, a, offsets, dtype)
    start = 0
    for g, size in enumerate(sizes):
        rows = slice(start, start := start + size)
        error = 2e-2 if dtype == torch.bfloat16 else 1e-3
        want_y = a[rows].double() @ w[g].double().t()
        want_dw = b[rows].double().t() @ a[rows].double()
        torch.testing.assert_close(y[rows].double(), want_y, rtol=error, atol=error)
        torch.testing.assert_close(dw[g].double(), want_dw, rtol=error, atol=error)
