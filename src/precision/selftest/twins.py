"""Plain PyTorch references for kernels that have none elsewhere, and the comparison of results."""

import torch.nn.functional as F
from torch import Tensor

from precision.formats import saturating_cast
from precision.kernels.common import Cast
from precision.kernels.route import Route
from precision.scaling import scale_from_amax

BF16_ROUNDING = 2.0**-8
"""Largest relative error of a number rounded to BF16."""
BF16_STEP = 2.0**-7
"""The same for a number truncated to BF16, as Triton's interpreter stores it."""
FP32_SUM = 2.0**-16
"""Relative error that an FP32 sum stays below and a BF16 sum exceeds: half-way between their roundings."""
FP8_ROUNDING = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
"""Largest relative error of a normal number rounded to FP8."""
TILES = {1: (0, 0), 2: (1, 0), 3: (1, 128)}
"""Rows and columns of an activation that share a scale, by mode; 0: all."""
WEIGHT_TILES = {1: (0, 0), 2: (1, 0), 3: (128, 128)}


class Mismatch(Exception):
    """A kernel and its reference differ: what, where, by how much."""


def same(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Raise Mismatch unless both hold the same numbers; FP8 too."""
    if ours.shape != theirs.shape:
        raise Mismatch(f"{what}: shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    wrong = ours.float() != theirs.float()
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        raise Mismatch(f"{what}: {int(wrong.sum())} of {wrong.numel()} numbers differ, the first at {first}")


def near(ours: Tensor, exact: Tensor, bound: float, what: str) -> None:
    """Raise Mismatch unless the relative error in norm is at most `bound`."""
    if ours.shape != exact.shape:
        raise Mismatch(f"{what}: shape {tuple(ours.shape)} instead of {tuple(exact.shape)}")
    error = (ours.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300)
    if not bool(error <= bound):  # NaN fails
        raise Mismatch(f"{what}: relative error {float(error):.1e}, at most {bound:.1e} expected")


def cast_in_tiles(x: Tensor, how: Cast, rows: int, columns: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return FP8 of x [R, C] with one scale per `rows` x `columns` (0: all), and the inverse scale of each number.
    scale: a known one for all instead."""
    (R, C), one = x.shape, scale
    if one is None:
        r, c = rows or R, columns or C
        padded = F.pad(x.float(), (0, -C % c, 0, -R % r)).abs()
        amax = padded.view(padded.shape[0] // max(r, 1), r, padded.shape[1] // c, c).amax((1, 3))
        made = scale_from_amax(amax, how.fmt.max, how.margin, how.power_of_two)
        one = made.repeat_interleave(r, 0)[:R].repeat_interleave(c, 1)[:, :C]
    one = one.expand(R, C)
    return saturating_cast(x, one, how.fmt), one.reciprocal()


def experts_rows(to: Route) -> list[slice]:
    """Return the rows of each expert, padding included."""
    return [slice(a, b) for a, b in zip(to.starts.tolist(), to.ends.tolist(), strict=True)]
