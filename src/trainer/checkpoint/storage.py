"""The tensors of a checkpoint, in safetensors files and an index.

    rank00000.safetensors   the pieces that rank 0 wrote (one file for each rank that writes)
    tensors.json            {name: {"dtype", "shape", "pieces": [{"offsets", "shape", "file", "key"}]}}

A piece is a box of its tensor, given by offsets and shape. A tensor that is not sharded has one piece at offset zero,
and its key in the file is its name, so any safetensors reader can open the files of a single-process run. A rank that
resumes fills its own boxes, perhaps of another sharding, from the pieces that overlap them.

safetensors (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length (little endian), a
JSON header {key: {"dtype", "shape", "data_offsets"}} padded with spaces to 8 bytes, then the tensors' bytes one after
the other. It is written by hand, because the library's `save_file` refuses tensors that share memory and cannot hash
while it writes; it is read with the library.
"""

import hashlib
import json
import os
import shutil
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor

from trainer.checkpoint.manifest import STATE, FileDigest, write_file, write_manifest
from trainer.checkpoint.shard_view import ShardView
from trainer.files import sync_folder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
U = TypeVar("U")
Index = dict[str, dict[str, Any]]
Files = dict[str, FileDigest]

INDEX = "tensors.json"
SEEN = 30.0
"""Seconds within which other ranks' files must become visible to rank 0; network file systems lag."""
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
class Piece:
    """A box of the tensor `name`, to be written. whole: shape of the tensor. load: returns the box's elements."""

    name: str
    dtype: torch.dtype
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def key(self) -> str:
        """Its name in the file."""
        return self.name if self.shape == self.whole else f"{self.name}@{','.join(map(str, self.offsets))}"


