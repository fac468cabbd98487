"""torch.distributed.checkpoint (DCP) on safetensors and JSON.

DCP does the planning: which rank writes which piece of which tensor, and which pieces a rank must read to fill its own,
perhaps differently sharded, tensors. But DCP's FileSystemReader unpickles its metadata and every object that is not a
tensor, and its HuggingFaceStorageReader can keep only one piece of a tensor per file. So the storage below DCP is ours:

    rank00000.safetensors   the pieces that rank 0 wrote (one file for each rank that writes)
    tensors.json            {name: {"dtype", "shape", "pieces": [{"offsets", "shape", "file", "key"}]}}

A piece is a box of its tensor, given by offsets and shape. A tensor that is not sharded has one piece at offset zero,
and its key in the file is its name, so any safetensors reader can open the files of a single-process run.

safetensors (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length (little endian), a
JSON header {key: {"dtype", "shape", "data_offsets"}} padded with spaces to 8 bytes, then the tensors' bytes one after
the other. It is written by hand, because the library's `save_file` refuses tensors that share memory and cannot hash
while it writes; it is read with the library.
"""

import hashlib
import json
import os
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trainer.checkpoint.manifest import FileDigest, write_file

INDEX = "tensors.json"
_PIECE_BYTES = 1 << 24

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The supported dtypes and their names in a safetensors header."""

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(frozen=True)
class Stored:
    """Location of one piece. DCP carries it from the rank that wrote it to the coordinator, which writes the index."""

    file: str
    key: str
    digest: FileDigest
    """Of the whole file."""


def _piece(item: WriteItem) -> tuple[torch.dtype, ChunkStorageMetadata, torch.Size]:
    """Return dtype, box and whole shape of what `item` writes."""
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor: only tensors go through DCP, the rest goes to JSON")
    return item.tensor_data.properties.dtype, item.tensor_data.chunk, item.tensor_data.size


class SafetensorsWriter(StorageWriter):
    """DCP's writer: each rank writes its pieces into `folder`, which must exist; the coordinator then writes the index.

    After `torch.distributed.checkpoint.save`, `files` on the coordinator holds every file written, for the manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_name = ""
        self.files: dict[str, FileDigest] = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, rank: int = 0, **kwargs: Any) -> None:
        """Take this rank; DCP calls it."""
        self.file_name = f"rank{rank:05d}.safetensors"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces. Their bytes are on the disk when this returns."""
        written: Future[list[WriteResult]] = Future()
        # Large items first keep every tensor aligned to its item size, as safetensors recommends.
        items = sorted(plan.items, key=lambda item: (-_piece(item)[0].itemsize, item.index.fqn))
        if not items:
            written.set_result([])
            return written
        header: dict[str, dict[str, Any]] = {}
        keys: list[str] = []
        position = 0
        for item in items:
            dtype, box, whole = _piece(item)
            if dtype not in DTYPE_CODES:
                raise TypeError(f"{item.index.fqn} is {dtype}, which cannot be saved: convert it")
            name = item.index.fqn
            key = name if box.sizes == whole else f"{name}@{','.join(map(str, box.offsets))}"
            size = prod(box.sizes) * dtype.itemsize
            header[key] = {
                "dtype": DTYPE_CODES[dtype],
                "shape": list(box.sizes),
                "data_offsets": [position, position + size],
            }
            keys.append(key)
            position += size
        assert len(header) == len(items), "two pieces of one rank have the same key"
        digest = self._write_file(header, items, planner)
        written.set_result(
            [
                WriteResult(
                    index=item.index, size_in_bytes=digest.bytes, storage_data=Stored(self.file_name, key, digest)
                )
                for item, key in zip(items, keys, strict=True)
            ]
        )
        return written

    def _write_file(
        self, header: dict[str, dict[str, Any]], items: list[WriteItem], planner: SavePlanner
    ) -> FileDigest:
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        sha256 = hashlib.sha256()
        size = 0
        with (self.folder / self.file_name).open("wb") as file:

            def put(data: bytes | memoryview) -> None:
                nonlocal size
                file.write(data)
                sha256.update(data)
                size += len(data)

            put(struct.pack("<Q", len(text)))
            put(text)
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                for start in range(0, len(data), _PIECE_BYTES):
                    put(data[start : start + _PIECE_BYTES])
            file.flush()
            os.fsync(file.fileno())
        return FileDigest(size, sha256.hexdigest())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: write the index of all ranks' pieces."""
        stored: dict[MetadataIndex, Stored] = {result.index: result.storage_data for rank in results for result in rank}
        index: dict[str, dict[str, Any]] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            pieces = []
            for box in tensor.chunks:
                where = stored[MetadataIndex(name, box.offsets)]
                pieces.append(
                    {"offsets": list(box.offsets), "shape": list(box.sizes), "file": where.file, "key": where.key}
                )
            index[name] = {
                "dtype": DTYPE_CODES[tensor.properties.dtype],
                "shape": list(tensor.size),
                "pieces": pieces,
            }
        self.files = {where.file: where.digest for where in stored.values()}
        self.files[INDEX] = write_file(self.folder / INDEX, json.dumps(index))

    # The rest of DCP's interface does nothing here.

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return Path(checkpoint_id).is_dir()


class SafetensorsReader(StorageReader):
    """DCP's reader for files of SafetensorsWriter: fills existing tensors in place, whatever their sharding.

    A tensor must have the saved dtype: a silent conversion would not be a resume.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where: Mapping[MetadataIndex, dict[str, Any]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index as DCP metadata."""
        index = json.loads((self.folder / INDEX).read_text())
        tensors: dict[str, Any] = {}
        where: dict[MetadataIndex, dict[str, Any]] = {}
        for name, tensor in index.items():
            boxes = [
                ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["shape"]))
                for piece in tensor["pieces"]
            ]
            properties = TensorProperties(dtype=_DTYPES[tensor["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), boxes)
            where.update(
                {MetadataIndex(name, box.offsets): piece for box, piece in zip(boxes, tensor["pieces"], strict=True)}
            )
        return Metadata(state_dict_metadata=tensors, storage_data=where)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.where = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the planned boxes into the caller's tensors; files are memory-mapped, so only those boxes are read."""
        per_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            per_file[self.where[item.storage_index]["file"]].append(item)
        for name, items in per_file.items():
            with safe_open(self.folder / name, framework="pt") as file:
                for item in items:
                    saved = file.get_tensor(self.where[item.storage_index]["key"])
                    box = tuple(
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    target = planner.resolve_tensor(item).detach()
                    if target.dtype != saved.dtype:
                        raise TypeError(
                            f"{item.storage_index.fqn} was saved as {saved.dtype} and is to be read as {target.dtype}"
                        )
                    target.copy_(saved[box])
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return (Path(checkpoint_id) / INDEX).is_file()
