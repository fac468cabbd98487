"""Casts, transpositions and weights: the same FP8 numbers as plain PyTorch, in both orders, at awkward sizes."""

import pytest
import torch
from torch import Tensor

from precision.formats import E4M3, E5M2, Format, read_back, saturating_cast
from precision.scaling import scale_from_amax

kernels = pytest.importorskip("precision.kernels.cast", reason="Triton is missing")
from precision.kernels.common import Cast  # noqa: E402
from precision.kernels.weights import cast_weight, transpose_weight  # noqa: E402
from precision.selftest.twins import TILES, WEIGHT_TILES, cast_in_tiles, same  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENSOR, ROW, BLOCK = 1, 2, 3
SHAPES = [(37, 144), (130, 272), (1, 16), (512, 512), (1000, 768)][: None if DEVICE == "cuda" else 3]


def values(R: int, C: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(R + C)
    return (torch.randn(R, C) * torch.logspace(-3, 3, R)[:, None]).to(DEVICE, dtype)


@pytest.mark.parametrize("mode", [TENSOR, ROW, BLOCK])
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize(("R", "C"), SHAPES)
def test_cast_and_transposed_copy(mode: int, fmt: Format, R: int, C: int) -> None:
    x, how = values(R, C), Cast(fmt, mode, False, 0, mode != TENSOR)
    amax, row = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    want, want_inv = cast_in_tiles(x, how, *TILES[mode])
    for transposed in (False, True):
        data, inv, data_t, inv_t = kernels.cast(x, row, amax, how, transposed)
        same(data, want, f"rows, transposed={transposed}")
        torch.testing.assert_close(read_back(data, inv), want.float() * want_inv, rtol=0, atol=0)
    assert amax == x.abs().max()
    assert data_t is not None and inv_t is not None
    if mode == TENSOR:
        same(data_t[:, :R].t(), want, "columns")
    elif mode == ROW:
        again = saturating_cast(want.float() * want_inv, want_inv.amax().reciprocal(), fmt)
        same(data_t[:, :R].t(), again, "columns")
    else:
        columns, columns_inv = cast_in_tiles(x, how, 128, 1)
        same(data_t[:, :R].t(), columns, "columns")
        torch.testing.assert_close(read_back(data_t.t(), inv_t)[:R], columns.float() * columns_inv, rtol=0, atol=0)
    assert (data_t[:, R:].float() == 0).all()
    kept, kept_inv = kernels.transpose(data, inv, how)
    if mode == BLOCK:
        columns, _ = cast_in_tiles(want.float() * want_inv, how, 128, 1)
        same(kept[:, :R].t(), columns, "columns of what was kept")
    else:
        same(kept[:, :R].t(), data_t[:, :R].t(), "columns of what was kept")
        assert kept_inv == inv_t


GATHERED = (144, 272, torch.bfloat16)  # as ranks send them to each other


@pytest.mark.parametrize("mode", [TENSOR, ROW, BLOCK])
@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize(("N", "K", "dtype"), [(*shape, torch.float32) for shape in SHAPES[1:]] + [GATHERED])
def test_weights(mode: int, stack: tuple[int, ...], N: int, K: int, dtype: torch.dtype) -> None:
    N = -(-N // 16) * 16
    w = values(N * (stack or (1,))[0], K, dtype).view(*stack, N, K)
    how = Cast(E4M3, mode, False, 0, mode != TENSOR)
    amax, row = (torch.zeros(stack, device=DEVICE) for _ in range(2))
    made = cast_weight(w, row, amax, how, None)
    for data, inv, data_t, inv_t in (made, cast_weight(w, row, amax, how, made)):
        for g in range((stack or (1,))[0]):
            exact = (w[g] if stack else w).bfloat16()

            def pick(t: Tensor, g: int = g) -> Tensor:
                return t[g] if stack else t

            assert pick(amax) == exact.abs().max()
            want, _ = cast_in_tiles(exact, how, *WEIGHT_TILES[mode])
            want_t, _ = cast_in_tiles(exact, how, *{TENSOR: (0, 0), ROW: (0, 1), BLOCK: (128, 128)}[mode])
            same(pick(data), want, f"w[{g}]")
            same(pick(data_t).t(), want_t, f"w[{g}]^T")
            if mode == BLOCK:
                assert torch.equal(pick(inv).t(), pick(inv_t))


@pytest.mark.parametrize("mode", [TENSOR, ROW, BLOCK])
def test_a_margin_does_not_overflow(mode: int) -> None:
    x, how = values(3, 16, torch.float32), Cast(E5M2, mode, False, 2, mode == ROW)
    x *= 3e38 / x.abs().max()
    data, inv, _, _ = kernels.cast(x, torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE), how)
    want, want_inv = cast_in_tiles(x, how, *TILES[mode])
    same(data, want, "rows")
    assert float(want.float().abs().max()) > E5M2.max / 16 and float(inv.max()) == float(want_inv.max())


@pytest.mark.parametrize("mode", [TENSOR, BLOCK])
@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize("delayed", [False, True])
def test_parts_of_a_weight_are_cast_as_the_whole(mode: int, stack: tuple[int, ...], delayed: bool) -> None:
    N, K, rows = 272, 144, 128 if mode == BLOCK else 107  # a part may have any number of rows
    w = values(N * (stack or (1,))[0], K, torch.float32).view(*stack, N, K)
    amax, row = torch.zeros(stack, device=DEVICE), torch.full(stack, 0.37 * delayed, device=DEVICE)
    whole = cast_weight(w, row, amax, Cast(E4M3, mode, delayed, 0, mode != TENSOR), None)
    under = Cast(E4M3, mode, True, 0, mode != TENSOR)
    given = row if delayed or mode == BLOCK else scale_from_amax(amax, E4M3.max, 0, False)
    seen = torch.zeros_like(amax)
    if stack:
        parts = [cast_weight(w[g], given[g], seen[g], under, None, transposed=False) for g in range(3)]
        data, inv = (torch.stack([part[i] for part in parts]) for i in range(2))
    else:
        parts = [cast_weight(part, given, seen, under, None, transposed=False) for part in w.split(rows)]
        data, inv = torch.cat([part[0] for part in parts]), parts[0][1]
        inv = torch.cat([part[1] for part in parts]) if mode == BLOCK else inv
    same(data, whole[0], "parts")
    assert torch.equal(inv, whole[1]) and torch.equal(seen, amax)
    same(transpose_weight(data, None), whole[2], "transposed")
    same(transpose_weight(data, torch.zeros_like(whole[2])), whole[2], "transposed in place")
