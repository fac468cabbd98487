"""Matrix products of the reference backend: one product, or one per group of rows. Sums are FP32.

`out` is the dtype of the result, rounded once from the FP32 sum. A caller that scales the result requests FP32.

`narrow`: operands in FP32 hold numbers of BF16, which a CPU may multiply as such (`precision.cpu`). On a GPU the tensor
cores sum BF16 products in FP32. Grouped BF16 products use torch's grouped GEMM, with offsets that stay on the device;
it writes BF16, in rows of 16 bytes. Others are multiplied group by group, which waits for the offsets to reach the
host. Groups on a CPU are multiplied in slices of few different sizes, because oneDNN generates code for each new number
of rows. These are opaque operators, so that compiled graphs compute the same bits.

`fast` emulates a Hopper GPU's FP8 tensor cores, which do not sum in FP32. Each multiplication of a matrix instruction
adds 32 products to the accumulator: all 33 numbers are truncated to 14 bits from the leading bit of the largest, and
added. So a sum of one sign is too small, and more so the longer it is. DeepSeek-V3's report (3.3.2) gives 14 bits; the
position of the truncation was found by comparison with `scripts/bench/sums.py` on an H200. `promoted`: partial sums of
so many products are added in FP32, as FP32 accumulation does on that GPU, every 128.

R rows, G groups; offsets [G] int32: where each group's rows end, the last is R.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from precision import cpu

_ELEMENTS = 8  # BF16 numbers in 16 bytes
_INSTRUCTION = 32  # products that one FP8 matrix instruction adds (wgmma: k32)
_FRACTION = 13  # bits after the leading bit of the largest addend
_NUMBERS = 1 << 22  # products that the emulation holds at a time
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # else cuBLAS may round parts of a sum
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
_grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]  (torch has no public name for it yet)


def matmul(
    a: Tensor, w: Tensor, offsets: Tensor | None, out: torch.dtype, fast: bool = False, narrow: bool = False
) -> Tensor:
    """Multiply a [R, K] by w [K, N], or by [G, K, N] with offsets; return [R, N]."""
    narrow = narrow or a.dtype == w.dtype == torch.bfloat16
    if offsets is None:
        return _truncated(a, w).to(out) if fast else _mm(a, w, out, narrow)
    if fast or _one_by_one(a, w, out):
        return _matmul_one_by_one(*_operands(a, w, fast), offsets, fast, narrow).to(out)
    return _grouped_mm(a, w, offs=offsets)


def matmul_over_rows(
    a: Tensor, b: Tensor, offsets: Tensor | None, out: torch.dtype, fast: bool = False, narrow: bool = False
) -> Tensor:
    """Return a^T b [N, K] of a [R, N], b [R, K], or with offsets one per group of rows, [G, N, K]."""
    narrow = narrow or a.dtype == b.dtype == torch.bfloat16
    if offsets is None:
        return _truncated(a.t(), b).to(out) if fast else _mm(a.t(), b, out, narrow)
    if fast or _one_by_one(a, b, out):
        return _matmul_over_rows_one_by_one(*_operands(a, b, fast), offsets, fast, narrow).to(out)
    return _grouped_mm(a.t(), b, offs=offsets)


def truncated_matmul(a: Tensor, w: Tensor, promoted: int | None = None) -> Tensor:
    """Return a [R, K] w [K, N] as [R, N] FP32, summed as a Hopper GPU's FP8 tensor cores do; see the module
    docstring."""
    total = torch.zeros(a.shape[0], w.shape[1], device=a.device)
    length = a.shape[1] if promoted is None else promoted
    rows = max(1, _NUMBERS // (_INSTRUCTION * max(1, w.shape[1])))
    a, w = a.float(), w.float()
    for part in range(0, a.shape[0], rows):
        for start in range(0, a.shape[1], max(1, length)):
            stop = min(start + length, a.shape[1])
            total[part : part + rows] += _accumulated(a[part : part + rows, start:stop], w[start:stop])
    return total


def _accumulated(a: Tensor, w: Tensor) -> Tensor:
    """Sum all of K in one accumulator per element of the result."""
    total = torch.zeros(a.shape[0], w.shape[1], 1, device=a.device)
    for k in range(0, a.shape[1], _INSTRUCTION):
        columns = slice(k, k + _INSTRUCTION)
        addends = torch.cat([total, a[:, None, columns] * w[columns].t()[None]], -1)
        _, exponent = torch.frexp(addends.abs().amax(-1, keepdim=True))  # the largest is in [2^(e-1), 2^e)
        unit = torch.ldexp(torch.ones_like(total), exponent - 1 - _FRACTION)
        total = (addends / unit).trunc_().sum(-1, keepdim=True).mul_(unit)
    return total.squeeze(-1)


def _mm(a: Tensor, b: Tensor, out: torch.dtype, narrow: bool) -> Tensor:
    if a.device.type == "cpu":
        return cpu.multiply(a, b, out, narrow)
    if a.dtype == torch.float32:
        return (a @ b.float()).to(out)
    return a @ b if out == a.dtype else torch.mm(a, b, out_dtype=out)


def _operands(a: Tensor, b: Tensor, fast: bool) -> tuple[Tensor, Tensor]:
    """Convert operands for group-by-group multiplication."""
    return (a.float(), b.float()) if fast or a.device.type == "cpu" else (a, b)


def _one_by_one(a: Tensor, b: Tensor, out: torch.dtype) -> bool:
    """Return whether torch's grouped GEMM does not support these operands, or is no better than a loop over groups."""
    odd = a.shape[-1] % _ELEMENTS or b.shape[-1] % _ELEMENTS
    return a.device.type == "cpu" or a.dtype != torch.bfloat16 or out != torch.bfloat16 or bool(odd)


