"""Number formats of training: their ranges, and the one cast into FP8.

    format  dtype          bits (s, e, m)  largest   smallest step above 0   used for
    FP32    float32        1, 8, 23        3.4e38    2^-149                  masters, moments, norms, sums
    BF16    bfloat16       1, 8, 7         3.4e38    2^-133                  compute weights, activations, gradients
    FP16    float16        1, 5, 10        65504     2^-24                   the same where a GPU has no BF16 (`fp16`)
    E4M3    float8_e4m3fn  1, 4, 3         448       2^-9                    FP8 activations, weights (and gradients)
    E5M2    float8_e5m2    1, 5, 2         57344     2^-16                   FP8 gradients: range before digits

E4M3 has no infinity and one NaN code per sign; E5M2 has both. The result of `.to(float8)` for a value out of range
differs between devices and versions (NaN, infinity, or the largest value even for Inf). So every cast here clamps
explicitly: finite values and infinities saturate at the largest value, NaN stays NaN. A saturating cast hides an Inf;
therefore every cast also records the absolute maximum of its input (see `scaling`), and a step with a non-finite
maximum is dropped.

Source of the formats: "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A number format. `max` is its largest finite value, `smallest` its smallest positive one (a subnormal)."""

    name: str
    dtype: torch.dtype
    max: float
    smallest: float
    bytes: int

    @property
    def is_fp8(self) -> bool:
        return self.bytes == 1

    def __str__(self) -> str:
        return self.name


FP32 = Format("fp32", torch.float32, torch.finfo(torch.float32).max, 2.0**-149, 4)
BF16 = Format("bf16", torch.bfloat16, torch.finfo(torch.bfloat16).max, 2.0**-133, 2)
FP16 = Format("fp16", torch.float16, torch.finfo(torch.float16).max, 2.0**-24, 2)
E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-9, 1)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-16, 1)
BY_NAME = {f.name: f for f in (FP32, BF16, FP16, E4M3, E5M2)}


def saturating_cast(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Return x * scale in FP8: multiplied in FP32, clamped to the format's range, rounded once to nearest even. NaN
    stays NaN.

    x: any shape, floating point. scale: FP32, broadcastable to x. The result has x's shape and `fmt.dtype`.
    """
    scaled = x.to(torch.float32, copy=True).mul_(scale).clamp_(-fmt.max, fmt.max)
    return scaled.to(fmt.dtype)


def read_back(data: Tensor, scale_inv: Tensor) -> Tensor:
    """Return the values of FP8 data [..., R, C] in FP32. scale_inv: [], or one per number, row, or block of 128 along a
    dimension, as in `Operand` and `WeightOperand`."""
    return fp8_values(data).float().mul_(spread(scale_inv, *data.shape))


def spread(scale: Tensor, *shape: int) -> Tensor:
    """Return scales so that they multiply numbers of this shape: those of blocks of 128 are repeated."""
    for dim in range(-scale.dim(), 0):
        if scale.shape[dim] not in (1, shape[dim]):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, shape[dim])
    return scale


def fp8_values(data: Tensor) -> Tensor:
    """Convert FP8 exactly, NaN and infinities included: to FP32 on a CPU, which multiplies in FP32, else to BF16.

    On a CPU integer arithmetic on the codes is several times as fast as a cast. E5M2 is the upper byte of an FP16. An
    E4M3 code moved into the exponent and mantissa fields of an FP16 is the number times 2^-8; its NaN is set apart.
    """
    if data.device.type != "cpu" or torch.compiler.is_compiling():
        return data.to(torch.float32 if data.device.type == "cpu" else torch.bfloat16)
    if data.dtype == torch.float8_e5m2:
        return data.view(torch.uint8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16).float()
    bits = data.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    bits.bitwise_and_(-0x4080)  # sign, 4 exponent bits and 3 mantissa bits; the sign extension is masked away
    values = bits.view(torch.float16).float().mul_(2.0**8)
    codes = data.view(torch.int8).bitwise_and(0x7F)
    if data.numel() == 0 or int(codes.amax()) < 0x7F:  # takes a thirtieth of the time of what it saves
        return values
    return values.masked_fill_(codes == 0x7F, torch.nan)


def static_scale(bound: float, largest: float) -> float:
    """Return the largest power of two that maps numbers up to `bound`, after rounding to BF16, into a format with this
    largest value."""
    return 2.0 ** math.floor(math.log2(largest / (bound * (1 + 2.0**-7))))
