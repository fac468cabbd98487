"""Shared code of the kernels: scales and casts as `precision.scaling` and `precision.formats` define them;
transposition.

Scale of a tensor, by MODE:

    TENSOR  one. Delayed: the arena's row; where that is 0 (no history), and always with current scaling, from the
            tensor's own amax, which a first launch has written to `own`. With a history that launch returns at once, so
            the host need not know which case it is: its programs are few (`STRIPS`), and each visits many tiles.
    ROW     one a row, from the row itself, which is in registers: one pass
    BLOCK   one for 128 values of a row (and for 128 rows of a column, where an operand is summed over rows)

Amaxes are computed on the bits of |x| as integers: these sort like the numbers, and NaN is the largest, so that it
survives a maximum. The GPU's conversion to FP8 saturates and keeps NaN; the interpreter truncates, so there the number
is rounded first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.config import Granularity
from precision.formats import BY_NAME, Format
from precision.kernels import const

MODES = {Granularity.tensor: 1, Granularity.row: 2, Granularity.block: 3}
STRIPS = 1056  # approximate number of programs of a pass over strips: eight per multiprocessor
TRITON_FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@dataclass(frozen=True)
class Cast:
    """How one kind of tensor is cast: the compile-time half of a scaling recipe. mode: TENSOR, ROW or BLOCK."""

    fmt: Format
    mode: int
    delayed: bool
    margin: int
    power_of_two: bool

    @property
    def text(self) -> str:
        """The cast as one word, for the schemas of custom operators."""
        return f"{self.fmt.name}:{self.mode}:{int(self.delayed)}:{self.margin}:{int(self.power_of_two)}"

    @cached_property
    def constants(self) -> dict:
        """Return keyword arguments for the kernels."""
        return {
            "F8": TRITON_FP8[self.fmt.dtype],
            "LIMIT": self.fmt.max,
            "HEADROOM": 2.0**self.margin,
            "POW2": self.power_of_two,
            "DELAYED": self.delayed,
        }

    @staticmethod
    @cache
    def parse(text: str) -> "Cast":
        """Return the cast that `text` describes."""
        name, mode, delayed, margin, power_of_two = text.split(":")
        return Cast(BY_NAME[name], int(mode), delayed == "1", int(margin), power_of_two == "1")


def as_bits(amax: Tensor) -> Tensor:
    """View an FP32 tensor of amaxes as the integers that the kernels compare."""
    return amax.view(torch.int32)


def as_bytes(data: Tensor) -> Tensor:
    """View FP8 as bytes."""
    return data.view(torch.uint8)


def as_words(data: Tensor) -> Tensor:
    """View FP8 [..., 4 n] as 32-bit words [..., n]."""
    return data.view(torch.int32)


def readable(x: Tensor) -> Tensor:
    """Return x with features adjacent; rows may have a larger stride, as parts of wider ones do."""
    return x if x.stride(-1) == 1 else x.contiguous()


def scale_shape(mode: int, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape in which kernels store the inverse scales of a tensor [rows, columns]."""
    return {1: (), 2: (rows, 1), 3: (cdiv(columns, 128), rows)}[mode]


def by_block(inv: Tensor) -> Tensor:
    """Return inverse scales [R, blocks] as the kernels read them, stored [blocks, R]: scales of gathered rows, or of
    some of the rows, are not. The one scale [] of a tensor is returned as it is."""
    return inv.t().contiguous().t() if inv.dim() else inv


def chunk_table(counts: Sequence[int]) -> Tensor:
    """Return [sum of counts, 2] int32: the tensor of each program, and its chunk of it; counts: chunks of each
    tensor."""
    chunks = torch.tensor(counts)
    index = torch.repeat_interleave(torch.arange(len(counts)), chunks)
    within = torch.arange(sum(counts)) - torch.repeat_interleave(chunks.cumsum(0) - chunks, chunks)
    return torch.stack([index, within], dim=1).int()