@torch.library.custom_op("octet::truncated_matmul", mutates_args=())
def _truncated(a: Tensor, w: Tensor) -> Tensor:
    return truncated_matmul(a, w)


@_truncated.register_fake
def _(a: Tensor, w: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], w.shape[1], dtype=torch.float32)


@torch.library.custom_op("octet::grouped_matmul", mutates_args=())
def _matmul_one_by_one(a: Tensor, w: Tensor, offsets: Tensor, fast: bool, narrow: bool) -> Tensor:
    total, y = a.shape[0], a.new_empty(a.shape[0], w.shape[-1], dtype=torch.float32)
    for (start, stop), matrix in zip(_spans(offsets, total), w.unbind(), strict=True):
        size = min(_rounded(stop - start), total)  # includes rows of neighbours; their results are discarded
        first = min(start, total - size)
        rows = a[first : first + size]
        made = truncated_matmul(rows, matrix) if fast else _mm(rows, matrix, torch.float32, narrow)
        y[start:stop] = made[start - first : stop - first]
    return y


@_matmul_one_by_one.register_fake
def _(a: Tensor, w: Tensor, offsets: Tensor, fast: bool, narrow: bool) -> Tensor:
    return a.new_empty(a.shape[0], w.shape[-1], dtype=torch.float32)


@torch.library.custom_op("octet::grouped_matmul_over_rows", mutates_args=())
def _matmul_over_rows_one_by_one(a: Tensor, b: Tensor, offsets: Tensor, fast: bool, narrow: bool) -> Tensor:
    y = a.new_empty(offsets.shape[0], a.shape[1], b.shape[1], dtype=torch.float32)
    for group, (start, stop) in enumerate(_spans(offsets, a.shape[0])):
        pad = 0, 0, 0, _rounded(stop - start) - (stop - start)
        rows = F.pad(a[start:stop], pad).t(), F.pad(b[start:stop], pad)
        y[group] = truncated_matmul(*rows) if fast else _mm(*rows, torch.float32, narrow)
    return y


@_matmul_over_rows_one_by_one.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor, fast: bool, narrow: bool) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1], dtype=torch.float32)


def _spans(offsets: Tensor, rows: int) -> list[tuple[int, int]]:
    """Return the first row and the end of each group. Groups must cover all `rows`, or rows have no result."""
    ends = [0, *offsets.tolist()]
    assert ends[-1] == rows, f"groups end at row {ends[-1]} of {rows}"
    return list(pairwise(ends))


def _rounded(rows: int) -> int:
    """Round up to one of few sizes: multiples of 16, and from 128 on eight steps between neighbouring powers of two."""
    step = max(16, 1 << max(rows - 1, 1).bit_length() - 4) if rows > 16 else 16
    return -(-rows // step) * step
