"""A rank's part of a tensor, described without a mesh: a box of the whole.

Ranks may share a tensor in any way (rows of it, whole experts of it, copies of it): what a checkpoint needs to know of
it is the whole's shape, where this rank's box begins, and which of the ranks that hold the same box writes it. So what
is on the disk depends on no layout, and any other number of ranks finds what it needs.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


@dataclass(frozen=True)
class ShardView:
    """This rank's part of a tensor.

    data: the part. shape: of the whole. offsets: where the part begins in it, one number a dimension. writes: whether
    this rank saves it; of those that hold the same part, one does.
    """

    data: Tensor
    shape: torch.Size
    offsets: tuple[int, ...]
    writes: bool = True

    @classmethod
    def whole(cls, tensor: Tensor, writes: bool = True) -> Self:
        """A tensor that is not shared, as a part."""
        return cls(tensor, tensor.shape, (0,) * tensor.dim(), writes)

    @property
    def is_empty(self) -> bool:
        """Whether this rank has nothing of a tensor that has something."""
        return self.data.numel() == 0 and prod(self.shape) > 0

    @property
    def box(self) -> "ChunkStorageMetadata":
        """Offsets and sizes, in DCP's type."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # two seconds, which no start waits for

        return ChunkStorageMetadata(torch.Size(self.offsets), self.data.shape)

    def size(self) -> torch.Size:
        """Shape of the whole; DCP asks."""
        return self.shape

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":  # DCP asks
        return [self.box]
