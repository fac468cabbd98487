"""A checkpoint -> a folder in the layout of Hugging Face, which transformers loads; in little memory, without a GPU.

    config.json   model-0000x-of-0000y.safetensors   model.safetensors.index.json
    tokenizer.json   tokenizer_config.json   special_tokens_map.json   generation_config.json

The content of each file is known before anything is read: names from `models.hf`, shapes from the config. So a file is
created with its header, and the weights pass through a few rows at a time, from any rank's file to their place: memory
holds only those rows, whatever the model's size.

ExportFormat: `fp32` exports the masters, `bf16` the compute weights, BF16(master). `fp8` exports in FP8 what the run
multiplied in FP8 (`hf_fp8`), and BF16 for the rest. Router biases are always FP32.

Everything is written into OUT.partial, which is renamed when it is complete.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import ModelConfig
from models.hf import Matrix, matrices, mtp_copies, shapes, to_hf_config
from precision.errors import UserError
from trainer.checkpoint.storage import SavedTensors, header_of
from trainer.files import check_new, new_folder
from trainer.offline.hf_fp8 import SCALE_SUFFIX, Quantizer, grid_shape, listed
from trainer.offline.hf_tokenizer import TokenizerSource, write_json
from trainer.offline.row_reader import HF_INDEX, TILE, row_steps


class ExportFormat(Enum):
    """Format of the exported weights."""

    bf16 = "bf16"
    fp32 = "fp32"
    fp8 = "fp8"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Unit:
    """One of our matrices, and its exported form: weights, and their scales beside them. They share a file."""

    matrix: Matrix
    weights: list[Entry]
    scales: list[Entry]

    @property
    def entries(self) -> list[Entry]:
        return [*self.weights, *self.scales]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


@dataclass(frozen=True)
class Exported:
    """Description of what was written. left: layers that computed in FP8 and are exported in BF16; see `hf_fp8`."""

    folder: Path
    files: int
    tensors: int
    bytes: int
    fp8_share: float
    """Share of all numbers."""
    left: list[str]


def export(
    checkpoint: Path,
    out: Path,
    model: ModelConfig,
    numbers: ExportFormat,
    tokenizer: TokenizerSource | None,
    *,
    quantizer: Quantizer | None = None,
    mtp: bool = False,
    max_file_bytes: int = 5 * 10**9,
) -> Exported:
    """Write the folder `out`, which must not exist, from a verified checkpoint of `model`.

    quantizer: for ExportFormat.fp8, and only for it. mtp: include the blocks of multi-token prediction. Raises
    UserError for a model without such a form in Hugging Face's layout; then nothing has been written.
    """
    check_new(out)
    config = model if mtp else replace(model, num_mtp_layers=0)
    description = to_hf_config(config)
    saved = SavedTensors(checkpoint)
    _check_shapes(saved, config, checkpoint)
    quantizer = quantizer if numbers is ExportFormat.fp8 else None
    plain = torch.float32 if numbers is ExportFormat.fp32 else torch.bfloat16
    units = list(_units(config, plain, quantizer))
    if tokenizer is not None:
        description |= tokenizer.token_ids()
    description |= {"dtype": _name(plain), "torch_dtype": _name(plain), "use_cache": True}
    if quantizer is not None:
        description["quantization_config"] = _quantization(units, quantizer)

    files = _files(units, max_file_bytes)
    with new_folder(out) as folder:
        for i, inside in enumerate(files, start=1):
            with _File(folder / _file_name(i, len(files)), [e for unit in inside for e in unit.entries]) as file:
                for unit in inside:
                    _move(unit, saved, file, quantizer)
        where = {
            entry.name: _file_name(i, len(files))
            for i, inside in enumerate(files, start=1)
            for unit in inside
            for entry in unit.entries
        }
        total = sum(unit.bytes for unit in units)
        write_json(folder / HF_INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
        write_json(folder / "config.json", description)
        if tokenizer is not None:
            tokenizer.write(folder, model.max_position_embeddings)
    weights = [weight for unit in units for weight in unit.weights]
    fp8 = sum(prod(weight.shape) for weight in weights if weight.dtype == torch.float8_e4m3fn)
    left = [] if quantizer is None else quantizer.left
    return Exported(out, len(files), len(where), total, fp8 / sum(prod(w.shape) for w in weights), left)


def _units(config: ModelConfig, plain: torch.dtype, quantizer: Quantizer | None) -> Iterator[Unit]:
    known, copied = shapes(config), dict[str, Matrix]()
    for matrix in matrices(config):
        copied[matrix.hf_names[0]] = matrix
        yield _unit(matrix, known[matrix.name], plain, quantizer)
    for copy, original in mtp_copies(config):
        matrix = replace(copied[original], hf_names=(copy,))
        yield _unit(matrix, known[matrix.name], plain, quantizer)


def _unit(matrix: Matrix, shape: tuple[int, ...], plain: torch.dtype, quantizer: Quantizer | None) -> Unit:
    part = matrix.part_shape(shape)
    if quantizer is None or not quantizer.is_fp8(matrix):
        dtype = torch.float32 if matrix.name.endswith(".bias") else plain
        return Unit(matrix, [Entry(name, dtype, part) for name in matrix.hf_names], [])
    weights = [Entry(name, torch.float8_e4m3fn, part) for name in matrix.hf_names]
    scales = [Entry(name + SCALE_SUFFIX, torch.float32, grid_shape(part)) for name in matrix.hf_names]
    return Unit(matrix, weights, scales)


def _move(unit: Unit, saved: SavedTensors, file: "_File", quantizer: Quantizer | None) -> None:
    """Read a matrix a few rows at a time, convert them, and write them to their place."""
    name, expert = f"model/{unit.matrix.name}", unit.matrix.expert
    for i, weight in enumerate(unit.weights):
        height, width = weight.shape[0], prod(weight.shape[1:])
        for rows in row_steps(height, width):
            below = slice(i * height + rows.start, i * height + rows.stop)
            master = saved.rows(name, expert, below)
            if not unit.scales:
                file.put(weight, rows.start, master.to(weight.dtype))
                continue
            assert quantizer is not None
            data, scale_inv = quantizer.quantize(unit.matrix, i, rows, master)
            file.put(weight, rows.start, data)
            file.put(unit.scales[i], rows.start // TILE, scale_inv)


def _check_shapes(saved: SavedTensors, config: ModelConfig, checkpoint: Path) -> None:
    for name, shape in shapes(config).items():
        stored = f"model/{name}"
        if stored not in saved or saved.shape(stored) != shape:
            there = list(saved.shape(stored)) if stored in saved else "missing"
            raise UserError(f"{checkpoint}: {name} is {there}, not {list(shape)}; the checkpoint is incomplete")


def _quantization(units: list[Unit], quantizer: Quantizer) -> dict[str, Any]:
    """Return the quantization_config of config.json."""
    apart = {name: None for unit in units if not unit.scales for name in listed(unit.matrix)}  # in order, each once
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [TILE, TILE],
        **({"scale_fmt": "ue8m0"} if quantizer.power_of_two else {}),
        "modules_to_not_convert": list(apart),
    }


def _files(units: list[Unit], most: int) -> list[list[Unit]]:
    """Distribute units over files of at most `most` bytes, in order; a larger unit has a file of its own."""
    files: list[list[Unit]] = []
    size = most
    for unit in units:
        if not files or size + unit.bytes > most:
            files.append([])
            size = 0
        files[-1].append(unit)
        size += unit.bytes
    return files


def _file_name(i: int, count: int) -> str:
    return f"model-{i:05d}-of-{count:05d}.safetensors"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _File:
    """A safetensors file whose tensors come in any order, a few rows at a time (the format: `storage`)."""

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        tensors = [(entry.name, entry.dtype, entry.shape) for entry in entries]
        header, self._start = header_of(tensors, {"__metadata__": {"format": "pt"}})
        self._missing = sum(entry.bytes for entry in entries)
        self._base = len(header)
        self._file = path.open("wb")
        self._file.write(header)

    def put(self, entry: Entry, first_row: int, rows: Tensor) -> None:
        """Write rows of a tensor, from `first_row` on."""
        assert rows.dtype == entry.dtype
        data = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
        row_bytes = entry.bytes // entry.shape[0]
        self._file.seek(self._base + self._start[entry.name] + first_row * row_bytes)
        self._file.write(data)
        self._missing -= len(data)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        with self._file as file:
            if kind is None:
                assert self._missing == 0, "a file lacks rows"
                file.flush()
                os.fsync(file.fileno())
