"""The interface of a backend, which computes GEMMs, and the operands that it exchanges with layers.

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
    """A weight ready for its GEMMs. data [(G,) N, K]; scale_inv None if not quantised, else [], [G], [(G,) N, 1] or
    [(G,) ceil(N/128), ceil(K/128)].

    The *_t pair is what the input gradient reads where it needs a copy of its own, of the same shape: because row
    scales would vary along its sum ([(G,) 1, K] then), or because the tensor cores want the other order in memory.
    scale_inv_t None: the copy is read with scale_inv. (A traced autograd.Function takes a tensor once: torch 2.13.)
    """

    data: Tensor
    scale_inv: Tensor | None = None
    data_t: Tensor | None = None
    scale_inv_t: Tensor | None = None

    @property
    def copy_scale_inv(self) -> Tensor | None:
        """What data_t is read with."""
        return self.scale_inv if self.scale_inv_t is None else self.scale_inv_t


class GradOperand(NamedTuple):
    """An output gradient dy [R, N] ready for its two GEMMs: data and scale_inv for dgrad; the *_t pair, if the backend
    makes one, for wgrad, which sums over rows. exact: dy as it came, or in the format of a GEMM that is not quantised.
    """

    exact: Tensor
    data: Tensor
    scale_inv: Tensor | None = None
    data_t: Tensor | None = None
    scale_inv_t: Tensor | None = None


class Backend(Protocol):
    """Who serves the GEMMs of a plan row. `reference` is the definition of right; others are tested against it."""

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
        """FP8 data of x's shape [..., K] and its inverse scales; records the amax. place: the slot's, passed to
        observers with the cast (see `observe`)."""
        ...

    def quantize_grad(
        self, dy: Tensor, scale_row: Tensor, amax_row: Tensor, recipe: GemmRecipe, place: Tensor | None = None
    ) -> GradOperand:
        """An output gradient [R, N] for both of its GEMMs; records the amax, and calls observers as `quantize` does."""
        ...

    def quantize_weight(
        self,
        master: Tensor,
        scale_row: Tensor,
        amax_row: Tensor,
        fmt: Format,
        recipe: GemmRecipe,
        out: WeightOperand | None,
    ) -> WeightOperand:
        """FP8 of BF16(master) [N, K], or of a stack [G, N, K] with scales of its own for each expert; in the memory of
        `out` if given."""
        ...

    def quantize_part(
        self, part: Tensor, scale: Tensor, amax_row: Tensor, fmt: Format, recipe: GemmRecipe
    ) -> tuple[Tensor, Tensor]:
        """FP8 data and inverse scales of BF16(part), rows [n, K] of a weight or some experts [g, N, K] of a stack,
        under given scales [] or [g] (tensor), or its blocks' own; raises the amax. Not for row scales."""
        ...

    def weight_operand(
        self, data: Tensor, scale_inv: Tensor, recipe: GemmRecipe, out: WeightOperand | None, backward: bool
    ) -> WeightOperand:
        """The operand of a weight [(G,) N, K] in FP8, in this memory. out: the one made of the same memory before.
        backward: whether a backward pass will read it; else what only that reads is memory without content."""
        ...

    def forward(
        self, x: Tensor, x_inv: Tensor | None, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe
    ) -> Tensor:
        """y [R, N] = x w^T in recipe.output's dtype."""
        ...

    def dgrad(self, dy: GradOperand, weight: WeightOperand, offsets: Tensor | None, recipe: GemmRecipe) -> Tensor:
        """dx [R, K] = dy w in recipe.output's dtype."""
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
        """dw [N, K], or [G, N, K] for offsets [G], = dy^T x in `out`, FP32 or BF16.

        BF16: the FP32 sum rounded once, as it is stored. FP32: holds BF16 numbers where torch's product gives no more.
        """
        ...
