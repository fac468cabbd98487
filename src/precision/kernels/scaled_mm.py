"""Plain GEMMs: cuBLAS, for FP8 through `torch._scaled_mm` with its layouts of scales.

    scales   a                                     b
    TENSOR   0-d                                   0-d
    ROW      [R, 1]                                [1, N]
    BLOCK    [R, K / 128], stored [K / 128, R]     [K / 128, N / 128], stored [N / 128, K / 128]
    wgrad    0-d, or [M, R' / 128], stored [R' / 128, M], and [R' / 128, N]

cuBLAS promotes partial sums to FP32; with `fast` it does not (`precision.accumulation`), except for BLOCK.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from precision.kernels import const, grouped_gemm
from precision.kernels.common import padded_rows
from precision.kernels.route import Route
from precision.operators import fake, operator

ROWS, SQUARES = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
_scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]  (torch 2.11 has no public name for it)


def scaled_nt(
    a: Tensor, a_inv: Tensor, w: Tensor, w_inv: Tensor, mode: int, out: torch.dtype, fast: bool = False
) -> Tensor:
    """Multiply a [R, K] by w [N, K]^T, FP8 contiguous; return [R, N]. w_inv: 0-d, N values in any shape, or
    [N / 128, K / 128]."""
    if mode == const.BLOCK.value:
        return _block_nt(a, a_inv, w, w_inv).to(out)
    w_inv = w_inv.view(1, -1) if w_inv.dim() else w_inv
    return _scaled_mm(a, w.t(), scale_a=a_inv, scale_b=w_inv, out_dtype=out, use_fast_accum=fast)


def scaled_wgrad(
    a: Tensor, a_inv: Tensor, b: Tensor, b_inv: Tensor, mode: int, out: torch.dtype, fast: bool = False
) -> Tensor:
    """Multiply transposed operands a [M, R'], b [N, R'] FP8; return [M, N] in `out`."""
    if mode == const.BLOCK.value:
        return _block_wgrad(a, a_inv, b, b_inv, out)
    return _scaled_mm(a, b.t(), scale_a=a_inv, scale_b=b_inv, out_dtype=out, use_fast_accum=fast)


def plain_wgrad(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """Return a^T b [M, N] in `out`, for a [R, M], b [R, N]. FP32 of BF16 operands is cuBLAS's own sum; for BF16, cuBLAS
    may also round parts of a sum (torch's `allow_bf16_reduced_precision_reduction`)."""
    if a.is_cuda and a.dtype == torch.bfloat16 and out == torch.float32:
        return torch.mm(a.t(), b, out_dtype=out)
    return (a.t() @ b).to(out)


# Operators, since torch 2.11 cannot trace its own function, and 2.13 cannot trace Triton's descriptor arguments.


@operator("block_nt")
def _block_nt(a: Tensor, a_inv: Tensor, w: Tensor, w_inv: Tensor) -> Tensor:
    """Multiply a [R, K] by w [N, K]^T FP8; return [R, N] BF16."""
    if _ragged(*w.shape) or a.shape[0] % 4:
        return grouped_gemm.nt(a, a_inv, w[None], w_inv[None], const.BLOCK.value, _one_group(a, a.shape[0]))
    missing = -w_inv.shape[1] % 4  # cuBLAS reads blocks along the sum in fours
    w_inv = F.pad(w_inv, (0, missing)) if missing else w_inv
    return F.scaled_mm(a, w.t(), a_inv, ROWS, w_inv.t(), SQUARES, output_dtype=torch.bfloat16)


@fake(_block_nt)
def _(a: Tensor, a_inv: Tensor, w: Tensor, w_inv: Tensor) -> Tensor:
    return torch.empty(a.shape[0], w.shape[0], device=a.device, dtype=torch.bfloat16)


@operator("block_wgrad")
def _block_wgrad(a: Tensor, a_inv: Tensor, b: Tensor, b_inv: Tensor, out: torch.dtype) -> Tensor:
    """Multiply a [M, R'], b [N, R'] FP8; return [M, N] in `out`."""
    if _ragged(a.shape[0], b.shape[0]):
        return grouped_gemm.wgrad(a, a_inv, b, b_inv, const.BLOCK.value, _one_group(a, a.shape[1]), out)[0]
    return F.scaled_mm(a, b.t(), a_inv.t(), ROWS, b_inv.t(), ROWS, output_dtype=out)


@fake(_block_wgrad)
def _(a: Tensor, a_inv: Tensor, b: Tensor, b_inv: Tensor, out: torch.dtype) -> Tensor:
    return torch.empty(a.shape[0], b.shape[0], device=a.device, dtype=out)


def _ragged(*sizes: int) -> bool:
    """Return whether a size is not a multiple of 128. cuBLAS supports block scales for whole blocks only, and rows in
    fours; for other sizes the grouped kernels serve, with one group."""
    return any(size % 128 for size in sizes)


def _one_group(like: Tensor, rows: int) -> Route:
    size = padded_rows(rows)
    none, zero = (torch.zeros(n, device=like.device, dtype=torch.int32) for n in (0, 1))
    ends = torch.full((1,), size, device=like.device, dtype=torch.int32)
    return Route(none, none, none, zero, ends, torch.zeros(size // 128, device=like.device, dtype=torch.int32))
