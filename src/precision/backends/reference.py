"""The reference backend: plain PyTorch, any device. It defines the result that every other backend must compute.

Quantise with a saturating cast, read the FP8 numbers back, multiply, scale the FP32 sums in float64, round once to the
format of the result. Products of FP8 numbers are exact in FP32; the product of two scales may lie outside its range.
With `precision.accumulation=fast`, sums that a GPU scales after the product are truncated as its tensor cores truncate
them (see `products`), so that the effect can be studied on any machine.

Granularity of scales, and where a scale is applied (y [R, N] = x [R, K] w [N, K]^T):

    granularity   x, dy            w                  GEMM
    tensor        one              one (per expert)   on the FP8 numbers; both scales multiply the result
    row           one a row        one a row, w^T too on the FP8 numbers; row and column scales multiply the result
    block         1 x 128 of K     128 x 128          on dequantised numbers: BF16 with powers of two (exact), else FP32

The weight gradient sums over rows, so its operands need scales that do not vary along rows. tensor: used as they are.
row: both operands are cast again under the largest of their scales (powers of two: exact but for underflow). block:
cast again in 128 x 1 tiles; x from its FP8 numbers, because only they are saved for backward and gathered, dy from the
exact gradient, which is available (DeepSeek-V3 report, 3.3.2; grouped: tiles restart in each expert). The input
gradient sums over N, along which row scales of w would vary: so `row` makes a second cast of w with one scale per
column.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from precision.backends import products
from precision.backends.interface import GradOperand, WeightOperand
from precision.config import Granularity
from precision.formats import E4M3, E5M2, Format, fp8_values, saturating_cast, spread
from precision.observe import report
from precision.rows import GemmRecipe
from precision.scaling import absolute_max, record_amax, scale_from_amax, step_scale

BLOCK = 128
_IN_CACHE = 1 << 16  # numbers of a product that are scaled at a time


class ReferenceBackend:
    """See the module docstring; the interface is described in `precision.backends.interface`."""

    name = "reference"

    def quantize(
        self,
        x: Tensor,
        scale_row: Tensor,
        amax_row: Tensor,
        fmt: Format,
        recipe: GemmRecipe,
        place: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        data, inv = self._quantize(x, scale_row, amax_row, fmt, recipe)
        report(place, amax_row, x, data, inv, fmt)
        return data, inv

    def _quantize(
        self, x: Tensor, scale_row: Tensor, amax_row: Tensor, fmt: Format, recipe: GemmRecipe
    ) -> tuple[Tensor, Tensor]:
        amax = absolute_max(x)
        record_amax(amax_row, amax)
        scaling = recipe.scaling
        if scaling.granularity is Granularity.tensor:
            scale = step_scale(amax, scale_row, fmt.max, scaling, recipe.delayed)
            return saturating_cast(x, scale, fmt), scale.reciprocal()
        if scaling.granularity is Granularity.row:
            top = _amax_along(x, -1)
            scale = scale_from_amax(top, fmt.max, scaling.margin, scaling.power_of_two)
            # a row of zeros must not count among the largest scales of wgrad
            return saturating_cast(x, scale, fmt), torch.where(top == 0, 0.0, scale.reciprocal())
        tiles = _tile(x, 1, BLOCK)  # [R, 1, blocks, 128]
        scale = scale_from_amax(_amax_along(tiles, (-3, -1)), fmt.max, scaling.margin, scaling.power_of_two)
        return _untile(saturating_cast(tiles, scale, fmt), x), scale.reciprocal().view(*x.shape[:-1], tiles.shape[-2])

    def quantize_grad(
        self, dy: Tensor, scale_row: Tensor, amax_row: Tensor, recipe: GemmRecipe, place: Tensor | None = None
    ) -> GradOperand:
        """Return dy [R, N] in FP8; wgrad derives its operand from `exact` and `data`."""
        return GradOperand(dy, *self.quantize(dy, scale_row, amax_row, recipe.grad, recipe, place))

    def quantize_weight(
        self,
        master: Tensor,
        scale_row: Tensor,
        amax_row: Tensor,
        fmt: Format,
        recipe: GemmRecipe,
        out: WeightOperand | None,
        transposed: bool = True,
    ) -> WeightOperand:
        fresh = self._quantize_weight(master.to(torch.bfloat16), scale_row, amax_row, fmt, recipe)
        if out is None:
            return fresh
        for old, new in zip(out, fresh, strict=True):
            if old is not None and new is not None:
                old.copy_(new)
        return out

    def quantize_part(
        self, part: Tensor, scale: Tensor, amax_row: Tensor, fmt: Format, recipe: GemmRecipe
    ) -> tuple[Tensor, Tensor]:
        made = self._quantize_weight(part.to(torch.bfloat16), scale, amax_row, fmt, recipe.with_given_scale)
        assert made.scale_inv is not None
        return made.data, made.scale_inv

    def weight_operand(
        self, data: Tensor, scale_inv: Tensor, recipe: GemmRecipe, out: WeightOperand | None, transposed: bool
    ) -> WeightOperand:
        return WeightOperand(data, scale_inv) if out is None else out

    def _quantize_weight(
        self, w: Tensor, scale_row: Tensor, amax_row: Tensor, fmt: Format, recipe: GemmRecipe
    ) -> WeightOperand:
        scaling = recipe.scaling
        amax = _amax_along(w, (-2, -1)).view(scale_row.shape)
        record_amax(amax_row, amax)
        scale = step_scale(amax, scale_row, fmt.max, scaling, recipe.delayed)
        if scaling.granularity is Granularity.tensor:
            data = saturating_cast(w, scale if w.dim() == 2 else scale[:, None, None], fmt)
            return WeightOperand(data, scale.reciprocal())
        if scaling.granularity is Granularity.row:
            by_row, by_column = (
                scale_from_amax(_amax_along(w, dim), fmt.max, scaling.margin, scaling.power_of_two) for dim in (-1, -2)
            )
            copies = saturating_cast(w, by_row, fmt), saturating_cast(w, by_column, fmt)
            return WeightOperand(copies[0], by_row.reciprocal(), copies[1], by_column.reciprocal())
        tiles = _tile(w, BLOCK, BLOCK)
        scale = scale_from_amax(_amax_along(tiles, (-3, -1)), fmt.max, scaling.margin, scaling.power_of_two)
        return WeightOperand(_untile(saturating_cast(tiles, scale, fmt), w), scale.reciprocal().squeeze(-1).squeeze(-2))

    def forward(
        self, x: Tensor, x_inv: Tensor | None, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe
    ) -> Tensor:
        return self._nt(x, x_inv, weight.data, weight.scale_inv, offsets, recipe, transpose=True)

    def dgrad(self, dy: GradOperand, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe) -> Tensor:
        if weight.data_t is not None:
            return self._nt(dy.data, dy.scale_inv, weight.data_t, weight.scale_inv_t, offsets, recipe, transpose=False)
        return self._nt(dy.data, dy.scale_inv, weight.data, weight.scale_inv, offsets, recipe, transpose=False)

    def wgrad(
        self,
        dy: GradOperand,
        x: Tensor,
        x_inv: Tensor | None,
        offsets: Tensor | None,
        recipe: GemmRecipe,
        out: torch.dtype,
    ) -> Tensor:
        if dy.scale_inv is None or x_inv is None:
            return products.matmul_over_rows(dy.data, x, offsets, out)
        fast, granularity = recipe.sums_fast, recipe.scaling.granularity
        if granularity is Granularity.tensor:
            product = products.matmul_over_rows(
                fp8_values(dy.data), fp8_values(x), offsets, torch.float32, fast, narrow=True
            )
            return _scaled(product, dy.scale_inv, x_inv, out)
        if granularity is Granularity.row:
            (a, a_inv), (b, b_inv) = _recast_under_largest(dy.data, dy.scale_inv), _recast_under_largest(x, x_inv)
            product = products.matmul_over_rows(a, b, offsets, torch.float32, fast, narrow=True)
            return _scaled(product, a_inv, b_inv, out)
        x_read = _dequantize(x, x_inv, recipe)
        tile = _row_tiles(x.shape[0], offsets, x.device)
        x_tiles = _cast_in_row_tiles(x_read, tile, recipe.input, recipe)
        dy_tiles = _cast_in_row_tiles(dy.exact, tile, recipe.grad, recipe)
        return products.matmul_over_rows(dy_tiles, x_tiles, offsets, out, narrow=recipe.scaling.power_of_two)

    def _nt(
        self,
        a: Tensor,
        a_inv: Tensor | None,
        w: Tensor,
        w_inv: Tensor | None,
        offsets: Tensor | None,
        recipe: GemmRecipe,
        transpose: bool,
    ) -> Tensor:
        """Multiply a by w^T (transpose) or w; per group if offsets are given."""
        out = recipe.output.dtype
        if a_inv is None or w_inv is None:
            return products.matmul(a, w.mT if transpose else w, offsets, out)
        if recipe.scaling.granularity is Granularity.block:
            a, w = _dequantize(a, a_inv, recipe), _dequantize(w, w_inv, recipe)
            exact = recipe.scaling.power_of_two
            return products.matmul(a, w.mT if transpose else w, offsets, out, narrow=exact)
        a, w = fp8_values(a), fp8_values(w)
        product = products.matmul(a, w.mT if transpose else w, offsets, torch.float32, recipe.sums_fast, narrow=True)
        if offsets is None:
            return _scaled(product, a_inv, w_inv.view(1, -1) if w_inv.dim() else w_inv, out)
        group = torch.searchsorted(offsets, torch.arange(a.shape[0], device=a.device, dtype=offsets.dtype), right=True)
        of_row = w_inv.flatten(1 if w_inv.dim() > 1 else 0)[group.clamp_(max=offsets.shape[0] - 1)]
        return _scaled(product, a_inv, of_row if of_row.dim() > 1 else of_row[:, None], out)


def _amax_along(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the FP32 absolute maximum along dims, kept as dims of size one; 0 if they are empty."""
    if x.numel() == 0:
        dims = (dim,) if isinstance(dim, int) else dim
        shape = [1 if i - x.dim() in dims else size for i, size in enumerate(x.shape)]
        return torch.zeros(shape, device=x.device)
    return x.abs().amax(dim, keepdim=True).float()


