"""FP8 rows as BF16, in one pass: `precision.formats.read_back`, rounded."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.common import as_bf16

_ROWS, _COLUMNS = 4, 1024


@triton.jit
def _read_back_kernel(data, inv, out, R, C, stride_row, stride_block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < R)[:, None] & (c < C)[None, :]
    i = r.to(tl.int64)[:, None] * C + c[None, :]
    scale = tl.load(inv + r[:, None] * stride_row + (c // 128)[None, :] * stride_block, mask=inside, other=0.0)
    tl.store(out + i, as_bf16(tl.load(data + i, mask=inside).to(tl.float32) * scale), mask=inside)


def read_back_bf16(data: Tensor, inv: Tensor) -> Tensor:
    """Return the values of FP8 data [R, C], contiguous, in BF16. inv: inverse scales [], [R, 1] or [R, ceil(C / 128)],
    of any strides."""
    R, C = data.shape
    out = torch.empty(R, C, dtype=torch.bfloat16, device=data.device)
    strides = (0, 0) if inv.dim() == 0 else (inv.stride(0), inv.stride(1) if inv.shape[1] > 1 else 0)
    if R:
        grid = triton.cdiv(R, _ROWS), triton.cdiv(C, _COLUMNS)
        _read_back_kernel[grid](data, inv, out, R, C, *strides, _ROWS, _COLUMNS, num_warps=8)
    return out
