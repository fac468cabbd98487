"""Casts into FP8, with the transposed copy that the weight gradient reads, and the transposition of FP8 data.

The tensor cores need both factors of a product contiguous along the sum. The weight gradient dy^T x sums over rows, so
it reads dy^T [N, R'] and x^T [K, R'], where R' is R rounded up to a multiple of 128 with zeros. dy is read once and
written twice; x is transposed in the backward pass, from the saved FP8 numbers.

Scales of the transposed copy must not vary along rows:

    TENSOR  as it is: one scale
    ROW     cast again under the largest scale of its rows (powers of two: exact but for underflow)
    BLOCK   tiles of 128 rows x 1 column: dy from the exact numbers, x from its FP8 numbers

Scales of 1 x 128 blocks are stored [C / 128, R] and those of 128 x 1 tiles [R' / 128, C]: contiguous along the reads of
a product's tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels import const
from precision.kernels.common import (
    STRIPS,
    Cast,
    abs_bits,
    amax_along,
    as_bits,
    as_bytes,
    as_words,
    byte,
    cdiv,
    inverse,
    inverse_of_row,
    is_known,
    padded_rows,
    power_of_2,
    row_warps,
    scale_of,
    settled,
    tensor_scale,
    to_fp8,
    unbyte,
)


@triton.jit
def _amax_kernel(x, scale_row, own, n, DELAYED: tl.constexpr, SIZE: tl.constexpr):
    """Write the amax into `own`, unless the scale is known."""
    if not is_known(scale_row, DELAYED):
        largest = tl.zeros((SIZE,), tl.int32)
        for part in range(tl.program_id(0), (n - 1) // SIZE + 1, tl.num_programs(0)):
            i = tl.cast(part, tl.int64) * SIZE + tl.arange(0, SIZE)
            largest = tl.maximum(largest, abs_bits(tl.load(x + i, mask=i < n, other=0).to(tl.float32)))
        tl.atomic_max(own, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _tensor_kernel(
    x, y, scale_row, own, amax, inv, n,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Cast elementwise under one scale."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    scale = tensor_scale(scale_row, own, LIMIT, HEADROOM, POW2, DELAYED)
    v = tl.load(x + i, mask=i < n, other=0).to(tl.float32)
    tl.store(y + i, to_fp8(v * scale, F8, LIMIT), mask=i < n)
    tl.atomic_max(amax, tl.max(abs_bits(v), 0), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(inv, inverse(scale))


@triton.jit(do_not_specialize=["R"])  # specialised for one row, it gave wrong results on the GPU
def _tensor_transposed_kernel(
    x, y, yt, scale_row, own, amax, inv, R, C, R4,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast x [R, C] into y [R, C] and y^T [C, 4 R4] (viewed as words), zeros beyond R."""
    r4 = tl.program_id(1) * (BR // 4) + tl.arange(0, BR // 4)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    scale = tensor_scale(scale_row, own, LIMIT, HEADROOM, POW2, DELAYED)
    largest = tl.zeros((BR // 4, BC), tl.int32)
    words = tl.zeros((BR // 4, BC), tl.int32)
    for i in tl.static_range(4):
        r = (r4 * 4 + i).to(tl.int64)
        inside = (r < R)[:, None] & (c < C)[None, :]
        v = tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0).to(tl.float32)
        largest = tl.maximum(largest, abs_bits(v))
        words |= byte(to_fp8(v * scale, F8, LIMIT), i)
    words = settled(words)
    for i in tl.static_range(4):
        r = (r4 * 4 + i).to(tl.int64)
        inside = (r < R)[:, None] & (c < C)[None, :]
        tl.store(y + r[:, None] * C + c[None, :], unbyte(words, i), mask=inside)
    tl.store(yt + c[:, None].to(tl.int64) * R4 + r4[None, :], tl.trans(words), mask=(c < C)[:, None])
    tl.atomic_max(amax, tl.max(largest), sem="relaxed")
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inv, inverse(scale))


@triton.jit(do_not_specialize=["R"])  # specialised for one row, it gave wrong results on the GPU
def _rows_kernel(
    x, y, amax, inv, R, C,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast whole rows in registers: amax and cast in one pass."""
    r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    c = tl.arange(0, BC)
    inside = (r < R)[:, None] & (c < C)[None, :]
    v = tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0).to(tl.float32)
    top = amax_along(v, 1)
    scale = scale_of(top, LIMIT, HEADROOM, POW2)
    tl.store(y + r[:, None] * C + c[None, :], to_fp8(v * scale[:, None], F8, LIMIT), mask=inside)
    tl.store(inv + r, inverse_of_row(scale, top), mask=r < R)
    tl.atomic_max(amax, tl.max(abs_bits(top)), sem="relaxed")


@triton.jit
def _source(token, r4, T, i: tl.constexpr, GATHER: tl.constexpr):
    """Return the rows of x for rows 4 r4 + i, and which of them exist."""
    t = r4 * 4 + i
    if GATHER:
        t = tl.load(token + t)
    return t.to(tl.int64), (t >= 0) & (t < T)


@triton.jit
def _read(x, token, r4, c, T, C, i: tl.constexpr, GATHER: tl.constexpr):
    """Load rows 4 r4 + i of 128 columns, unconverted."""
    t, live = _source(token, r4, T, i, GATHER)
    return tl.load(x + t[:, None] * C + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0)


@triton.jit
def _parts(x, token, r4, c, T, C, GATHER: tl.constexpr):
    """Load a tile of 128 x 128 in four parts. All loads are issued before the first part is used, so that their
    latencies overlap."""
    return (
        _read(x, token, r4, c, T, C, 0, GATHER), _read(x, token, r4, c, T, C, 1, GATHER),
        _read(x, token, r4, c, T, C, 2, GATHER), _read(x, token, r4, c, T, C, 3, GATHER),
    )  # fmt: skip


@triton.jit
def _block_part(
    read,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Cast 32 rows of 128 columns: return FP8 under the rows' scales, these scales, the rows' amaxes, and the numbers
    that the transposed copy is cast from."""
    v = read.to(tl.float32)
    top = amax_along(v, 1)
    scale = scale_of(top, LIMIT, HEADROOM, POW2)
    x8 = to_fp8(v * scale[:, None], F8, LIMIT)
    if AGAIN:
        v = x8.to(tl.float32) * inverse(scale, POW2)[:, None]
    return x8, scale, top, v


@triton.jit
def cast_tile(
    parts, y, yt, amax, inv, inv_t, row, column, R, C, R4,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr,
    ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Cast a tile of 128 x 128, the tile (row, column) of [R, C]: into y in 1 x 128 blocks, into y^T in tiles of 128
    rows x 1 column.

    parts: part i has its rows 4 j + i; they stay in registers until the columns' scales are known. AGAIN: y^T is cast
    from y's numbers, else from the parts. amax: None, or raised.
    """
    r4 = row * 32 + tl.arange(0, 32)
    c = column * 128 + tl.arange(0, 128)
    columns = tl.zeros((32, 128), tl.int32)
    rows = tl.zeros((32,), tl.int32)
    for i in tl.static_range(4):
        x8, scale, top, v = _block_part(parts[i], F8, LIMIT, HEADROOM, POW2, AGAIN)
        rows = tl.maximum(rows, abs_bits(top))
        columns = tl.maximum(columns, abs_bits(v))
        if ROWS:
            r = (r4 * 4 + i).to(tl.int64)
            tl.store(y + r[:, None] * C + c[None, :], x8, mask=(r < R)[:, None] & (c < C)[None, :])
            tl.store(inv + column.to(tl.int64) * R + r, inverse(scale, POW2), mask=r < R)
    if amax is not None:
        tl.atomic_max(amax, tl.max(rows), sem="relaxed")
    if TRANSPOSED:
        scale_t = scale_of(tl.max(columns, 0).to(tl.float32, bitcast=True), LIMIT, HEADROOM, POW2)
        tl.store(inv_t + row.to(tl.int64) * C + c, inverse(scale_t, POW2), mask=c < C)
        words = tl.zeros((32, 128), tl.int32)
        for i in tl.static_range(4):
            x8, scale, top, v = _block_part(parts[i], F8, LIMIT, HEADROOM, POW2, AGAIN)
            words |= byte(to_fp8(v * scale_t[None, :], F8, LIMIT), i)
        words = settled(words)
        tl.store(yt + c[:, None].to(tl.int64) * R4 + r4[None, :], tl.trans(words), mask=(c < C)[:, None])


@triton.jit(do_not_specialize=["T", "R"])  # specialised for one row, it gave wrong results on the GPU
def _blocks_kernel(
    x, y, yt, token, ends, amax, inv, inv_t, T, R, C, R4,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, AGAIN: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Cast one tile of x [T, C], or of its rows token [R]: see `cast_tile`. GROUPS: rows beyond ends[GROUPS - 1] do not
    exist."""
    busy = True
    if GROUPS > 0:
        busy = tl.program_id(1) * 128 < tl.load(ends + GROUPS - 1)
    if busy:
        r4 = tl.program_id(1) * 32 + tl.arange(0, 32)
        c = tl.program_id(0) * 128 + tl.arange(0, 128)
        parts = _parts(x, token, r4, c, T, C, GATHER)
        cast_tile(
            parts, y, yt, amax, inv, inv_t, tl.program_id(1), tl.program_id(0), R, C, R4,
            F8, LIMIT, HEADROOM, POW2, ROWS, TRANSPOSED, AGAIN,
        )  # fmt: skip


@triton.jit
def _factors(token, inv, r4, c, T, i: tl.constexpr, GATHER: tl.constexpr, MODE: tl.constexpr):
    """Return the factors that dequantise rows 4 r4 + i of FP8."""
    t, live = _source(token, r4, T, i, GATHER)
    if MODE == const.BLOCK:
        return tl.load(inv + (tl.max(c, 0) // 128).to(tl.int64) * T + t, mask=live, other=1.0)
    else:
        return tl.load(inv + t, mask=live, other=0.0)


@triton.jit(do_not_specialize=["T"])  # specialised for one row, it gave wrong results on the GPU
def _transpose_kernel(
    x, y, yt, token, ends, inv, inv_rows, inv_t, T, C, R4,
    F8: tl.constexpr, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr,
    MODE: tl.constexpr, GROUPS: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write yt[c, r] = x[token(r), c] with scales that do not vary along r; ROWS: also y[r, c] = x[token(r), c]. Tiles
    of 128 x 128 (64 x 128 columns x rows cost the same)."""
    busy = True
    if GROUPS > 0:
        busy = tl.program_id(1) * 128 < tl.load(ends + GROUPS - 1)
    if busy:
        r4 = tl.program_id(1) * 32 + tl.arange(0, 32)
        c = tl.program_id(0) * 128 + tl.arange(0, 128)
        parts = _parts(x, token, r4, c, T, C, GATHER)
        words = tl.zeros((32, 128), tl.int32)
        columns = tl.zeros((32, 128), tl.int32)
        for i in tl.static_range(4):
            words |= byte(parts[i], i)
            if MODE != const.TENSOR:
                factor = _factors(token, inv, r4, c, T, i, GATHER, MODE)
            if MODE == const.BLOCK:
                columns = tl.maximum(columns, abs_bits(parts[i].to(tl.float32) * factor[:, None]))
            if ROWS:
                r = (r4 * 4 + i).to(tl.int64)
                tl.store(y + r[:, None] * C + c[None, :], unbyte(words, i), mask=(c < C)[None, :])
                if MODE == const.ROW:
                    tl.store(inv_rows + r, factor, mask=(r4 >= 0) & (tl.program_id(0) == 0))
                if MODE == const.BLOCK:
                    tl.store(inv_rows + tl.program_id(0).to(tl.int64) * (R4 * 4) + r, factor)
        if MODE != const.TENSOR:
            if MODE == const.BLOCK:
                scale = scale_of(tl.max(columns, 0).to(tl.float32, bitcast=True), LIMIT, HEADROOM, POW2)
                tl.store(inv_t + tl.program_id(1).to(tl.int64) * C + c, inverse(scale, POW2), mask=c < C)
            else:
                largest = tl.load(inv_t)  # 0 if all rows have 0
                scale = tl.full((128,), 1.0, tl.float32) * inverse(tl.where(largest == 0, 1.0, largest))
            as_rows = words
            words = tl.zeros((32, 128), tl.int32)
            for i in tl.static_range(4):
                x8 = unbyte(as_rows, i).to(x.dtype.element_ty, bitcast=True)
                factor = _factors(token, inv, r4, c, T, i, GATHER, MODE)
                words |= byte(to_fp8(x8.to(tl.float32) * factor[:, None] * scale[None, :], F8, LIMIT), i)
        words = settled(words)
        tl.store(yt + c[:, None].to(tl.int64) * R4 + r4[None, :], tl.trans(words), mask=(c < C)[:, None])


def cast(
    x: Tensor, scale_row: Tensor, amax: Tensor, how: Cast, transposed: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Cast x [R, C] BF16 or FP32, contiguous; return FP8 data [R, C] and inverse scales, and with `transposed` also
    data_t [C, R'] and its inverse scales. Raises the arena row `amax`.

    Inverse scales: TENSOR 0-d; ROW [R, 1]; BLOCK [R, C / 128] (a view of [C / 128, R]) and [R' / 128, C].
    """
    R, C = x.shape
    new = {"device": x.device, "dtype": torch.float32}
    y = torch.empty(R, C, device=x.device, dtype=how.fmt.dtype)
    Rt = padded_rows(R)
    yt = torch.empty(C, Rt, device=x.device, dtype=how.fmt.dtype) if transposed else None
    constants = how.constants
    if how.mode == const.TENSOR.value:
        own, inv = torch.zeros(1, device=x.device, dtype=torch.int32), torch.empty((), **new)
        common = scale_row, own, as_bits(amax), inv
        size = 8192
        parts = max(1, cdiv(x.numel(), size))
        _amax_kernel[(min(STRIPS, parts),)](x, scale_row, own, x.numel(), DELAYED=how.delayed, SIZE=size, num_warps=8)
        if yt is None:
            _tensor_kernel[(parts,)](x, y, *common, x.numel(), **constants, SIZE=size, num_warps=8)
        else:
            grid = (cdiv(C, 128), Rt // 128)
            _tensor_transposed_kernel[grid](
                x, as_bytes(y), as_words(yt), *common, R, C, Rt // 4, **constants, BR=128, BC=128, num_warps=8
            )
        return y, inv, yt, inv if transposed else None
    if how.mode == const.ROW.value:
        inv = torch.empty(R, 1, **new)
        width = power_of_2(C)
        rows = max(1, 4096 // width)
        _rows_kernel[(cdiv(R, rows),)](
            x, y, as_bits(amax), inv, R, C, **constants, BR=rows, BC=width, num_warps=row_warps(width)
        )
        if not transposed:
            return y, inv, None, None
        yt, inv_t = transpose(y, inv, how)
        return y, inv, yt, inv_t
    return cast_blocks(x, amax, how, rows=True, transposed=transposed)


def cast_blocks(
    x: Tensor, amax: Tensor, how: Cast, rows: bool, transposed: bool, again: bool = False, ends: Tensor | None = None,
    token: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`cast` with BLOCK scales, for the requested copies (`rows`, `transposed`).

    again: the transposed copy is cast from the FP8 numbers (activations), not from x. ends [E]: where the experts' rows
    end; rows beyond the last do not exist. token [R'] int32: indices of x's rows in the experts' order (-1: padding).
    """
    (T, C), R = x.shape, x.shape[0] if token is None else token.shape[0]
    new = {"device": x.device, "dtype": torch.float32}
    blocks, Rt = cdiv(C, 128), padded_rows(R)
    y = torch.empty(R if rows else 0, C, device=x.device, dtype=how.fmt.dtype)
    yt = torch.empty(C if transposed else 0, Rt, device=x.device, dtype=how.fmt.dtype)
    inv = torch.empty(blocks, R if rows else 0, **new)
    inv_t = torch.empty(Rt // 128 if transposed else 0, C, **new)
    _blocks_kernel[(blocks, Rt // 128)](
        x, y, as_words(yt), token if token is not None else inv, ends if ends is not None else inv, as_bits(amax), inv,
        inv_t, T, R, C, Rt // 4,
        **how.constants, GROUPS=0 if ends is None else ends.shape[0], ROWS=rows, TRANSPOSED=transposed, AGAIN=again,
        GATHER=token is not None, num_warps=8, maxnreg=128,
    )  # fmt: skip
    return y, inv.t(), yt if transposed else None, inv_t if transposed else None


def transpose(x8: Tensor, inv: Tensor, how: Cast, ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Transpose FP8 x8 [R, C] with inverse scales from `cast`; return data_t [C, R'] and its inverse scales: 0-d, or
    [R' / 128, C] for BLOCK.

    ends [E]: where the experts' rows end; rows beyond the last do not exist.
    """
    R, C = x8.shape
    Rt = padded_rows(R)
    yt = torch.empty(C, Rt, device=x8.device, dtype=x8.dtype)
    inv_t = transposed_scales(inv, Rt, C, how)
    _transpose_kernel[(cdiv(C, 128), Rt // 128)](
        x8, x8, as_words(yt), x8, ends if ends is not None else x8, inv, inv, inv_t, R, C, Rt // 4,
        **how.constants, MODE=how.mode, GROUPS=0 if ends is None else ends.shape[0], GATHER=False, ROWS=False,
        num_warps=8, maxnreg=128,
    )  # fmt: skip
    return yt, inv_t


def gather_transposed(
    x8: Tensor, inv: Tensor, token: Tensor, ends: Tensor, how: Cast, rows: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Gather rows in the experts' order and transpose them: x8 [T, C], token [R'] int32 (-1: padding), ends [E] int32
    (multiples of 128).

    Returns data [R', C] and its inverse scales (if `rows`), data_t [C, R'] and its inverse scales. Rows beyond the last
    end are not written.
    """
    (T, C), R = x8.shape, token.shape[0]
    yt = torch.empty(C, R, device=x8.device, dtype=x8.dtype)
    y = torch.empty(R, C, device=x8.device, dtype=x8.dtype) if rows else None
    inv_t = transposed_scales(inv, R, C, how)
    inv_rows = None if not rows else gathered_scales(inv, R, how)
    _transpose_kernel[(cdiv(C, 128), R // 128)](
        x8, as_bytes(y) if y is not None else x8, as_words(yt), token, ends, inv,
        inv_rows if inv_rows is not None else inv, inv_t, T, C, R // 4,
        **how.constants, MODE=how.mode, GROUPS=ends.shape[0], GATHER=True, ROWS=rows, num_warps=8, maxnreg=128,
    )  # fmt: skip
    return y, inv_rows.t() if inv_rows is not None and how.mode == const.BLOCK.value else inv_rows, yt, inv_t


def transposed_scales(inv: Tensor, rows: int, columns: int, how: Cast) -> Tensor:
    """Return inverse scales of a transposed operand: known ones (TENSOR; ROW: the largest, 0 if all rows have 0), or
    uninitialised memory (BLOCK)."""
    if how.mode == const.TENSOR.value:
        return inv
    if how.mode == const.ROW.value:
        return inv.amax() if inv.numel() else inv.new_ones(())
    return torch.empty(rows // 128, columns, device=inv.device, dtype=torch.float32)


def gathered_scales(inv: Tensor, rows: int, how: Cast) -> Tensor:
    """Allocate the inverse scales of gathered rows, in the kernels' layout ([C / 128, R'] for BLOCK)."""
    if how.mode == const.TENSOR.value:
        return inv
    shape = (rows, 1) if how.mode == const.ROW.value else (inv.shape[1], rows)
    return torch.empty(shape, device=inv.device, dtype=torch.float32)
