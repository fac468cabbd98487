"""Sums of FP8 products on a Hopper GPU: their errors and times, with FP32 accumulation and without (`fast`).

    python scripts/bench/sums.py                      every FP8 kernel, over sums of 2,048 to 65,536
    python scripts/bench/sums.py --times              also the times of Moonlight's GEMMs, experts and linears

Errors are against float64 of the same FP8 numbers, drawn with mean 1 (and mean 0): the relative error in norm, and the
bias: the mean of the error over the mean of the result. The tensor cores' 14 bits show in long sums of one sign, and
not for numbers of mean 0.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import measure
import torch
from torch import Tensor

from precision.errors import UserError
from precision.kernels import const, grouped_gemm
from precision.kernels.common import padded_rows
from precision.kernels.route import Route
from precision.kernels.scaled_mm import scaled_nt, scaled_wgrad
from trainer.launch.command_line import Parser, guarded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MODES = {"tensor": const.TENSOR.value, "row": const.ROW.value, "block": const.BLOCK.value}
LENGTHS = (2048, 16384, 65536)
ROWS, COLUMNS = 384, 320
SLICE = 8192  # columns that are read as float64 at a time


@dataclass
class Operand:
    """FP8 numbers [R, K] and their inverse scales: `inv` in a kernel's layout, `unit` one for each tile, 0-d if there
    is one for all."""

    data: Tensor
    inv: Tensor
    unit: Tensor

    def read(self, begin: int, end: int) -> Tensor:
        """Return the represented numbers of some columns, whole tiles, in float64."""
        numbers, unit = self.data[:, begin:end].double(), self.unit.double()
        if unit.dim():
            tall, wide = (n // units for n, units in zip(self.data.shape, unit.shape, strict=True))
            if unit.shape[1] > 1:
                unit = unit[:, begin // wide : end // wide].repeat_interleave(wide, 1)
            unit = unit.repeat_interleave(tall, 0)
        return numbers.mul_(unit)


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--times", action="store_true", help="also time GEMMs of Moonlight's shape")
    parser.add_argument("--rows", type=int, default=98304, help="rows of all experts with --times (default: 98304)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("scripts/bench/sums.py measures GPU kernels and there is no GPU")
    measure.header()
    errors()
    if options.times:
        times(options)


def errors() -> None:
    """Print a line for each kernel and length, both ways."""
    measure.say("kernel        scales   sum over   fp32: bias, error at mean 1 | mean 0   fast: the same")
    for K in LENGTHS:
        for name in ("linear nt", "linear wgrad", "grouped nt", "grouped wgrad"):
            for kind, mode in MODES.items():
                cells = []
                for fast in (False, True) if mode != const.BLOCK.value else (False,):
                    one, zero = (error(name, mode, K, mean, fast) for mean in (1.0, 0.0))
                    cells.append(f"{one[0]:+.1e} {one[1]:.1e} | {zero[1]:.1e}")
                measure.say(f"{name:13} {kind:7} {K:8}   {'   '.join(cells)}")


def error(kernel: str, mode: int, K: int, mean: float, fast: bool, width: int | None = None) -> tuple[float, float]:
    """Return bias and relative error of one kernel; see the module docstring. width: of the weight (nt) or of the
    gradient (wgrad)."""
    torch.manual_seed(0)
    make, transposed = (linear if kernel.startswith("linear") else grouped), kernel.endswith("wgrad")
    got, want = make(mode, K, mean, fast, transposed, width)
    difference = got.double() - want
    return float(difference.mean() / want.mean()), float(difference.norm() / want.norm())


def linear(
    mode: int, K: int, mean: float, fast: bool, transposed: bool, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return one plain GEMM, and float64."""
    block = mode == const.BLOCK.value
    if transposed:
        grad = E4M3 if block else E5M2  # as in each recipe
        a, b = (draw(n, K, mean, fmt, mode, over_rows=True) for n, fmt in ((width or ROWS, grad), (384, E4M3)))
        return scaled_wgrad(a.data, a.inv, b.data, b.inv, mode, torch.float32, fast), product(a, b, K)
    a, b = draw(ROWS, K, mean, E4M3, mode), draw(width or (384 if block else COLUMNS), K, mean, E4M3, mode, weight=True)
    return scaled_nt(a.data, a.inv, b.data, b.inv, mode, torch.bfloat16, fast), product(a, b, K)


