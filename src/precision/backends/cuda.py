"""The cuda backend: Hopper's FP8 tensor cores (sm_90), with kernels that cast each tensor once.

    granularity   Linear                                       GroupedLinear
    any FP8       torch._scaled_mm (cuBLAS)                     kernels.grouped_gemm
    BF16          torch.mm                                      torch._grouped_mm

Operands equal those of `reference` for the same numbers, with two differences of layout: a weight's `data_t` is stored
transposed (contiguous along the input gradient's sum), and an output gradient comes with a transposed copy. x is saved
as FP8 rows and transposed in the backward pass.

A `GroupedLinear` on its own takes rows without gaps and moves them into tiles and back. `precision.ffn` holds the rows
of a whole expert layer in tiles and avoids these moves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precision.backends.interface import GradOperand, WeightOperand
from precision.config import Granularity
from precision.formats import Format
from precision.kernels import ffn_ops, ops
from precision.kernels.common import MODES, Cast, by_block
from precision.kernels.gemm_ops import grouped_nt, grouped_wgrad
from precision.kernels.scaled_mm import plain_wgrad, scaled_nt, scaled_wgrad
from precision.kernels.weights import cast_weight, transpose_weight
from precision.observe import is_observed, show
from precision.rows import GemmRecipe

_grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["CudaBackend", "cast_of", "ffn_ops"]  # ffn_ops registers the operators of whole layers


def cast_of(recipe: GemmRecipe, fmt: Format) -> Cast:
    """Return how tensors of a recipe are cast into `fmt`."""
    scaling = recipe.scaling
    return Cast(fmt, MODES[scaling.granularity], recipe.delayed, scaling.margin, scaling.power_of_two)


class CudaBackend:
    """See the module docstring; the interface is `precision.backends.interface.Backend`."""

    name = "cuda"

    def quantize(
        self,
        x: Tensor,
        scale_row: Tensor,
        amax_row: Tensor,
        fmt: Format,
        recipe: GemmRecipe,
        place: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return FP8 data of x's shape and its inverse scales; record the amax. (The operator calls the observer.)"""
        data, inv = ops.cast(x.reshape(-1, x.shape[-1]), scale_row, amax_row, cast_of(recipe, fmt).text, place)
        data, inv = data.view(x.shape), inv.unflatten(0, x.shape[:-1]) if inv.dim() else inv
        if is_observed():
            show(place, x, data, inv, fmt)
        return data, inv

    def quantize_grad(
        self, dy: Tensor, scale_row: Tensor, amax_row: Tensor, recipe: GemmRecipe, place: Tensor | None = None
    ) -> GradOperand:
        """Return dy [R, N] in FP8 with its transposed copy, in one pass where scales allow it."""
        how = cast_of(recipe, recipe.grad).text
        data, inv, data_t, inv_t = ops.cast_transposed(dy, scale_row, amax_row, how, place)
        if is_observed():
            show(place, dy, data, inv, recipe.grad)
        return GradOperand(dy, data, inv, data_t, inv if inv_t.numel() == 0 else inv_t)

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
        """Return BF16(master) in FP8 and, if kept, its transposed copy, both viewed as [(G,) N, K]."""
        # with scales of rows the copy for the input gradient has scales, and so numbers, of its own
        transposed, into = transposed or recipe.scaling.granularity is Granularity.row, None
        if out is not None and (out.data_t is not None) == transposed:
            assert out.scale_inv is not None and out.copy_scale_inv is not None
            data_t = out.data.new_empty(0) if out.data_t is None else out.data_t.mT
            into = out.data, out.scale_inv, data_t, out.copy_scale_inv
        data, inv, data_t, inv_t = cast_weight(master, scale_row, amax_row, cast_of(recipe, fmt), into, transposed)
        return WeightOperand(data, inv, data_t.mT if transposed else None, None if inv_t is inv else inv_t)

    def quantize_part(
        self, part: Tensor, scale: Tensor, amax_row: Tensor, fmt: Format, recipe: GemmRecipe
    ) -> tuple[Tensor, Tensor]:
        how = cast_of(recipe.with_given_scale, fmt)
        data, inv, _, _ = cast_weight(part, scale, amax_row, how, None, transposed=False)
        return data, inv

    def weight_operand(
        self, data: Tensor, scale_inv: Tensor, recipe: GemmRecipe, out: WeightOperand | None, transposed: bool
    ) -> WeightOperand:
        """Return the operand of a weight in FP8 and, if kept, its transposed copy."""
        if out is None:
            inv_t = None if recipe.scales_tensors else scale_inv.mT.contiguous()
            data_t = data.new_empty(data.mT.shape).mT if transposed else None
            out = WeightOperand(data, scale_inv, data_t, inv_t)
        elif out.scale_inv_t is not None:
            out.scale_inv_t.copy_(scale_inv.mT)
        if out.data_t is not None:
            transpose_weight(data, out.data_t.mT)
        return out

    def forward(
        self, x: Tensor, x_inv: Tensor | None, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe
    ) -> Tensor:
        return self._nt(x, x_inv, weight.data, weight.scale_inv, offsets, recipe)

    def dgrad(self, dy: GradOperand, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe) -> Tensor:
        if dy.scale_inv is None:
            return self._nt(dy.data, None, weight.data.mT, None, offsets, recipe)
        w_t = ops.transpose_weight(weight.data) if weight.data_t is None else weight.data_t.mT
        return self._nt(dy.data, dy.scale_inv, w_t, weight.copy_scale_inv, offsets, recipe)

    def wgrad(
        self,
        dy: GradOperand,
        x: Tensor,
        x_inv: Tensor | None,
        offsets: Tensor | None,
        recipe: GemmRecipe,
        out: torch.dtype,
    ) -> Tensor:
        """Return dw [N, K], or [G, N, K] for offsets [G], in `out` (torch's grouped BF16 product supports only
        BF16)."""
        if dy.data_t is None or dy.scale_inv_t is None or x_inv is None:
            if offsets is not None:
                return _grouped_mm(dy.data.t(), x, offs=offsets).to(out)
            return plain_wgrad(dy.data, x, out)
        x_inv = by_block(x_inv)
        if offsets is not None:
            return grouped_wgrad(
                dy.data, dy.scale_inv, dy.exact, x, x_inv, offsets,
                cast_of(recipe, recipe.grad).text, cast_of(recipe, recipe.input).text, out, recipe.sums_fast,
            )  # fmt: skip
        x_t, x_t_inv = ops.transpose(x, x_inv, cast_of(recipe, recipe.input).text)
        x_t_inv = x_inv if x_t_inv.numel() == 0 else x_t_inv
        mode = MODES[recipe.scaling.granularity]
        return scaled_wgrad(dy.data_t, dy.scale_inv_t, x_t, x_t_inv, mode, out, recipe.sums_fast)

    def _nt(
        self,
        a: Tensor,
        a_inv: Tensor | None,
        w: Tensor,
        w_inv: Tensor | None,
        offsets: Tensor | None,
        recipe: GemmRecipe,
    ) -> Tensor:
        """Multiply a [R, K] by w [(G,) N, K]^T, both contiguous along K."""
        out = recipe.output.dtype
        if a_inv is None or w_inv is None:
            if offsets is not None:
                return _grouped_mm(a, w.mT, offs=offsets).to(out)
            if out != a.dtype and a.is_cuda:
                return torch.mm(a, w.t(), out_dtype=out)
            return (a.to(out) @ w.to(out).t()) if out != a.dtype else a @ w.t()
        a_inv = by_block(a_inv)
        if offsets is not None:
            how = cast_of(recipe, recipe.input).text
            return grouped_nt(a, a_inv, w, w_inv, offsets, how, recipe.sums_fast).to(out)
        return scaled_nt(a, a_inv, w, w_inv, MODES[recipe.scaling.granularity], out, recipe.sums_fast)
