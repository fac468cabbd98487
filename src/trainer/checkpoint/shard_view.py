"""A rank's part of a tensor, described without a mesh: a box of the whole.

Ranks may share a tensor in any way (rows, whole experts, copies). A checkpoint only needs the shape of the whole, the
offsets of this rank's box, and which of the ranks with the same box writes it. Files therefore depend on no layout, and
any other number of ranks finds what it needs.
"""

from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShardView:
    """This rank's part of a tensor.

    data: the part. shape: of the whole. offsets: where the part begins in it, per dimension. writes: whether this rank
    saves it; exactly one rank with the same part does.
    """

    data: Tensor
    shape: torch.Size
    offsets: tuple[int, ...]
    writes: bool = True

    @classmethod
    def whole(cls, tensor: Tensor, writes: bool = True) -> Self:
        """Return a tensor that is not shared, as a part."""
        return cls(tensor, tensor.shape, (0,) * tensor.dim(), writes)

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no element of a non-empty tensor."""
        return self.data.numel() == 0 and prod(self.shape) > 0

    def size(self) -> torch.Size:
        """Shape of the whole, under a tensor's name for it."""
        return self.shape