def write_pieces(path: Path, pieces: Sequence[Piece]) -> tuple[Index, Files]:
    """Write a file of pieces; none if there are no pieces. Returns its part of the index, and its digest by its name.
    The bytes are on the disk when this returns."""
    index: Index = {}
    for piece in pieces:
        if piece.dtype not in DTYPE_CODES:
            raise TypeError(f"{piece.name} is {piece.dtype}, which cannot be saved: convert it")
        tensor = {"dtype": DTYPE_CODES[piece.dtype], "shape": list(piece.whole), "pieces": []}
        where = {"offsets": list(piece.offsets), "shape": list(piece.shape), "file": path.name, "key": piece.key}
        index.setdefault(piece.name, tensor)["pieces"].append(where)
    if not pieces:
        return index, {}
    ordered = sorted(pieces, key=lambda piece: piece.name)
    header, starts = header_of([(piece.key, piece.dtype, piece.shape) for piece in ordered])
    ordered.sort(key=lambda piece: starts[piece.key])
    return index, {path.name: _write(path, header, ordered)}


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], more: Mapping[str, Any] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return the beginning of a safetensors file of these tensors, key, dtype and shape, and where each begins behind
    it. more: other entries of the header."""
    header, starts, position = dict(more or {}), dict[str, int](), 0
    # large items first keep every tensor aligned to its item size, as safetensors recommends
    for key, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):
        assert key not in header, f"two tensors of a file have the name {key}"
        starts[key], end = position, position + prod(shape) * dtype.itemsize
        header[key] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, starts


def _write(path: Path, header: bytes, pieces: Iterable[Piece]) -> FileDigest:
    sha256 = hashlib.sha256()
    with path.open("wb") as file:

        def put(data: bytes | memoryview) -> None:
            file.write(data)
            sha256.update(data)

        put(header)
        for piece in pieces:
            box = piece.load().detach().cpu().reshape(piece.shape).contiguous()
            data = box.view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _PIECE_BYTES):
                put(data[start : start + _PIECE_BYTES])
        file.flush()
        os.fsync(file.fileno())
        return FileDigest(file.tell(), sha256.hexdigest())


def finish(folder: Path, written: Iterable[tuple[Index, Files]], text: str) -> Files:
    """Complete a folder in which all files of pieces are: index, state (`text`), manifest. Returns all files' digests.

    written: what `write_pieces` returned for each file. Waits until files of other ranks are visible here.
    """
    index: Index = {}
    files: Files = {}
    for tensors, digests in written:
        files |= digests
        for name, tensor in tensors.items():
            index.setdefault(name, {**tensor, "pieces": []})["pieces"] += tensor["pieces"]
    for name, tensor in index.items():
        covered = sum(prod(piece["shape"]) for piece in tensor["pieces"])
        assert covered == prod(tensor["shape"]), f"{name}: the ranks' pieces do not add up to the tensor"
    files[INDEX] = write_file(folder / INDEX, json.dumps(index))
    files[STATE] = write_file(folder / STATE, text)
    for name, digest in files.items():
        _see(folder / name, digest)
    write_manifest(folder, files)
    return files


def _see(path: Path, digest: FileDigest) -> None:
    """Raise OSError unless this rank sees the file in its full size."""
    deadline = time.monotonic() + SEEN
    while not path.is_file() or path.stat().st_size != digest.bytes:
        if time.monotonic() > deadline:
            why = f"{path.name} was written by another rank and is not in {path.parent}"
            raise OSError(f"{why}; all nodes need run.dir on a file system that they share")
        time.sleep(0.1)


def save_parts(
    temporary: Path, path: Path, parts: Mapping[str, ShardView], text: str, group: "ProcessGroup | None" = None
) -> Files | None:
    """Write these parts of this rank, by name, into `temporary`, which becomes `path` when it is a complete checkpoint.
    text: the state as JSON. Returns, on rank 0, the digests of all files.

    group: of all ranks that save; None: this one alone. Raises errors as `_coordinate` does.
    """
    rank = 0 if group is None else group.rank()
    pieces = [
        Piece(name, part.data.dtype, part.shape, part.offsets, part.data.shape, lambda part=part: part.data)
        for name, part in parts.items()
    ]

    def create(_: list[None]) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def complete(written: list[tuple[Index, Files]]) -> Files:
        files = finish(temporary, written, text)
        temporary.rename(path)
        sync_folder(path.parent)
        return files

    _coordinate(group, lambda: None, create)
    return _coordinate(group, lambda: write_pieces(temporary / f"rank{rank:05d}.safetensors", pieces), complete)


def _coordinate(group: "ProcessGroup | None", each: Callable[[], T], first: Callable[[list[T]], U]) -> U | None:
    """Run `each` on every rank, then `first` with their results on rank 0, and return what that returns (None on other
    ranks). A collective.

    Raises errors of any rank on all ranks: OSError names the rank; other errors are raised as they are on their rank,
    and as DistError on the others.
    """
    if group is None:
        return first([each()])
    import torch.distributed as dist

    rank, mine = group.rank(), _attempt(each)
    results: list[Any] | None = [None] * group.size() if rank == 0 else None
    dist.gather_object(mine, results, group=group, group_dst=0)
    failed: dict[int, Exception] = {}
    answer: Any = None
    if results is not None:
        failed = {number: result for number, result in enumerate(results) if isinstance(result, Exception)}
        answer = None if failed else _attempt(lambda: first(results))
        if isinstance(answer, Exception):
            failed[0] = answer
    box = [failed]
    dist.broadcast_object_list(box, group=group, group_src=0)
    for number, error in box[0].items():
        if isinstance(error, OSError):
            raise OSError(f"rank {number}: {error.strerror or error}") from error
        if rank in box[0]:
            raise box[0][rank]
        raise dist.DistError(f"rank {number} could not save: {error}") from error
    return cast(U | None, answer)


def _attempt(work: Callable[[], T]) -> T | Exception:
    try:
        return work()
    except Exception as error:
        return error


class SavedTensors:
    """The tensors of a checkpoint, whichever ranks wrote them. Does not verify it.

    Files are mapped into memory while their boxes are copied out, and only then: the process holds only what it read.
    (An open mapping would count as the process's memory, page by page, until it holds the file.)
    """

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint
        self._index: Index = json.loads((checkpoint / INDEX).read_text())

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def names(self, branch: str = "") -> list[str]:
        """Return names of the tensors; those in a branch of the state, without the branch."""
        stem = f"{branch}/" if branch else ""
        return [name.removeprefix(stem) for name in self._index if name.startswith(stem)]

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size(self._index[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._index[name]["dtype"]]

    def read(self, name: str) -> Tensor:
        """Read the whole tensor."""
        shape = self.shape(name)
        return self._box(name, [0] * len(shape), shape)

    def rows(self, name: str, expert: int | None, rows: slice) -> Tensor:
        """Read some rows of a tensor, or of the matrix of one expert in a stack."""
        shape, count = self.shape(name), rows.stop - rows.start
        if expert is None:
            return self._box(name, [rows.start, *(0 for _ in shape[1:])], [count, *shape[1:]])
        return self._box(name, [expert, rows.start, 0], [1, count, shape[2]])[0]

    def _box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        box = torch.empty(*sizes, dtype=self.dtype(name)) if sizes else torch.empty((), dtype=self.dtype(name))
        self.fill({name: ShardView(box, self.shape(name), tuple(offsets))})
        return box

    @torch.no_grad()
    def fill(self, parts: Mapping[str, ShardView]) -> None:
        """Fill these parts by name from the pieces that overlap them, converted to the dtypes of the parts."""
        for file_name, copies in self.plan(parts).items():
            with safe_open(self._folder / file_name, framework="pt") as file:
                for key, box, target in copies:
                    target.copy_(file.get_tensor(key)[box])

    def plan(self, parts: Mapping[str, ShardView]) -> dict[str, list[tuple[str, tuple[slice, ...], Tensor]]]:
        """Return the copies that fill these parts, by file: key of a piece, box of it, target."""
        copies = defaultdict(list)
        for name, part in parts.items():
            missing = part.data.numel()
            for piece in self._index[name]["pieces"] if missing else ():
                sides = zip(part.offsets, part.data.shape, piece["offsets"], piece["shape"], strict=True)
                common = [(max(o, p), min(o + n, p + m)) for o, n, p, m in sides]
                if any(start >= stop for start, stop in common):
                    continue
                here, there = (
                    tuple(
                        slice(start - origin, stop - origin)
                        for (start, stop), origin in zip(common, origins, strict=True)
                    )
                    for origins in (part.offsets, piece["offsets"])
                )
                copies[piece["file"]].append((piece["key"], there, part.data[here]))
                missing -= prod(stop - start for start, stop in common)
            assert missing == 0, f"{name}: pieces in {INDEX} do not cover it"
        return copies
