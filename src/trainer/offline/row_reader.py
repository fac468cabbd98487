"""Reads tensors a few rows at a time from a Hugging Face folder, so that a model may exceed memory.

A file is mapped into memory, the rows are copied out, and the mapping is closed again: the process holds only the
current rows. (An open mapping would count as the process's memory, page by page, until it holds the file.)
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from precision.errors import UserError

STEP_BYTES = 1 << 26
"""Bytes of FP32 rows that are processed at a time."""
TILE = 128
"""Steps are multiples of this many rows, the block size of FP8 scales."""

HF_INDEX = "model.safetensors.index.json"
HF_SINGLE = "model.safetensors"


def row_steps(rows: int, columns: int) -> Iterator[slice]:
    """Yield ranges of rows that cover a matrix [rows, columns], about STEP_BYTES of FP32 each."""
    step = max(STEP_BYTES // (4 * max(columns, 1)) // TILE, 1) * TILE
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


class Entry(NamedTuple):
    """A tensor of a folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class HfFolder:
    """The tensors of a folder in Hugging Face's layout. Raises UserError, naming the file, for what cannot be read."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give one with config.json and *.safetensors")
        self.folder = folder
        self.config = self.json("config.json")
        self._entries: dict[str, Entry] = {}
        for name, wanted in sorted(self._files().items()):
            found = self._scan(name)
            if lacking := sorted(wanted - found.keys()):
                raise UserError(f"{folder / name} lacks {lacking[0]}, which {HF_INDEX} has in it; fetch it again")
            self._entries |= {tensor: found[tensor] for tensor in wanted or found}

    def names(self) -> set[str]:
        return set(self._entries)

    def dtype(self, name: str) -> str:
        """Return the dtype as safetensors spells it: F32, BF16, F8_E4M3."""
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def rows(self, name: str, rows: slice) -> Tensor:
        """Read some rows of a tensor, in its dtype."""
        with safe_open(self.folder / self._entries[name].file, framework="pt") as file:
            found = file.get_slice(name)[rows]
            copy = found.clone()
            del found
        return copy

    def json(self, name: str) -> Mapping[str, Any]:
        path = self.folder / name
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            raise UserError(f"{self.folder}: no {name} in it; give a folder in Hugging Face's layout") from None
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error}); fetch the file again") from None
        if not isinstance(content, dict):
            raise UserError(f"{path}: not a JSON object; fetch the file again")
        return content

    def _files(self) -> dict[str, set[str]]:
        """Return the tensors of each file, by its name; an empty set for all that it has."""
        if (self.folder / HF_INDEX).is_file():
            index = self.json(HF_INDEX).get("weight_map")
            if not isinstance(index, dict):
                raise UserError(f"{self.folder / HF_INDEX}: has no weight_map; fetch the file again")
            files: dict[str, set[str]] = defaultdict(set)
            for tensor, name in index.items():
                files[name].add(tensor)
            return files
        if (self.folder / HF_SINGLE).is_file():
            return {HF_SINGLE: set()}
        raise UserError(f"{self.folder}: neither {HF_INDEX} nor {HF_SINGLE} in it; only safetensors can be read")

    def _scan(self, name: str) -> dict[str, Entry]:
        """Return the tensors of a file by name."""
        try:
            with safe_open(self.folder / name, framework="pt") as file:
                parts = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118 (it is no dict)
                return {t: Entry(name, part.get_dtype(), tuple(part.get_shape())) for t, part in parts.items()}
        except FileNotFoundError:
            raise UserError(f"{self.folder / name} is missing; fetch it again") from None
        except Exception as error:  # the library raises no narrower class
            raise UserError(f"{self.folder / name}: cannot be read ({error}); fetch it again") from None
