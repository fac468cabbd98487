"""Operand: a tensor prepared for the GEMMs that read it.

A norm's output feeds several GEMMs, some in FP8 and some in BF16 (`attn.q` and `attn.kv_a`). It must be quantised once,
by the kernel that makes it. So a fused op passes not a tensor but an Operand to a `Linear`: the FP8 data with its
scale, and the BF16 tensor beside it where one is needed. A `Feed` records, at construction, what the consumers of one
tensor need.

Autograd sees one edge, the `carrier`: the BF16 tensor itself if a consumer reads it, else a stand-in of its shape that
owns no memory. Consumers return the gradient of the *unquantised* tensor to it (straight-through, as in every FP8
recipe).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from precision.formats import read_back
from precision.rows import GemmRecipe
from precision.scaling import Slot


@dataclass
class Operand:
    """x [..., features] in the form that GEMMs read.

    carrier: autograd edge of x's shape; holds x's values only if `kept`. data: FP8 of x * scale, same shape. scale_inv:
    FP32, multiplies data to recover x: [] per tensor, [..., 1] per row, [..., ceil(features / 128)] per block.
    """

    carrier: Tensor
    data: Tensor
    scale_inv: Tensor
    kept: bool

    @property
    def tensor(self) -> Tensor:
        """The plain tensor beside the FP8 data; it exists if the Feed has a consumer that reads it."""
        assert self.kept, (
            "this Operand carries FP8 only: its Feed was made without tensor=True and without a BF16 consumer"
        )
        return self.carrier

    def read(self) -> Tensor:
        """Return the values of the FP8 data in FP32."""
        return read_back(self.data, self.scale_inv)

    @property
    def shape(self) -> torch.Size:
        """Shape of x."""
        return self.carrier.shape


register_pytree_node(  # FSDP finds a module's autograd edge by flattening its arguments
    Operand,
    lambda x: ([x.carrier, x.data, x.scale_inv], x.kept),
    lambda tensors, kept: Operand(*tensors, kept=kept),  # pyright: ignore[reportCallIssue]
)


class GradRows(NamedTuple):
    """Scale and amax row for an output gradient that has been FP8 before.

    scale: the one that it arrived with (0-d FP32; per tensor only). amax: receives the amax, which was recorded where
    the gradient was cast first. A second cast under the same scale, or the same power of two, leaves FP8 values
    unchanged.
    """

    scale: Tensor
    amax: Tensor


class Consumer(Protocol):
    """A layer that reads an operand: `Linear` or `GroupedLinear`."""

    input_slot: Slot | None
    recipe: GemmRecipe


class Feed:
    """The forms in which the consumers of one tensor need it: FP8 in which slot, the plain tensor, or both.

    Consumers in FP8 share one arena row and one quantisation. `tensor=True`: another consumer (a router) reads the
    plain tensor.
    """

    def __init__(self, *consumers: Consumer, tensor: bool = False):
        quantised = [c for c in consumers if c.input_slot is not None]
        self.slot: Slot | None = quantised[0].input_slot if quantised else None
        self.recipe: GemmRecipe | None = quantised[0].recipe if quantised else None
        self.backend: str | None = consumers[0].recipe.backend if consumers else None
        self.wants_tensor = tensor or len(quantised) < len(consumers)
        for consumer in quantised:
            consumer.input_slot = self.slot


def placeholder(like: Tensor) -> Tensor:
    """Return a tensor of the shape and dtype of `like` that owns no memory: an autograd edge without values."""
    return like.new_zeros(()).expand(like.shape)
