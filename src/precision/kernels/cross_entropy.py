"""Cross entropy of rows of logits; the gradient overwrites the logits.

A program owns a row z [V]. First pass: running maximum m and sum s of 2^((z - m) log2 e), block by block; whenever the
maximum grows, the sum so far shrinks by 2^((m_old - m) log2 e) (online softmax, arXiv 1805.02867). Second pass:

    loss = w (m + ln s - z[y])            dz = w (2^((z - m) log2 e) / s - onehot(y))

written over z, in its own format. The row is read twice, the second time from the L2 cache: programs are few, with many
threads each, so that the rows in flight fit there. An ignored target costs a row of zeros and no read.

The reference in plain PyTorch is in `precision.cross_entropy`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.common import power_of_2

_BLOCK = 8192  # columns at a time; 16 per thread
_LOG2_E = 1.4426950408889634


@triton.jit
def _cross_entropy_kernel(
    z, target, weight, loss, row_stride,
    V: tl.constexpr, IGNORED: tl.constexpr, GRADIENT: tl.constexpr, LOG2_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row: loss [T], and with GRADIENT dz over z [T, V]. weight: 0-d."""
    row = tl.program_id(0).to(tl.int64)
    z += row * row_stride
    column = tl.arange(0, BLOCK)
    y = tl.load(target + row)
    if y == IGNORED:
        tl.store(loss + row, 0.0)
        if GRADIENT:
            zero = tl.zeros((BLOCK,), z.dtype.element_ty)
            for start in range(0, V, BLOCK):
                tl.store(z + start + column, zero, mask=start + column < V)
    else:
        w = tl.load(weight).to(tl.float32)
        chosen = tl.load(z + y, mask=(y >= 0) & (y < V), other=float("nan")).to(tl.float32)
        top = -1.0e38  # finite, so that a block of -inf leaves the sum at 0
        total = 0.0
        for start in range(0, V, BLOCK):
            inside = start + column < V
            v = tl.load(z + start + column, mask=inside, other=-float("inf"), eviction_policy="evict_last")
            v = v.to(tl.float32)
            higher = tl.maximum(top, tl.max(v, 0))
            part = tl.sum(tl.exp2((v - higher) * LOG2_E), 0)
            total = total * tl.exp2((top - higher) * LOG2_E) + part
            top = higher
        tl.store(loss + row, w * (top + tl.log(total) - chosen))
        if GRADIENT:
            factor = 1.0 / total
            for start in range(0, V, BLOCK):
                inside = start + column < V
                v = tl.load(z + start + column, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32)
                p = tl.exp2((v - top) * LOG2_E) * factor
                dz = tl.where(start + column == y, p - 1.0, p) * w
                tl.store(z + start + column, dz.to(z.dtype.element_ty), mask=inside)


def cross_entropy_rows(logits: Tensor, target: Tensor, weight: Tensor, gradient: bool, ignored: int) -> Tensor:
    """Return the losses [T] FP32 of logits [T, V]; with `gradient` overwrite the logits with dz. Rows must be
    contiguous.

    target [T] int64; weight [] FP32 multiplies losses and gradients. A target outside the vocabulary that is not
    `ignored` makes its loss NaN.
    """
    T, V = logits.shape
    assert logits.stride(1) == 1 and target.is_contiguous()
    loss = torch.empty(T, dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, power_of_2(V))
    if T:
        _cross_entropy_kernel[(T,)](
            logits, target, weight, loss, logits.stride(0), V, ignored, gradient, _LOG2_E, block,
            num_warps=max(1, block // 512),  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
    return loss
