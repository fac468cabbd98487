"""Operand: a tensor made ready for the GEMMs that read it.

A norm's output feeds several GEMMs, some in FP8 and some in BF16 (`attn.q` and `attn.kv_a`), and must be quantised
once, by the kernel that makes it. So what travels from a fused op to a `Linear` is not a tensor but an Operand: the FP8
data with its scale, and perhaps the BF16 tensor beside it. A `Feed` records, at construction, what the consumers of one
tensor need.

Autograd sees one edge, the `carrier`: the BF16 tensor itself if a consumer reads it, else a stand-in of its shape that
owns no memory. Consumers return the gradient of the *unquantised* tensor to it (straight-through, as every FP8 recipe
does).
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
    """x [..., features] as GEMMs want it.

    carrier: autograd edge of x's shape; holds x's values only if `kept`. data: FP8 of x * scale, same shape. scale_inv:
    FP32, what data is multiplied by to read it: [] per tensor, [..., 1] per row, [..., ceil(features / 128)] per block.
    """

    carrier: Tensor
    data: Tensor
    scale_inv: Tensor
    kept: bool

    @property
    def tensor(self) -> Tensor:
        """The plain tensor beside the FP8 data; exists if the Feed has a consumer that reads it."""
        assert self.kept, (
            "this Operand carries FP8 only: its Feed was made without tensor=True and without a BF16 consumer"
        )
        return self.carrier

    def read(self) -> Tensor:
        """The numbers that the FP8 data stand for, FP32."""
        return read_back(self.data, self.scale_inv)

    @property
    def shape(self) -> torch.Size:
        """Shape of x."""
        return self.carrier.shape


register_pytree_node(  # who hooks into a module's backward pass by its arguments (FSDP) has to find the autograd edge
    Operand,
    lambda x: ([x.carrier, x.data, x.scale_inv], x.kept),
    lambda tensors, kept: Operand(*tensors, kept=kept),  # pyright: ignore[reportCallIssue]
)


class GradRows(NamedTuple):
    """What an output gradient is cast with that has been FP8 already, on its way here: the scale that it came with (0-d
    FP32; a scale a tensor only) and a place for its amax, which was recorded where it was cast first.

    Cast again under the same scale, or the same power of two, a number that was FP8 comes out as it went in.
    """

    scale: Tensor
    amax: Tensor


class Consumer(Protocol):
    """A layer that reads an operand: `Linear` or `GroupedLinear`."""

    input_slot: Slot | None
    recipe: GemmRecipe


class Feed:
    """What the consumers of one tensor need of it: FP8 in which slot, the plain tensor, or both.

    Consumers in FP8 come to share one arena row and one quantisation. `tensor=True`: another consumer (a router)
    reads the plain tensor.
    """

    def __init__(self, *consumers: Consumer, tensor: bool = False):
        quantised = [c for c in consumers if c.input_slot is not None]
        self.slot: Slot | None = quantised[0].input_slot if quantised else None
        self.recipe: GemmRecipe | None = quantised[0].recipe if quantised else None
        self.backend: str | None = consumers[0].recipe.backend if consumers else None
        self.wants_tensor = tensor or len(quantised) < len(consumers)
        for consumer in quantised:
            consumer.input_slot = self.slot


def stand_in(like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of `like` that owns no memory: an autograd edge without values."""
    return like.new_zeros(()).expand(like.shape)
