"""Writing and reading the tensors of a checkpoint through torch.distributed.checkpoint (DCP).

Importing DCP takes two seconds: a run imports this file when it first saves or resumes.
"""

import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import DistError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult

from trainer.checkpoint.manifest import STATE, FileDigest, write_file, write_manifest
from trainer.checkpoint.shard_view import ShardView
from trainer.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from trainer.files import sync_folder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SEEN = 30.0
"""Seconds within which other ranks' files must become visible to rank 0; network file systems lag."""

# DCP warns even with no_dist=True.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class ShardSavePlanner(DefaultSavePlanner):
    """Plans to write a rank's parts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """Return a plan that writes all parts."""
        parts: dict[str, ShardView] = self.state_dict
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, part.box.offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(part.box, TensorProperties(dtype=part.data.dtype), part.shape),
                )
                for name, part in parts.items()
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


class CheckpointWriter(SafetensorsWriter):
    """The storage of one checkpoint: `temporary` until rank 0 has seen all files complete, `path` from then on.

    DCP raises an error of any rank on all ranks.
    """

    def __init__(self, temporary: Path, path: Path, text: str) -> None:
        super().__init__(temporary)
        self._path, self._text = path, text

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, rank: int = 0, **kwargs: Any) -> None:
        """On rank 0, create the folder before the others may write."""
        super().set_up_storage_writer(is_coordinator, rank=rank)
        if is_coordinator:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all ranks have written their files: make the folder a checkpoint."""
        super().finish(metadata, results)
        self.files[STATE] = write_file(self.folder / STATE, self._text)
        for name, digest in self.files.items():
            _see(self.folder / name, digest)
        write_manifest(self.folder, self.files)
        self.folder.rename(self._path)
        sync_folder(self._path.parent)


def _see(path: Path, digest: FileDigest) -> None:
    """Raise OSError unless this rank sees the file in its full size."""
    deadline = time.monotonic() + SEEN
    while not path.is_file() or path.stat().st_size != digest.bytes:
        if time.monotonic() > deadline:
            why = f"{path.name} was written by another rank and is not in {path.parent}"
            raise OSError(f"{why}; all nodes need run.dir on a file system that they share")
        time.sleep(0.1)


def save_parts(
    writer: SafetensorsWriter, parts: Mapping[str, ShardView], group: "ProcessGroup | None" = None
) -> dict[str, FileDigest]:
    """Write these parts of this rank, by name, through DCP. Returns, on rank 0, the digests of all files written.

    group: of all ranks that save; None: this one alone. Raises errors on all ranks: OSError names the rank; other
    errors are raised as they are on their rank, and as DistError on the others.
    """
    try:
        dcp_save(
            dict(parts),
            storage_writer=writer,
            planner=ShardSavePlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as failure:
        error, rank = _cause(failure), min(failure.failures)
        if group is not None and isinstance(error, OSError):
            raise OSError(f"rank {rank}: {error.strerror or error}") from failure
        if group is not None and group.rank() not in failure.failures:
            raise DistError(f"rank {rank} could not save: {error}") from failure
        raise error from failure
    return writer.files


def saved_tensors(reader: SafetensorsReader) -> dict[str, TensorStorageMetadata]:
    """Sizes and dtypes of the whole tensors in a checkpoint, by name."""
    saved = reader.read_metadata().state_dict_metadata
    return {name: tensor for name, tensor in saved.items() if isinstance(tensor, TensorStorageMetadata)}


def load_parts(reader: SafetensorsReader, parts: dict[str, ShardView]) -> None:
    """Fill this rank's parts by name, from the boxes that overlap them. Raises the first error of a file."""
    here = {name: part for name, part in parts.items() if not part.is_empty}
    try:
        dcp_load(here, storage_reader=reader, planner=ShardLoadPlanner(), no_dist=True)
    except CheckpointException as failure:
        raise _cause(failure) from failure


def _cause(failure: CheckpointException) -> BaseException:
    """Return the first rank's error, which DCP wraps."""
    return failure.failures[min(failure.failures)][0]
