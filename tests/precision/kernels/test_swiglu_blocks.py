"""SwiGLU's backward pass with BLOCK scales in one pass: bit for bit what SwiGLU in BF16 and two casts give."""

import pytest
import torch
from torch import Tensor

from precision.formats import E4M3, E5M2, Format

kernels = pytest.importorskip("precision.kernels.swiglu_blocks", reason="Triton is missing")
from precision.kernels.cast import cast_blocks  # noqa: E402
from precision.kernels.common import Cast  # noqa: E402
from precision.kernels.swiglu import swiglu_backward_rows  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def values(R: int, F: int) -> tuple[Tensor, Tensor]:
    """dh and [g, u] with rows of all sizes, a tiny one among them, a column of zeros and a row of zeros. (Nothing below
    the smallest normal number: there the interpreter rounds BF16 wrongly.)"""
    torch.manual_seed(R)
    size = torch.logspace(-3, 1, R)[:, None]
    size[R // 2] = 1e-15
    y, dh = torch.randn(R, 2 * F) * size, torch.randn(R, F) / size.clamp_min(1e-4)
    y[:, 5], dh[0] = 0, 0
    return dh.to(DEVICE, torch.bfloat16), y.to(DEVICE, torch.bfloat16)


def in_two_passes(
    dh: Tensor, y: Tensor, weight: Tensor | None, ends: Tensor | None, amax: Tensor, how: Cast, how_h: Cast
) -> tuple[Tensor, ...]:
    d, h, _, dw = swiglu_backward_rows(dh, y, weight, ends, None, amax, None, None)
    d8, inv, dt, inv_t = cast_blocks(d, amax, how, rows=True, transposed=True, ends=ends)
    unseen = torch.zeros((), device=dh.device)
    _, _, ht, inv_h = cast_blocks(h, unseen, how_h, rows=False, transposed=True, again=True, ends=ends)
    assert dt is not None and inv_t is not None and ht is not None and inv_h is not None
    return d8, inv, dt, inv_t, ht, inv_h, dw


def compare(
    dh: Tensor, y: Tensor, weight: Tensor | None, ends: Tensor | None, how: Cast, how_h: Cast, live: int
) -> None:
    """live: rows that exist, in tiles of 128 in the transposed copies."""
    amax, other = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    ours = kernels.swiglu_backward_blocks(dh, y, weight, ends, amax, how, how_h)
    theirs = in_two_passes(dh, y, weight, ends, other, how, how_h)
    columns = -(-live // 128) * 128
    for i, what in enumerate(("d", "inv", "dt", "inv_t", "ht", "inv_h")):
        one, two = (t[i].view(torch.uint8) if t[i].element_size() == 1 else t[i] for t in (ours, theirs))
        assert one.shape == two.shape and one.dtype == two.dtype
        if what in ("dt", "ht"):
            one, two = one[:, :columns], two[:, :columns]
        else:
            rows = live if what in ("d", "inv") else columns // 128
            one, two = one[:rows], two[:rows]
        wrong = one != two
        assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()}, first {wrong.nonzero()[0].tolist()}"
    assert torch.equal(amax.nan_to_num(-1), other.nan_to_num(-1))
    if weight is not None:
        torch.testing.assert_close(ours[6].sum(0)[:live], theirs[6][0, :live], rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize(("R", "F"), [(1, 128), (37, 128), (130, 256), (256, 384)])
def test_plain_rows(fmt: Format, power_of_two: bool, R: int, F: int) -> None:
    dh, y = values(R, F)
    how, how_h = (Cast(one, 3, False, 0, power_of_two) for one in (fmt, E4M3))
    compare(dh, y, None, None, how, how_h, R)


@pytest.mark.parametrize("margin", [0, 1])
def test_rows_of_experts(margin: int) -> None:
    """Padding, an expert without rows, and rows beyond the last expert's, which hold anything."""
    dh, y = values(512, 128)
    dh[384:], y[384:] = float("nan"), float("nan")
    weight = torch.rand(512).to(DEVICE)
    weight[100:128], weight[300:] = 0, 0
    y[100:128], y[300:384], dh[100:128], dh[300:384] = 0, 0, 0, 0
    ends = torch.tensor([128, 128, 384], dtype=torch.int32, device=DEVICE)
    how = Cast(E4M3, 3, False, margin, True)
    compare(dh, y, weight, ends, how, how, 384)


def test_a_nan_is_seen() -> None:
    dh, y = values(130, 128)
    dh[3, 7] = float("nan")
    how = Cast(E4M3, 3, False, 0, True)
    compare(dh, y, None, None, how, how, 130)
    amax = torch.zeros((), device=DEVICE)
    kernels.swiglu_backward_blocks(dh, y, None, None, amax, how, how)
    assert amax.isnan()
