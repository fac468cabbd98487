"""Grouped GEMMs, at sizes that are whole tiles (which the memory accelerator stores, also transposed) and others."""

import pytest
import torch
from torch import Tensor

grouped_gemm = pytest.importorskip("precision.kernels.grouped_gemm", reason="Triton is missing")
from precision.kernels.route import Route  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENSOR, ROW, BLOCK = 1, 2, 3
# those after the first have kernels of their own on Hopper; all are one in the interpreter
SIZES = [(144, 272), (128, 256), (256, 128), (128, 128), (128, 272)][: None if DEVICE == "cuda" else 1]
GROUPS = [(0, 128), (128, 128), (128, 384)]  # first and last row: the second expert has none


def groups(size: int = 512) -> Route:
    """Experts at GROUPS of `size` rows, the rest of which belong to no expert."""
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


def check_rows_by_weights(mode: int, N: int, K: int, to: Route) -> None:
    E, R = len(to.starts), len(to.token)
    a, b = fp8(R, K), fp8(E, N, K)
    blocks = -(-N // 128), -(-K // 128)
    a_inv = {TENSOR: scales(), ROW: scales(R, 1), BLOCK: scales(blocks[1], R).t()}[mode]
    b_inv = {TENSOR: scales(E), ROW: scales(E, N), BLOCK: scales(E, *blocks)}[mode]
    y = grouped_gemm.nt(a, a_inv, b, b_inv, mode, to)
    left = a.float() * a_inv if mode == ROW else wide(a, a_inv)
    for e, (first, last) in enumerate(zip(to.starts.tolist(), to.ends.tolist(), strict=True)):
        if mode == ROW:
            w = b[e].float() * b_inv[e, :, None]
        else:
            w = wide(b[e], b_inv[e].repeat_interleave(128, 0)[:N] if mode == BLOCK else b_inv[e])
        near(y[first:last], left[first:last] @ w.t(), 4e-3)


def check_weight_gradient(mode: int, out: torch.dtype, M: int, N: int, to: Route) -> None:
    R = len(to.token)
    a, b = fp8(M, R), fp8(N, R)
    a_inv, b_inv = (scales(R // 128, n) if mode == BLOCK else scales() for n in (M, N))
    d = grouped_gemm.wgrad(a, a_inv, b, b_inv, mode, to, out)
    assert d.shape == (len(to.starts), M, N) and d.dtype == out
    left, right = (wide(x, inv.t() if mode == BLOCK else inv) for x, inv in ((a, a_inv), (b, b_inv)))
    for e, (first, last) in enumerate(zip(to.starts.tolist(), to.ends.tolist(), strict=True)):
        near(d[e], left[:, first:last] @ right[:, first:last].t(), 1e-3 if out == torch.float32 else 4e-3)
    if out == torch.bfloat16:
        exact = grouped_gemm.wgrad(a, a_inv, b, b_inv, mode, to)
        assert torch.equal(d, exact.bfloat16()), "rounded once, to nearest"


@pytest.mark.parametrize("mode", [TENSOR, ROW, BLOCK])
@pytest.mark.parametrize(("N", "K"), [(272, 144), (256, 256), (384, 128), (64, 16)][: None if DEVICE == "cuda" else 1])
def test_rows_by_weights(mode: int, N: int, K: int) -> None:
    torch.manual_seed(N)
    check_rows_by_weights(mode, N, K, groups())


@pytest.mark.parametrize("mode", [TENSOR, BLOCK])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("M", "N"), SIZES)
def test_weight_gradient(mode: int, out: torch.dtype, M: int, N: int) -> None:
    torch.manual_seed(M)
    check_weight_gradient(mode, out, M, N, groups())


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter takes minutes for a GPU's worth of tiles")
@pytest.mark.parametrize("mode", [TENSOR, ROW, BLOCK])
def test_more_tiles_than_multiprocessors(mode: int) -> None:
    torch.manual_seed(0)
    tiles = torch.tensor([7, 0, 1, 15, 0, 14, 9, 8])
    ends = (tiles * 128).cumsum(0).int()
    none = torch.zeros(128 * 54, dtype=torch.int32)
    tile_expert = torch.arange(8).repeat_interleave(tiles).int()
    to = Route(*(x.to(DEVICE) for x in (none, none.float(), none, ends - 128 * tiles.int(), ends, tile_expert)))
    for N, K in ((1408, 1040), (2048, 1408), (2000, 272)):
        check_rows_by_weights(mode, N, K, to)
    for M, N in ((1408, 2048), (2048, 1408), (1400, 2000), (1408, 1408), (1408, 2000)):
        for out in (torch.float32, torch.bfloat16):
            if mode != ROW:
                check_weight_gradient(mode, out, M, N, to)
        check_bf16(M, N, to)


def check_bf16(N: int, K: int, to: Route) -> None:
    R, E = len(to.token), len(to.starts)
    x, dy = (torch.randn(R, n).bfloat16().to(DEVICE) for n in (K, N))
    w = torch.randn(E, N, K).bfloat16().to(DEVICE)
    y, dx = grouped_gemm.nt_bf16(x, w, to), grouped_gemm.nt_bf16(dy, w.mT, to)
    dw, rounded = grouped_gemm.wgrad_bf16(dy, x, to), grouped_gemm.wgrad_bf16(dy, x, to, torch.bfloat16)
    assert dw.dtype == torch.float32 and torch.equal(rounded, dw.bfloat16())
    for e, (first, last) in enumerate(zip(to.starts.tolist(), to.ends.tolist(), strict=True)):
        near(y[first:last], x[first:last].float() @ w[e].float().t(), 4e-3)
        near(dx[first:last], dy[first:last].float() @ w[e].float(), 4e-3)
        near(dw[e], dy[first:last].float().t() @ x[first:last].float(), 1e-5)


@pytest.mark.parametrize(("N", "K"), SIZES)
def test_bf16(N: int, K: int) -> None:
    torch.manual_seed(N)
    check_bf16(N, K, groups())