def grouped(
    mode: int, K: int, mean: float, fast: bool, transposed: bool, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return a grouped GEMM, and float64. Experts have different sizes in wgrad: the sum is over rows."""
    if transposed:
        sizes, grad = [K, max(128, K // 4)], E4M3 if mode == const.BLOCK.value else E5M2
        a, b = (draw(n, sum(sizes), mean, fmt, mode, over_rows=True) for n, fmt in ((width or 256, grad), (512, E4M3)))
        got = grouped_gemm.wgrad(a.data, a.inv, b.data, b.inv, mode, route(sizes), torch.float32, fast)
        return got[0], product(a, b, K)
    sizes = [128, ROWS - 128]
    a = draw(ROWS, K, mean, E4M3, mode)
    weights = [draw(width or 384, K, mean, E4M3, mode, weight=True) for _ in sizes]
    data, inv = (torch.stack([getattr(w, key) for w in weights]) for key in ("data", "inv"))
    got = grouped_gemm.nt(a.data, a.inv, data, inv, mode, route(sizes), fast)
    whole = [product(a, w, K) for w in weights]
    return got, torch.cat([whole[0][: sizes[0]], whole[1][sizes[0] :]])


def product(a: Operand, b: Operand, K: int) -> Tensor:
    """Return a @ b.t() over the first K columns in float64, of which slices alone are ever in memory."""
    total = torch.zeros(len(a.data), len(b.data), dtype=torch.float64, device=a.data.device)
    for begin in range(0, K, SLICE):
        columns = begin, min(begin + SLICE, K)
        total.addmm_(a.read(*columns), b.read(*columns).t())
    return total


def draw(
    rows: int, K: int, mean: float, dtype: torch.dtype, mode: int, weight: bool = False, over_rows: bool = False
) -> Operand:
    """Draw numbers of that mean, cast by `mode`: rows by 1 x 128, weights by 128 x 128; operands summed over rows have
    one scale, or one for 128 rows."""
    x = torch.randn(rows, K, device="cuda").add_(mean)  # in place from here on: it may be of gigabytes
    limit = 448.0 if dtype == E4M3 else 57344.0
    if mode == const.BLOCK.value:
        tall = 128 if weight else 1
        tiles = x.view(rows // tall, tall, K // 128, 128)
        amax = torch.maximum(tiles.amax((1, 3)), -tiles.amin((1, 3)))
        scale = torch.exp2(torch.floor(torch.log2(limit / amax)))
        tiles.mul_(scale[:, None, :, None])
        unit = scale.reciprocal()
        inv = unit if weight else unit.t().contiguous()
        inv = inv if weight or over_rows else inv.t()
    elif mode == const.ROW.value and not over_rows:
        amax = torch.maximum(x.amax(1, keepdim=True), -x.amin(1, keepdim=True))
        scale = torch.exp2(torch.floor(torch.log2(limit / amax)))
        x.mul_(scale)
        unit = inv = scale.reciprocal()
    else:
        scale = limit / torch.maximum(x.amax(), -x.amin())
        x.mul_(scale)
        unit = inv = scale.reciprocal()
    return Operand(x.clamp_(-limit, limit).to(dtype), inv, unit)


def route(sizes: list[int]) -> Route:
    """Return the route of experts of these sizes, each in whole tiles of 128."""
    padded = torch.tensor([padded_rows(size) for size in sizes])
    ends = padded.cumsum(0)
    tiles = torch.repeat_interleave(torch.arange(len(sizes)), padded // 128)
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    return Route(none, none, none, *(t.int().cuda() for t in (ends - padded, ends, tiles)))


def times(options: argparse.Namespace) -> None:
    """Print milliseconds of GEMMs of Moonlight's shape, both sums in turn."""
    R, E = options.rows, 64
    to, one, each = route([R // E] * E), torch.ones((), device="cuda"), torch.ones(E, device="cuda")

    def fp8(*shape: int) -> Tensor:
        return (torch.randn(shape, device="cuda") * 64).to(E4M3)

    for N, K in ((2816, 2048), (2048, 1408), (1408, 2048), (2048, 2816)):
        a, w = fp8(R, K), fp8(E, N, K)
        clock(f"grouped nt {R} x {N} x {K}", R * N * K, lambda a=a, w=w, fast=True: grouped_gemm.nt(
            a, one, w, each, MODES["tensor"], to, fast))  # fmt: skip
    for M, N in ((2816, 2048), (2048, 1408)):
        a, b = fp8(M, R), fp8(N, R)
        for out in (torch.float32, torch.bfloat16):
            clock(f"grouped wgrad {M} x {N} {str(out)[6:]}", R * M * N, lambda a=a, b=b, out=out, fast=True: (
                grouped_gemm.wgrad(a, one, b, one, MODES["tensor"], to, out, fast)))  # fmt: skip
    for N, K in (
        (3072, 2048),
        (2048, 3072),
        (4096, 512),
        (512, 4096),
        (2048, 2048),
        (22528, 2048),
        (2048, 11264),
    ):
        a, w = fp8(32768, K), fp8(N, K)
        clock(f"linear nt 32768 x {N} x {K}", 32768 * N * K, lambda a=a, w=w, fast=True: scaled_nt(
            a, one, w, one, MODES["tensor"], torch.bfloat16, fast))  # fmt: skip


def clock(name: str, macs: int, run: Callable[..., object]) -> None:
    """Time both ways in turn, five rounds: print medians, and the spread of rounds."""
    rounds = {fast: [] for fast in (False, True)}
    for _ in range(5):
        for fast, seconds in rounds.items():
            seconds.append(measure.short(lambda fast=fast: run(fast=fast), 10))
    (slow, spread), (quick, _) = ((sorted(s)[2], max(s) / min(s) - 1) for s in rounds.values())
    rate = 2e-12 * macs
    measure.say(
        f"{name:40} fp32 {1e3 * slow:.3f} ms {rate / slow:5.0f} TF/s   fast {1e3 * quick:.3f} ms {rate / quick:5.0f} "
        f"TF/s   {slow / quick - 1:+.1%} (rounds within {spread:.1%})"
    )


if __name__ == "__main__":
    sys.exit(guarded(run))
