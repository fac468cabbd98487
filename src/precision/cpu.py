"""Matrix products on a CPU: in FP32, or where the CPU has BF16 instructions and the numbers are BF16's, by those.

FP32 holds BF16 and FP8 numbers and their products exactly, every CPU has FP32 instructions, and a CPU without BF16 ones
takes ten times as long in BF16. BF16 instructions take a half to a quarter of the time of FP32, and also sum in FP32.
They read numbers below 2^-126 as zeros. Operands in FP32 whose numbers BF16 holds reach them by oneDNN's own
conversion, which returns the FP32 sums.
"""

import torch
from torch import Tensor

# BF16 products of this CPU, which oneDNN may use: it emulates those of others
HAS_BF16_INSTRUCTIONS: bool = (
    torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
)


def multiply(a: Tensor, b: Tensor, out: torch.dtype, narrow: bool) -> Tensor:
    """Return a [..., M, K] b [..., K, N] in `out`, rounded once from FP32 sums. narrow: BF16 holds all the numbers."""
    if not (narrow and HAS_BF16_INSTRUCTIONS):
        return (a.float() @ b.float()).to(out)
    if a.dtype == b.dtype == out == torch.bfloat16:
        return a @ b
    product = _opaque if torch.compiler.is_compiling() else _of_bf16
    return product(a.float(), b.float()).to(out)


def _of_bf16(a: Tensor, b: Tensor) -> Tensor:
    settings = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        return a @ b
    finally:
        settings.fp32_precision = before


_opaque = torch.library.custom_op("octet::product_of_bf16", _of_bf16, mutates_args=())


@_opaque.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])
