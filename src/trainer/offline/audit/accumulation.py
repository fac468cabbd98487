"""How GEMMs add up their products.

Hopper's FP8 tensor cores add in about 14 bits. In a sum of terms of one sign the running sum soon becomes so much
larger than a term that each term loses its last digits, always downwards: the longer the sum, the more the result falls
short. Sums promoted to FP32 in between do not shrink. So coherent operands (mean 1) distinguish the two.

Measured on an H200 (docs/precision.md): promoted sums are too small by at most 1e-4 at any length, unpromoted sums of
2,048 by 1e-2 to 1.4e-2. `BIAS` is half-way in digits, and no sum here is shorter than `SHORTEST`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from precision import GemmRow
from precision.backends import GradOperand, WeightOperand, get_backend
from precision.backends.products import truncated_matmul
from precision.formats import Format, fp8_values, read_back, spread

BIAS = 1e-3
SHORTEST = 2048
LONGEST = 8192
"""Limit of the rows of a product; below it, those of a microbatch."""
SPREAD = 0.25  # of coherent operands around 1
GROUPS = 2  # experts that a probe multiplies
SAMPLE = 8  # rows of each product that are checked in float64
ROUNDING = {torch.bfloat16: (2.0**-7, 1e-30), torch.float16: (2.0**-10, 2.0**-24)}
"""Twice the largest change by rounding to a format, relative and absolute."""


@dataclass(frozen=True)
class Probe:
    """Relative bias of the three GEMMs of a row, and the lengths of their sums."""

    fprop: float
    dgrad: float
    wgrad: float
    lengths: tuple[int, int, int]

    @property
    def word(self) -> str:
        """Return how they add up. NaN does not count as FP32."""
        fast = [not abs(bias) < BIAS for bias in (self.fprop, self.dgrad, self.wgrad)]
        return "fast" if all(fast) else "fp32+fast" if any(fast) else "fp32"

    def __str__(self) -> str:
        biases = zip(("fprop", "dgrad", "wgrad"), (self.fprop, self.dgrad, self.wgrad), self.lengths, strict=True)
        return "  ".join(f"{name} {bias:+.1e} over {length:,}" for name, bias, length in biases)


def probe(row: GemmRow, tokens: int, device: torch.device, shortest: int = SHORTEST) -> Probe:
    """Multiply coherent operands with the row's kernels, in its shape, in all three GEMMs. tokens: of a microbatch."""
    recipe, backend = row.recipe, get_backend(row.recipe.backend)
    grouped, G = row.op == "moe.experts", min(row.groups, GROUPS)  # there may be one expert
    each = round(tokens * row.rows_per_token / row.groups)
    R = -(-min(max(each, shortest), LONGEST) // 128) * 128
    K, N = max(row.in_features, shortest), max(row.out_features, shortest)
    generator = torch.Generator(device).manual_seed(0)

    def coherent(fmt: Format, *shape: int) -> Tensor:
        """Return numbers exact in the format, which casts under powers of two preserve."""
        x = torch.randn(shape, generator=generator, device=device).mul_(SPREAD).add_(1).clamp_(0.25, 1.75)
        return x.to(fmt.dtype).to(torch.bfloat16 if fmt.is_fp8 else fmt.dtype)

    x, dy = coherent(recipe.input, G * R, K), coherent(recipe.grad, G * R, N)
    w = coherent(recipe.input, *((G,) if grouped else ()), N, K)
    offsets = (torch.arange(1, G + 1, device=device) * R).int() if grouped else None
    x8, x_inv, operand, dy8 = x, None, WeightOperand(w), GradOperand(dy, dy)
    if recipe.is_fp8:
        none = torch.zeros((), device=device)
        of_weight = torch.zeros(w.shape[:-2], device=device)
        x8, x_inv = backend.quantize(x, none, none.clone(), recipe.input, recipe)
        operand = backend.quantize_weight(w.float(), of_weight, of_weight.clone(), recipe.input, recipe, None)
        dy8 = backend.quantize_grad(dy, none, none.clone(), recipe)
    x_read, dy_read = _read(x8, x_inv), _read(dy8.data, dy8.scale_inv)
    w_read = _read(operand.data, operand.scale_inv).view(-1, N, K)

    def bias(ours: Tensor, exact: Tensor) -> float:
        return float(ours.sum(dtype=torch.float64) / exact - 1)

    # the sum over a whole product is a product of sums
    x_GK, dy_GN = (t.view(G, R, -1).sum(1, dtype=torch.float64) for t in (x_read, dy_read))
    fprop = (x_GK * w_read.sum(1, dtype=torch.float64)).sum()
    dgrad = (dy_GN * w_read.sum(2, dtype=torch.float64)).sum()
    wgrad = (x_read.sum(1, dtype=torch.float64) * dy_read.sum(1, dtype=torch.float64)).sum()
    return Probe(
        bias(backend.forward(x8, x_inv, operand, offsets, recipe), fprop),
        bias(backend.dgrad(dy8, operand, offsets, recipe), dgrad),
        bias(backend.wgrad(dy8, x8, x_inv, offsets, recipe, torch.float32), wgrad),
        (K, N, R),
    )


def _read(data: Tensor, inv: Tensor | None) -> Tensor:
    """Return the numbers that an operand represents, FP32."""
    if inv is None:
        return data.float()
    return read_back(data, inv.view(-1, 1, 1) if inv.dim() == 1 else inv)


def check_sums(
    y: Tensor, a: Tensor, a_inv: Tensor | None, w: Tensor, w_inv: Tensor | None, offsets: Tensor | None,
    fast: bool = False,
) -> bool:  # fmt: skip
    """Return whether rows of y, multiplied again in float64, agree with FP32 sums; a [R, K], w [(G,) K, N] as they
    enter the product. fast: whether they agree with those of the emulated tensor core (short sums agree with both);
    scales are then constant along a sum."""
    rows = torch.arange(0, a.shape[0], max(1, a.shape[0] // SAMPLE), device=a.device)
    group_of = torch.zeros_like(rows) if offsets is None else torch.searchsorted(offsets.to(rows), rows, right=True)
    for group in group_of.unique().tolist():
        r = rows[group_of == group]
        weight, weight_inv = w, w_inv
        if offsets is not None:
            weight, weight_inv = w[group], w_inv if w_inv is None or w_inv.dim() < 3 else w_inv[group]
        matrix = _exact(weight, weight_inv)
        picked = _exact(a[r], a_inv if a_inv is None or a_inv.dim() == 0 else a_inv[r])
        want, size = picked @ matrix, picked.abs() @ matrix.abs()
        if fast:
            numbers = fp8_values(a[r]), fp8_values(weight)
            exact = numbers[0].double() @ numbers[1].double()
            want = want * torch.where(exact == 0, 1.0, truncated_matmul(*numbers).double() / exact)
        rounding, least = ROUNDING.get(y.dtype, (0.0, 1e-30))  # of the result, twice if a scale multiplies it
        if not bool(((y[r].double() - want).abs() <= rounding * want.abs() + 2e-6 * size + least).all()):
            return False
    return True


def _exact(data: Tensor, inv: Tensor | None) -> Tensor:
    """Return the numbers that data represents, in float64, with block scales spread over their blocks."""
    return data.double() if inv is None else data.double() * spread(inv, *data.shape).double()
