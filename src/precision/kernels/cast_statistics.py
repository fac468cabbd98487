"""Statistics of a cast into FP8, in one pass over its input and output: 3 or 5 bytes per element.

It computes the number of saturated and of vanished elements, the squared error and the squared norm, of x and its FP8
under scales of any kind. A program processes tiles of 32 rows x 128 columns, each within one block of scales along its
columns. Rows may have any stride, so that every k-th row of a matrix needs no copy, and some rows may be excluded. Sums
are FP32 (counts: integers) inside a tile and FP64 over tiles. Each program adds to its own sums in memory. So several
casts of one tensor are accumulated by several launches, nothing is locked, and equal casts give equal bits. The
reference, and the meaning of the numbers: `trainer.health.casts`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.formats import Format
from precision.kernels.common import TRITON_FP8, abs_bits, as_bf16, as_bytes, cdiv

PROGRAMS = 660
"""Maximum number of programs per cast: five for each multiprocessor of a Hopper GPU, all resident at once."""
_ROUNDING = 1e-5  # rounding of a scale that is known by its inverse
_BLOCK = 128  # rows or columns that share a scale
_ROWS, _COLUMNS = 32, _BLOCK


@triton.jit(do_not_specialize=["R", "across", "tiles", "total", "stride_g", "stride_r", "stride_c"])
def _cast_statistics_kernel(
    x, x8, inv, live, sums, R, C, x_g, x_r, x8_g, x8_r, across, tiles, total, stride_g, stride_r, stride_c,
    F8: tl.constexpr, LIMIT: tl.constexpr, MASTER: tl.constexpr, SHARE: tl.constexpr, LIVE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the statistics of x, x8 [G, R, C], columns adjacent, in sums [programs, 5].

    Scales are looked up by strides, one for SHARE rows and COLUMNS columns, or for all (stride 0). across: tiles per
    row of tiles; tiles: per matrix; total: in all. MASTER: x is rounded to BF16 first. LIVE: rows r of the one matrix
    with live[r] < 0 do not count.
    """
    program = tl.program_id(0)
    elements = tl.zeros((1,), tl.float64)
    saturated = tl.zeros((1,), tl.float64)
    vanished = tl.zeros((1,), tl.float64)
    error = tl.zeros((1,), tl.float64)
    norm = tl.zeros((1,), tl.float64)
    tile = program
    while tile < total:
        g = (tile // tiles).to(tl.int64)
        r = (tile % tiles // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = tile % tiles % across
        # 16 bytes of x at a time: by default each thread would read 16 bytes of x8, and of x with gaps
        c = tl.max_contiguous(column * COLUMNS + tl.arange(0, COLUMNS), 4 if MASTER else 8)
        counts = r < R
        if LIVE:
            counts = counts & (tl.load(live + r, mask=counts, other=-1) >= 0)
        inside = counts[:, None] & (c < C)[None, :]
        at = x + g * x_g + r[:, None] * x_r + c[None, :]
        v = tl.load(at, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32)
        at = x8 + g * x8_g + r[:, None] * x8_r + c[None, :]
        bits = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
        lookup = inv + g * stride_g + r // SHARE * stride_r + column.to(tl.int64) * stride_c
        scale = tl.load(lookup, mask=counts, other=1)
        if MASTER:
            v = as_bf16(v)
        size = abs_bits(v).to(tl.float32, bitcast=True)
        off = v - bits.to(F8, bitcast=True).to(tl.float32) * scale[:, None]
        clipped = (size > (scale * LIMIT)[:, None]).to(tl.int32)
        gone = (((bits & 0x7F) == 0) & (size != 0)).to(tl.int32)
        both = tl.sum(clipped + (gone << 16))  # a tile has 2^12 elements
        elements += (tl.sum(counts.to(tl.int32)) * tl.minimum(C - column * COLUMNS, COLUMNS)).to(tl.float64)
        saturated += (both & 0xFFFF).to(tl.float64)
        vanished += (both >> 16).to(tl.float64)
        error += tl.sum(off * off).to(tl.float64)
        norm += tl.sum(v * v).to(tl.float64)
        tile += tl.num_programs(0)
    to = sums + program * 5 + tl.arange(0, 1)
    tl.store(to, tl.load(to) + elements)
    tl.store(to + 1, tl.load(to + 1) + saturated)
    tl.store(to + 2, tl.load(to + 2) + vanished)
    tl.store(to + 3, tl.load(to + 3) + error)
    tl.store(to + 4, tl.load(to + 4) + norm)


def new_sums(*shape: int, device: torch.device) -> Tensor:
    """Allocate zero sums of a shape of tensors, [*shape, PROGRAMS, 5]."""
    return torch.zeros(*shape, PROGRAMS, 5, dtype=torch.float64, device=device)


def add_cast_statistics(
    sums: Tensor, x: Tensor, data: Tensor, scale_inv: Tensor, fmt: Format, live: Tensor | None = None
) -> None:
    """Add a cast's statistics to sums [PROGRAMS, 5] FP64, contiguous: elements, saturated, underflown, squared error,
    squared norm. The sum over programs is the result.

    x, data [..., C]: the cast's input, BF16 or a master in FP32, and its output. scale_inv: [], [G] of a stack,
    [..., 1], or for blocks of 1 x 128 or 128 x 128, [..., C / 128]; any strides. live [R] int32, of a matrix: rows
    below 0 do not count.
    """
    if not x.numel():
        return
    C = x.shape[-1]
    R, stacked = (x.shape[-2], x.dim() == 3) if x.dim() > 1 else (1, False)
    share, strides = 1, (0, 0, 0)
    if scale_inv.numel() > 1:
        if scale_inv.dim() == 1:
            assert stacked and len(scale_inv) == x.shape[0]
            strides = scale_inv.stride(0), 0, 0
        else:
            if x.dim() > 3:
                scale_inv, R, stacked = scale_inv.reshape(-1, scale_inv.shape[-1]), x.numel() // C, False
            G, rows, columns = (scale_inv if stacked else scale_inv[None]).shape
            assert (G in (1, x.shape[0]) if stacked else G == 1) and columns in (1, -(-C // _BLOCK))
            assert rows in (1, R, -(-R // _BLOCK))
            share = 1 if rows == R else _BLOCK
            each = (scale_inv if stacked else scale_inv[None]).stride()
            strides = tuple(0 if n == 1 else stride for n, stride in zip((G, rows, columns), each, strict=True))
    elif x.dim() != 3:
        R = x.numel() // C
    across = cdiv(C, _COLUMNS)
    tiles = cdiv(R, _ROWS) * across
    total = x.numel() // (R * C) * tiles
    (x, *x_strides), (data, *data_strides) = (_rows(t, R) for t in (x, as_bytes(data)))
    _cast_statistics_kernel[(min(total, PROGRAMS),)](
        x, data, scale_inv, sums if live is None else live.contiguous(), sums, R, C, *x_strides, *data_strides, across,
        tiles, total, *strides, TRITON_FP8[fmt.dtype], fmt.max * (1 + _ROUNDING), x.dtype == torch.float32, share,
        live is not None, _ROWS, _COLUMNS,
        num_warps=4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip


def _rows(x: Tensor, R: int) -> tuple[Tensor, int, int]:
    """Return x [..., C] viewed as [G, R, C], and its first two strides."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, 0, x.stride(0)
    return x.contiguous(), R * x.shape[-1], x.shape[-1]
