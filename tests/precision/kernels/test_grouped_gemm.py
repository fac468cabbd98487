"""Grouped GEMMs, at sizes that are whole tiles (which the memory accelerator stores, also transposed) and others."""

import pytest
import torch
from torch import Tensor

grouped_gemm = pytest.importorskip("precision.kernels.grouped_gemm", reason="Triton is missing")
from precision.kernels.route import Route  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENSOR, BLOCK = 1, 3
SIZES = [(144, 272), (128, 256), (256, 128), (128, 128)]
GROUPS = [(0, 128), (128, 128), (128, 384)]  # first and last row: the second expert has none


def groups(size: int = 512) -> Route:
    """Experts at GROUPS of `size` rows, the rest of which belong to nobody."""
    none = torch.zeros(size, dtype=torch.int32, device=DEVICE)
    starts, ends = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in zip(*GROUPS, strict=True))
    tile_expert = torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=DEVICE)
    return Route(none, none.float(), none[:, None], starts, ends, tile_expert)


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn).to(DEVICE)


def scales(*shape: int) -> Tensor:
    return (torch.rand(shape) + 0.5).to(DEVICE)


def wide(x: Tensor, inv: Tensor) -> Tensor:
    """x [A, B] FP8 times inv [A, B / 128], or times one scale."""
    return x.float() * (inv.repeat_interleave(128, 1)[:, : x.shape[1]] if inv.dim() else inv)


def near(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    assert torch.isfinite(ours.float()).all()
    assert (ours.float() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("mode", [TENSOR, BLOCK])
@pytest.mark.parametrize(("N", "K"), [(272, 144), (256, 256), (384, 128)])
def test_rows_by_weights(mode: int, N: int, K: int) -> None:
    torch.manual_seed(N)
    to, E, R = groups(), len(GROUPS), 512
    a, b = fp8(R, K), fp8(E, N, K)
    blocks = -(-N // 128), -(-K // 128)
    a_inv = scales(blocks[1], R).t() if mode == BLOCK else scales()
    b_inv = scales(E, *blocks) if mode == BLOCK else scales(E)
    y = grouped_gemm.nt(a, a_inv, b, b_inv, mode, to)
    for e, (first, last) in enumerate(GROUPS):
        x = wide(a[first:last], a_inv[first:last] if mode == BLOCK else a_inv)
        w = wide(b[e], b_inv[e].repeat_interleave(128, 0)[:N] if mode == BLOCK else b_inv[e])
        near(y[first:last], x @ w.t(), 4e-3)


@pytest.mark.parametrize("mode", [TENSOR, BLOCK])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("M", "N"), SIZES)
def test_weight_gradient(mode: int, out: torch.dtype, M: int, N: int) -> None:
    torch.manual_seed(M)
    to, R = groups(), 512
    a, b = fp8(M, R), fp8(N, R)
    a_inv, b_inv = (scales(R // 128, n) if mode == BLOCK else scales() for n in (M, N))
    d = grouped_gemm.wgrad(a, a_inv, b, b_inv, mode, to, out)
    assert d.shape == (len(GROUPS), M, N) and d.dtype == out
    left, right = (wide(x, inv.t() if mode == BLOCK else inv) for x, inv in ((a, a_inv), (b, b_inv)))
    for e, (first, last) in enumerate(GROUPS):
        near(d[e], left[:, first:last] @ right[:, first:last].t(), 1e-3 if out == torch.float32 else 4e-3)
    if out == torch.bfloat16:
        exact = grouped_gemm.wgrad(a, a_inv, b, b_inv, mode, to)
        assert torch.equal(d, exact.bfloat16()), "rounded once, to nearest"


@pytest.mark.parametrize(("M", "N"), SIZES)
def test_weight_gradient_of_bf16(M: int, N: int) -> None:
    torch.manual_seed(M)
    to = groups()
    a, b = (torch.randn(512, n).bfloat16().to(DEVICE) for n in (M, N))
    d, rounded = grouped_gemm.wgrad_bf16(a, b, to), grouped_gemm.wgrad_bf16(a, b, to, torch.bfloat16)
    assert d.dtype == torch.float32 and torch.equal(rounded, d.bfloat16())
    for e, (first, last) in enumerate(GROUPS):
        near(d[e], a[first:last].float().t() @ b[first:last].float(), 1e-5)
