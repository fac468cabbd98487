"""The interface of a backend, which computes GEMMs, and its operands.

Shapes: R rows, K in features, N out features, G groups; offsets [G] int32 are the cumulative ends of each group's rows,
None for a plain linear. `scale_inv` None marks an operand that is not quantised.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from precision.formats import Format
from precision.rows import GemmRecipe


class WeightOperand(NamedTuple):
    """A weight prepared for its GEMMs. data [(G,) N, K]; scale_inv None if not quantised, else [], [G], [(G,) N, 1] or
    [(G,) ceil(N/128), ceil(K/128)].

    The *_t pair is a second copy of the same shape for the input gradient. It exists if row scales would vary along the
    gradient's sum (its scales are [(G,) 1, K] then), or if the tensor cores need the other memory order and the copy is
    kept (otherwise each backward pass makes it). scale_inv_t None: the copy is read with scale_inv. (A traced
    autograd.Function takes a tensor once: torch 2.13.)
    """

    data: Tensor
    scale_inv: Tensor | None = None
    data_t: Tensor | None = None
    scale_inv_t: Tensor | None = None

    @property
    def copy_scale_inv(self) -> Tensor | None:
        """Inverse scales of data_t."""
        return self.scale_inv if self.scale_inv_t is None else self.scale_inv_t


class GradOperand(NamedTuple):
    """An output gradient dy [R, N] prepared for its two GEMMs: data and scale_inv for dgrad; the *_t pair, if the
    backend makes one, for wgrad, which sums over rows. exact: dy as it arrived, or in the format of a GEMM that is not
    quantised."""

    exact: Tensor
    data: Tensor
    scale_inv: Tensor | None = None
    data_t: Tensor | None = None
    scale_inv_t: Tensor | None = None


class Backend(Protocol):
    """Computes the GEMMs of a plan row. `reference` defines the correct result; others are tested against it."""

    name: str

    def quantize(
        self,
        x: Tensor,
        scale_row: Tensor,
        amax_row: Tensor,
        fmt: Format,
        recipe: GemmRecipe,
        place: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return FP8 data of x's shape [..., K] and its inverse scales; record the amax. place: the slot's, passed to
        observers with the cast (see `observe`)."""
        ...

    def quantize_grad(
        self, dy: Tensor, scale_row: Tensor, amax_row: Tensor, recipe: GemmRecipe, place: Tensor | None = None
    ) -> GradOperand:
        """Return an output gradient [R, N] for both of its GEMMs; record the amax, and call observers as `quantize`
        does."""
        ...

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
        """Return FP8 of BF16(master) [N, K], or of a stack [G, N, K] with scales per expert; in the memory of `out` if
        given. transposed: with a copy in the other memory order, if the backend's input gradient reads one."""
        ...

    def quantize_part(
        self, part: Tensor, scale: Tensor, amax_row: Tensor, fmt: Format, recipe: GemmRecipe
    ) -> tuple[Tensor, Tensor]:
        """Return FP8 data and inverse scales of BF16(part), rows [n, K] of a weight or some experts [g, N, K] of a
        stack.

        They use given scales [] or [g] (tensor), or the blocks' own; the amax is raised. Row scales are not supported.
        """
        ...

    def weight_operand(
        self, data: Tensor, scale_inv: Tensor, recipe: GemmRecipe, out: WeightOperand | None, transposed: bool
    ) -> WeightOperand:
        """Return the operand of a weight [(G,) N, K] in FP8, in this memory. out: the previous one of the same memory.
        transposed: as for `quantize_weight`."""
        ...

    def forward(
        self, x: Tensor, x_inv: Tensor | None, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe
    ) -> Tensor:
        """Return y [R, N] = x w^T in recipe.output's dtype."""
        ...

    def dgrad(self, dy: GradOperand, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe) -> Tensor:
        """Return dx [R, K] = dy w in recipe.output's dtype."""
        ...

    def wgrad(
        self,
        dy: GradOperand,
        x: Tensor,
        x_inv: Tensor | None,
        offsets: Tensor | None,
        recipe: GemmRecipe,
        out: torch.dtype,
    ) -> Tensor:
        """Return dw = dy^T x, [N, K], or [G, N, K] for offsets [G], in `out`, FP32 or BF16.

        BF16: the FP32 sum rounded once, when it is stored. FP32: holds BF16 numbers where torch's product gives no
        more.
        """
        ...
