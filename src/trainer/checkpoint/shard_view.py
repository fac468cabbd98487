"""A rank's part of a tensor, described without a mesh: a box of the whole.

Ranks may share a tensor in any way (rows, whole experts, copies). A checkpoint only needs the shape of the whole, the
offsets of this rank's box, and which of the ranks with the same box writes it. Files therefore depend on no layout, and
any other number of ranks finds what it needs. The planners below are torch.distributed.checkpoint's own, for such
parts.
"""

from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


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

    @property
    def box(self) -> ChunkStorageMetadata:
        """Offsets and sizes, in DCP's type."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.data.shape)

    def size(self) -> torch.Size:
        """Shape of the whole, for DCP."""
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # for DCP
        return [self.box]


class ShardSavePlanner(DefaultSavePlanner):
    """Plans what each rank writes of its parts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """Return a plan of the parts that this rank writes."""
        parts: dict[str, ShardView] = self.state_dict
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, part.box.offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(part.box, TensorProperties(dtype=part.data.dtype), part.shape),
                )
                for name, part in parts.items()
                if part.writes and not part.is_empty
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to write for `index`."""
        return self.state_dict[index.fqn].data


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans which boxes on the disk fill a rank's parts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, ShardView], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """`state_dict`: parts by name."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to fill for `index`."""
        return self.state_dict[index.fqn].data
