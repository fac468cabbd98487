"""Statistics of casts into FP8: saturation, underflow and relative error.

For x and its FP8 copy x8 under a scale s, over all sampled casts of a tensor:

    saturated   share of the elements with |x s| > FORMAT_MAX: clipped, they come out too small
    underflown  share of the elements that were not 0 and are stored as 0
    error       ||x - x8 / s|| / ||x||: 0.03 is what E4M3 does to numbers well inside its range, 0.05 E5M2

A row of the result is a tensor, as in the scaling arena. A stack of experts' weights has an arena row per expert, but
one row here. Five sums a row are kept on the device. GPUs with FP8 compute them in one launch a cast
(`precision.kernels.cast_statistics`), others in plain PyTorch.
"""

import functools
import importlib.util
import re

import torch
from torch import Tensor

from precision import ScalingArena
from precision.formats import Format, fp8_values, spread
from precision.hardware import knows_fp8
from precision.proof import STATISTICS, refused
from trainer.launch.world import World
from trainer.parallel.collectives import all_sum

_AT_ONCE = 1 << 23  # elements per chunk
_BLOCK = 128
_ROUNDING = 1e-5  # slack for a scale that is known as its inverse
ELEMENTS, SATURATED, UNDERFLOWN, ERROR, NORM = range(5)


class Rows:
    """Rows of the arena in FP8, with each stack of experts as one row. names: in the arena's order. of: [N] int64, the
    row of each arena row; len(names) for rows that are only observed."""

    def __init__(self, arena: ScalingArena):
        scaled = arena.scaled.tolist()
        names = [re.sub(r":weight\.\d+$", ":weight", name) for name in arena.names]
        self.names = list(dict.fromkeys(name for name, is_fp8 in zip(names, scaled, strict=True) if is_fp8))
        index = {name: i for i, name in enumerate(self.names)}
        self._of = [index[n] if is_fp8 else len(self.names) for n, is_fp8 in zip(names, scaled, strict=True)]
        self.of = torch.tensor(self._of, dtype=torch.int64, device=arena.amax.device)

    def __len__(self) -> int:
        return len(self.names)

    def at(self, place: int) -> int | None:
        """Return the row of a slot's place in the arena, or None if that is not in FP8."""
        row = self._of[place]
        return row if row < len(self) else None

    def largest(self, of_arena: Tensor) -> Tensor:
        """Reduce [N] of the arena to the largest value of each row, [rows], at least 0."""
        return of_arena.new_zeros(len(self) + 1).scatter_reduce_(0, self.of, of_arena, "amax")[:-1]

    def smallest_positive(self, of_arena: Tensor) -> Tensor:
        """Reduce [N] of the arena to the smallest positive value of each row, [rows]; infinity if there is none."""
        usable = torch.where(of_arena > 0, of_arena, torch.inf)
        return of_arena.new_full((len(self) + 1,), torch.inf).scatter_reduce_(0, self.of, usable, "amin")[:-1]


class Casts:
    """Statistics of casts (an `observe.Observer`)."""

    def __init__(self, rows: Rows, device: torch.device):
        self._rows = rows
        self._parts = new_sums(len(rows), device=device)

    @torch.no_grad()
    def __call__(
        self, place: int, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format, live: Tensor | None = None
    ) -> None:
        """See `observe.Observer`."""
        row = self._rows.at(place)
        if row is not None and x.numel():
            add_cast_sums(self._parts[row], x, data, scale_inv, fmt, live)

    def forget(self) -> None:
        self._parts.zero_()

    def shares(self, world: World) -> dict[str, Tensor]:
        """Return saturated, underflown, error over all ranks, each [rows] FP64; NaN without a cast. A collective."""
        sums = all_sum([self._parts.sum(1)], world)[0]
        return {
            "saturated": sums[:, SATURATED] / sums[:, ELEMENTS],
            "underflown": sums[:, UNDERFLOWN] / sums[:, ELEMENTS],
            "error": (sums[:, ERROR] / sums[:, NORM]).sqrt(),
        }


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Return whether `precision.kernels.cast_statistics` runs here."""
    known = device.type == "cuda" and knows_fp8(device)
    return known and importlib.util.find_spec("triton") is not None and STATISTICS not in refused


def new_sums(*rows: int, device: torch.device) -> Tensor:
    """Return zeros [*rows, parts, 5] FP64 for `add_cast_sums`. Their sum over parts is what `cast_sums` returns."""
    if has_kernel(device):
        from precision.kernels import cast_statistics  # needs Triton

        return cast_statistics.new_sums(*rows, device=device)
    return torch.zeros(*rows, 1, 5, dtype=torch.float64, device=device)


def add_cast_sums(
    sums: Tensor, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format, live: Tensor | None = None
) -> None:
    """Add a cast's sums (`cast_sums`) to sums [parts, 5]. live [R], for a matrix: rows below 0 do not count."""
    if has_kernel(x.device):
        from precision.kernels.cast_statistics import add_cast_statistics

        add_cast_statistics(sums, x, data, scale_inv, fmt, live)
        return
    if live is not None:
        rows = (live >= 0).nonzero().flatten()
        x, data = x[rows], data.view(torch.uint8)[rows].view(data.dtype)
        scale_inv = scale_inv[rows] if scale_inv.dim() else scale_inv
    sums[0] += plain_cast_sums(x, data, scale_inv, fmt)


def cast_sums(x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format) -> Tensor:
    """Return [5] FP64: elements, saturated, underflown, squared error, squared norm of one cast.

    x, data [..., C]: the input (of a master weight its BF16) and its FP8 copy. scale_inv: [], one for each matrix of a
    stack, [..., 1], or blocks of 1 x 128 or 128 x 128.
    """
    sums = new_sums(device=x.device)
    add_cast_sums(sums, x, data, scale_inv, fmt)
    return sums.sum(0)


def plain_cast_sums(x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format) -> Tensor:
    """`cast_sums` in plain PyTorch."""
    if scale_inv.dim() == 1:
        scale_inv = scale_inv[:, None, None]
    blocks_of_rows = scale_inv.dim() == x.dim() and scale_inv.shape[0] not in (1, x.shape[0])
    each = max(1, _AT_ONCE // max(1, x[0].numel()))
    each = -(-each // _BLOCK) * _BLOCK if blocks_of_rows else each
    total = torch.zeros(5, dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[0], each):
        part, inv = slice(start, start + each), scale_inv
        if inv.dim() == x.dim() and inv.shape[0] > 1:
            inv = inv[start // _BLOCK : -(-(start + each) // _BLOCK)] if blocks_of_rows else inv[part]
        total += _sums(x[part], data[part], inv, fmt)
    return total


def _sums(x: Tensor, data: Tensor, inv: Tensor, fmt: Format) -> Tensor:
    if x.dtype == torch.float32:
        x = x.to(torch.bfloat16)  # of a master, the BF16 compute weight is cast
    wide, stored = x.float(), fp8_values(data).float()
    inv = spread(inv, *wide.shape)
    clipped = torch.count_nonzero(wide.abs() > inv * (fmt.max * (1 + _ROUNDING))).double()
    vanished = (torch.count_nonzero(wide) - torch.count_nonzero(stored)).double()  # zeros stay zeros
    norm, error = (_square(each) for each in (wide, torch.addcmul(wide, stored, inv, value=-1)))
    return torch.stack([torch.full_like(norm, wide.numel()), clipped, vanished, error, norm])


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()
