"""Grouped matrix products of the reference backend: each group's rows with a matrix of its own.

On a GPU, torch's grouped GEMM, with offsets that stay on the device. It takes BF16 in rows of 16 bytes; anything else
(an FP32 table) is multiplied group by group, which waits for the offsets to reach the host. On a CPU torch's multiplies
group by group too, and oneDNN generates code for each new number of rows, which costs more than the product itself: so
groups are multiplied in slices of few different sizes. These are opaque operators, so that compiled graphs compute the
same bits.

R rows, G groups; offsets [G] int32: where each group's rows end, the last is R.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

_ELEMENTS = 8  # of BF16 in 16 bytes
_grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]  (torch has no public name for it yet)


def matmul(a: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """a [R, K], w [G, K, N] -> [R, N]."""
    if _one_by_one(a, w):
        return _matmul_one_by_one(a, w, offsets)
    return _grouped_mm(a, w, offs=offsets)


def matmul_over_rows(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """a [R, N], b [R, K] -> a^T b of each group's rows, [G, N, K]."""
    if _one_by_one(a, b):
        return _matmul_over_rows_one_by_one(a, b, offsets)
    return _grouped_mm(a.t(), b, offs=offsets)


def _one_by_one(a: Tensor, b: Tensor) -> bool:
    """Whether torch's grouped GEMM does not take these, or is no better than multiplying group by group."""
    odd = a.shape[-1] % _ELEMENTS or b.shape[-1] % _ELEMENTS
    return a.device.type == "cpu" or a.dtype != torch.bfloat16 or bool(odd)


@torch.library.custom_op("octet::grouped_matmul", mutates_args=())
def _matmul_one_by_one(a: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    total, y = a.shape[0], a.new_empty(a.shape[0], w.shape[-1])
    for (start, stop), matrix in zip(_spans(offsets), w.unbind(), strict=True):
        size = min(_rounded(stop - start), total)  # rows of neighbours come along; their results are left out
        first = min(start, total - size)
        y[start:stop] = (a[first : first + size] @ matrix)[start - first : stop - first]
    return y


@_matmul_one_by_one.register_fake
def _(a: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], w.shape[-1])


@torch.library.custom_op("octet::grouped_matmul_over_rows", mutates_args=())
def _matmul_over_rows_one_by_one(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    y = a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])
    for group, (start, stop) in enumerate(_spans(offsets)):
        pad = 0, 0, 0, _rounded(stop - start) - (stop - start)
        torch.mm(F.pad(a[start:stop], pad).t(), F.pad(b[start:stop], pad), out=y[group])
    return y


@_matmul_over_rows_one_by_one.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    """First row and end of each group."""
    return list(pairwise([0, *offsets.tolist()]))


def _rounded(rows: int) -> int:
    """The next of few sizes: multiples of 16, and from 128 on eight steps between neighbouring powers of two."""
    step = max(16, 1 << max(rows - 1, 1).bit_length() - 4) if rows > 16 else 16
    return -(-rows // step) * step
