"""Casts of several tiles of rows, and with a margin (the self-test has others: `precision.selftest`)."""

import pytest
import torch
from torch import Tensor

from precision.formats import E4M3, E5M2, Format, read_back, saturating_cast

kernels = pytest.importorskip("precision.kernels.cast", reason="Triton is missing")
from precision.kernels.common import Cast  # noqa: E402
from precision.selftest.twins import TILES, cast_in_tiles, same  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENSOR, ROW, BLOCK = 1, 2, 3
SHAPES = [(130, 272), (512, 512), (1000, 768)][: None if DEVICE == "cuda" else 1]


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


@pytest.mark.parametrize("mode", [TENSOR, ROW, BLOCK])
def test_a_margin_does_not_overflow(mode: int) -> None:
    x, how = values(3, 16, torch.float32), Cast(E5M2, mode, False, 2, mode == ROW)
    x *= 3e38 / x.abs().max()
    data, inv, _, _ = kernels.cast(x, torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE), how)
    want, want_inv = cast_in_tiles(x, how, *TILES[mode])
    same(data, want, "rows")
    assert float(want.float().abs().max()) > E5M2.max / 16 and float(inv.max()) == float(want_inv.max())