def address_table(numbers: Sequence, device: torch.device) -> Tensor:
    """Return numbers, or rows of them, as int64 on the device, copied without synchronisation."""
    pinned = device.type == "cuda"  # or the copy would synchronise
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned)
    return host.to(device, non_blocking=True)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. (Triton's own takes 2 us: it also supports constant expressions.)"""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def row_warps(width: int) -> int:
    """Return the warps of a kernel that holds whole rows of this width: at most 64 values per thread."""
    return min(16, max(4, width // 2048))


def padded_rows(rows: int) -> int:
    """Return the rows of a transposed operand: the next multiple of 128, for tiles and the tensor cores' layouts."""
    return cdiv(rows, 128) * 128


MOMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
"""Formats of an optimizer's moments."""


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr):
    """Return the scale as `scaling.scale_from_amax` defines it."""
    usable = (amax > 0) & (amax < float("inf"))
    if POW2 and HEADROOM == 1.0:
        # Formats end at 1.75 2^n: the quotient's exponent is n minus amax's, less 1 where amax's mantissa exceeds 1.75.
        # Integer arithmetic, since divisions, for each row of each block, took as long as the rest of a cast.
        tl.static_assert((LIMIT == 448.0) | (LIMIT == 57344.0))
        top = tl.full(amax.shape, LIMIT / 1.75, tl.float32).to(tl.int32, bitcast=True)
        exponent = tl.maximum((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000, top - 0x3F000000)
        return tl.where(usable, top - exponent + 0x3F800000, 0x3F800000).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.full(amax.shape, LIMIT / HEADROOM, tl.float32), tl.where(usable, amax, 1.0))
    scale = tl.minimum(tl.maximum(tl.where(usable, scale, 1.0), 1.1754943508222875e-38), 8.507059173023462e37)
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def inverse(scale, POW2: tl.constexpr = False):
    """Return 1 / scale, correctly rounded. POW2: `scale_of` made the scale with it."""
    if POW2:
        return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def inverse_of_row(scale, amax):
    """Return the factor that dequantises a row; 0 for a row of zeros, so that it does not count among the largest."""
    return tl.where(amax == 0, 0.0, inverse(scale))


@triton.jit
def tensor_scale(
    scale_row, own, LIMIT: tl.constexpr, HEADROOM: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr
):
    """Return the arena's scale, or the tensor's own, as `scaling.step_scale`."""
    scale = scale_of(tl.load(own).to(tl.float32, bitcast=True), LIMIT, HEADROOM, POW2)
    if DELAYED:
        known = tl.load(scale_row)
        scale = tl.where(known > 0, known, scale)
    return scale


@triton.jit
def is_known(scale_row, DELAYED: tl.constexpr):
    """Return whether the arena has a scale, so that no amax has to be computed first."""
    if DELAYED:
        return tl.load(scale_row) > 0
    return False


@triton.jit
def abs_bits(x):
    """Return |x| FP32 as an integer."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_along(x, axis: tl.constexpr):
    """Return the largest |x| along an axis, FP32; NaN if there is one."""
    return tl.max(abs_bits(x), axis).to(tl.float32, bitcast=True)


@triton.jit
def as_bf16(x):
    """Return x rounded to BF16, in FP32: the value that plain ops return and quantise."""
    if const.ON_GPU:
        # as the upper half of a pair it is an FP32 number at once; a plain conversion is four times as slow
        return tl.inline_asm_elementwise(
            "{ .reg .f32 z; mov.f32 z, 0f00000000; cvt.rn.bf16x2.f32 $0, $1, z; }", "=r,f", [x.to(tl.float32)],
            dtype=tl.int32, is_pure=True, pack=1,
        ).to(tl.float32, bitcast=True)  # fmt: skip
    else:
        wide = x.to(tl.float32)
        bits = wide.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)
        return tl.where(wide != wide, wide, rounded)


@triton.jit
def round_to(x, to: tl.constexpr):
    """Round FP32 to the type `to`, to nearest even (also in the interpreter, which truncates by default)."""
    if const.ON_GPU or to != tl.bfloat16:
        return x.to(to)
    return as_bf16(x).to(to)


@triton.jit
def to_fp8(x, F8: tl.constexpr, LIMIT: tl.constexpr):
    """Cast FP32 with saturation, to nearest even; NaN stays NaN."""
    if const.ON_GPU:
        return x.to(F8)
    MANTISSA: tl.constexpr = 3 if LIMIT == 448.0 else 2
    clamped = tl.where(x != x, x, tl.minimum(tl.maximum(x, -LIMIT), LIMIT))
    bits = clamped.to(tl.int32, bitcast=True)
    CUT: tl.constexpr = 23 - MANTISSA
    rounded = (bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) & ~((1 << CUT) - 1)
    normal = rounded.to(tl.float32, bitcast=True)
    # below the smallest normal number steps are equal: adding 1.5 * 2^23 of them rounds
    SMALLEST: tl.constexpr = 2.0**-6 if LIMIT == 448.0 else 2.0**-14
    MAGIC: tl.constexpr = 1.5 * 2.0**23 * SMALLEST / (1 << MANTISSA)
    exact = tl.where(tl.abs(clamped) < SMALLEST, (clamped + MAGIC) - MAGIC, normal)
    return tl.where(x != x, x, exact).to(F8)


@triton.jit
def byte(x8, i: tl.constexpr):
    """Shift an FP8 tile to byte i of 32-bit words. Four rows share a word, so that transposing moves words: transposing
    FP8 tiles themselves gave wrong results on the GPU with Triton 3.6."""
    return (x8.to(tl.uint8, bitcast=True).to(tl.uint32) << (8 * i)).to(tl.int32, bitcast=True)


@triton.jit
def unbyte(words, i: tl.constexpr):
    """Return byte i of 32-bit words."""
    return ((words.to(tl.uint32, bitcast=True) >> (8 * i)) & 0xFF).to(tl.uint8)


@triton.jit
def settled(words):
    """Force words to be computed before they are used.

    Where BF16 becomes words of FP8 that are both unpacked again and transposed, the code that Triton 3.6 generates
    transposes wrong words (half of them; not in the interpreter). So they pass an instruction that must not be moved.
    """
    if const.ON_GPU:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    else:
        return words


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x) with two special-function instructions; within a few ulp. Values that the first one flushes
    to zero are lost in the sum anyway."""
    if const.ON_GPU:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 t;
            ex2.approx.ftz.f32 t, $1;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t; }""",
            "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return 1.0 / (1.0 + tl.exp(-x))


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the programs of a kernel that visits its tiles with a constant stride: one a multiprocessor."""
    return 1 if const.INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