def _tile(x: Tensor, rows: int, columns: int) -> Tensor:
    """Tile [..., R, C] into [..., ceil(R/rows), rows, ceil(C/columns), columns], padded with zeros. rows=1 tiles any
    leading shape."""
    x = x.unsqueeze(-2) if rows == 1 else x
    pad = -x.shape[-1] % columns, -x.shape[-2] % rows
    x = F.pad(x, (0, pad[0], 0, pad[1])) if any(pad) else x
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _untile(tiles: Tensor, like: Tensor) -> Tensor:
    """Invert `_tile`: remove the padding and return the shape of `like`."""
    x = tiles.flatten(-2).flatten(-3, -2)
    rows = like.shape[-2] if x.dim() == like.dim() else 1
    padded = rows != x.shape[-2] or like.shape[-1] != x.shape[-1]
    return (x[..., :rows, : like.shape[-1]].contiguous() if padded else x).view(like.shape)


def _scaled(product: Tensor, a_inv: Tensor, b_inv: Tensor, out: torch.dtype) -> Tensor:
    """Return product * a_inv * b_inv in `out`, rounded once.

    product: [..., R, N]. Inverse scales: [], or for product [R, N] one per row or column. On a CPU the float64 numbers
    of some rows at a time stay in its cache.
    """
    if product.device.type != "cpu" or torch.compiler.is_compiling():
        return _in_float64(product, a_inv, b_inv).to(out)
    in_rows = product.flatten(0, -2)
    scaled, count = torch.empty_like(in_rows, dtype=out), max(1, _IN_CACHE // max(1, product.shape[-1]))
    for start in range(0, len(in_rows), count):
        part = slice(start, start + count)
        a, b = (inv[part] if inv.dim() and len(inv) == len(in_rows) else inv for inv in (a_inv, b_inv))
        scaled[part] = _in_float64(in_rows[part], a, b)
    return scaled.view(product.shape)


def _in_float64(product: Tensor, a_inv: Tensor, b_inv: Tensor) -> Tensor:
    """Return product * a_inv * b_inv in float64, where products of two FP32 numbers are exact."""
    wide = product.double()
    if a_inv.dim() == b_inv.dim() == 0:
        return wide.mul_(a_inv.double() * b_inv)
    return wide.mul_(a_inv).mul_(b_inv)


def _values(data: Tensor, recipe: GemmRecipe) -> Tensor:
    """Return FP8 values that scales of blocks will multiply: FP32, or on a GPU BF16 where scales are powers of two, for
    its tensor cores. That is exact for results down to 2^-126."""
    values = fp8_values(data)
    return values if recipe.scaling.power_of_two else values.float()


def _dequantize(data: Tensor, scale_inv: Tensor, recipe: GemmRecipe) -> Tensor:
    """Return the values of block-scaled FP8 data."""
    values = _values(data, recipe)
    return values.mul_(spread(scale_inv.to(values.dtype), *data.shape))


def _recast_under_largest(data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Cast row-scaled FP8 data [R, C] again under the coarsest scale; return its FP8 numbers, and that scale."""
    largest = scale_inv.amax() if scale_inv.numel() else scale_inv.new_ones(())
    largest = torch.where(largest == 0, 1.0, largest)
    fmt = E4M3 if data.dtype == torch.float8_e4m3fn else E5M2
    return fp8_values(saturating_cast(fp8_values(data) * scale_inv, largest.reciprocal(), fmt)), largest


def _row_tiles(rows: int, offsets: Tensor | None, device: torch.device) -> tuple[Tensor, int]:
    """Return the index [R] of each row's 128-row tile, with tiles restarting in each group, and an upper bound of their
    number."""
    row = torch.arange(rows, device=device)
    if offsets is None:
        return row // BLOCK, -(-rows // BLOCK)
    ends = offsets.long()
    starts = F.pad(ends, (1, 0))[:-1]
    tiles = (ends - starts + BLOCK - 1) // BLOCK
    first_tile = F.pad(tiles.cumsum(0), (1, 0))[:-1]
    group = torch.searchsorted(ends, row, right=True).clamp_(max=offsets.shape[0] - 1)
    return first_tile[group] + (row - starts[group]) // BLOCK, rows // BLOCK + offsets.shape[0]


def _cast_in_row_tiles(x: Tensor, tile: tuple[Tensor, int], fmt: Format, recipe: GemmRecipe) -> Tensor:
    """Cast x [R, C] to FP8 in tiles of 128 rows by 1 column, and read it back."""
    scaling = recipe.scaling
    index, count = tile
    amax = x.new_zeros(count, x.shape[1], dtype=torch.float32)
    amax.scatter_reduce_(0, index[:, None].expand(-1, x.shape[1]), x.abs().float(), "amax")
    scale = scale_from_amax(amax, fmt.max, scaling.margin, scaling.power_of_two)[index]
    data = saturating_cast(x, scale, fmt)
    values = _values(data, recipe)
    return values.mul_(scale.reciprocal_().to(values.dtype))
