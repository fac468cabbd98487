"""A folder in Hugging Face's layout, ours or DeepSeek's, -> a checkpoint that a run can start from.

    OUT/  checkpoints/step_00000000/      FP32 masters; run.init_from=OUT
          configs/model/imported.yaml     --config-dir OUT/configs model=imported
          tokenizer.json ...              data.tokenizer=OUT/tokenizer.json

FP32 masters keep the numbers: FP32 and BF16 exactly, FP8 times its scales in FP32 (exact with power-of-two scales; else
rounded once, as every loader does). The scales are also kept in the checkpoint, so that an export of it returns the
same FP8.

The checkpoint is one file, written front to back. A piece of it is some rows of a source tensor: they pass through
memory one after the other, as in `hf_export`. All names, shapes and formats are checked before anything is written.
Everything is written into OUT.partial, which is renamed when it is complete.
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from models import ModelConfig
from models.config import plain_model
from models.hf import from_hf_config, matrices, mtp_copies, shapes
from precision.errors import UserError
from trainer.checkpoint.folder import checkpoint_name
from trainer.checkpoint.state_tree import split
from trainer.checkpoint.storage import Piece, finish, write_pieces
from trainer.config.data import TOKENIZER
from trainer.config.paths import as_typed
from trainer.config.schema import fit
from trainer.files import check_new, new_folder
from trainer.offline.hf_fp8 import SCALE_SUFFIX, SCALES, dequantize, grid_shape
from trainer.offline.hf_tokenizer import FILES, GENERATION, SETTINGS, TOKEN_IDS, copy_files, write_json
from trainer.offline.row_reader import TILE, HfFolder, row_steps

PLAIN = ("F32", "BF16", "F16")
FP8 = "F8_E4M3"
SCALE_FORMATS = ("F32", "F8_E8M0")
CONFIG_NAME = "imported"
DERIVED = "rotary_emb.inv_freq"
"""Tensors of old files that follow from config.json."""


@dataclass(frozen=True)
class Imported:
    """The result of an import. model: its config. tokenizer, end_of_text: its tokenizer.json and the token that ends a
    text, if the folder had them. fp8: number of tensors that came in FP8."""

    folder: Path
    model: ModelConfig
    tokenizer: Path | None
    end_of_text: str | None
    fp8: int
    remarks: list[str]

    @property
    def overrides(self) -> list[str]:
        """Return the arguments of train.py that start from it, quoted for a shell."""
        words = [f"--config-dir {shlex.quote(str(self.folder / 'configs'))}", f"model={CONFIG_NAME}"]
        words.append(as_typed("run.init_from", str(self.folder)))
        if self.tokenizer is not None:
            words.append(as_typed("data.tokenizer", str(self.tokenizer)))
        if self.end_of_text is not None:
            words.append(as_typed("data.end_of_text", self.end_of_text))
        return words


def import_hf(source: Path, out: Path, settings: Mapping[str, Any] | None = None) -> Imported:
    """Create `out`, which must not exist, from the folder `source`. Raises UserError if that is not such a model.

    settings: a config tree as of a run, with which scripts compute the model (none: they cannot).
    """
    folder = HfFolder(source)
    check_new(out)
    remarks: list[str] = []
    model = _model(folder, remarks)
    _check_fp8(folder)
    wanted = _check(folder, model)
    end = _end_of_text(folder)
    _check_copies(folder, model)
    scaled = [name for name in wanted if folder.dtype(name) == FP8]
    with new_folder(out) as made:
        checkpoint = made / "checkpoints" / checkpoint_name(0)
        checkpoint.mkdir(parents=True)
        has_tokenizer = TOKENIZER in copy_files(source, made)
        config = None if settings is None else _config(settings, model, end)
        _write(checkpoint, folder, model, scaled, config)
        choice = made / "configs" / "model" / f"{CONFIG_NAME}.yaml"
        choice.parent.mkdir(parents=True)
        choice.write_text(f"# Imported from {source.name!r}.\n" + yaml.safe_dump(plain_model(model), sort_keys=False))
        _keep_token_ids(folder, made)
    return Imported(out, model, out / TOKENIZER if has_tokenizer else None, end, len(scaled), remarks)


def _config(settings: Mapping[str, Any], model: ModelConfig, end_of_text: str | None) -> dict[str, Any]:
    """Return settings with this model, in sequences of up to 4,096 tokens."""
    data: dict[str, Any] = {} if end_of_text is None else {"end_of_text": end_of_text}
    sizes = {"sequence_length": min(4096, model.max_position_embeddings), "global_batch_size": 1, "microbatch_size": 1}
    sections = {"model": plain_model(model), "data": settings["data"] | data, "trainer": settings["trainer"] | sizes}
    return {**settings, **sections}


def _model(folder: HfFolder, remarks: list[str]) -> ModelConfig:
    """Return the model's config; without multi-token prediction if the files have none, even if config.json has it."""
    path, most = folder.folder / "config.json", len(folder.names())
    try:
        config = from_hf_config(folder.config)
        config = fit(plain_model(config), ModelConfig, lambda key, value: key)  # each value has its type
    except UserError as error:
        raise UserError(f"{folder.folder}: {error}") from None
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); is it DeepSeek's?") from None
    with_experts = max(config.num_layers - config.num_dense_layers, 0) + config.num_mtp_layers
    if (least := config.num_layers + with_experts * config.num_experts) > most:  # before names are derived from them
        what = f"layers and their experts have {least:,} tensors or more, and the files {most:,}"
        raise UserError(f"{path}: {what}; the two do not match")
    first = f"model.layers.{config.num_layers}."
    if config.num_mtp_layers and not any(name.startswith(first) for name in folder.names()):
        remarks.append(f"config.json has num_nextn_predict_layers={config.num_mtp_layers}, the files lack these layers")
        return replace(config, num_mtp_layers=0)
    return config


def _check_fp8(folder: HfFolder) -> None:
    """Raise UserError for numbers that are not scaled in 128 x 128 blocks."""
    given = folder.config.get("quantization_config")
    if given is None:
        return
    if not isinstance(given, dict):
        raise UserError(f"{folder.folder / 'config.json'}: quantization_config is not an object; fetch the file again")
    expected = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [TILE, TILE]}
    for key, value in expected.items():
        if given.get(key, "e4m3" if key == "fmt" else None) != value:
            where = f"{folder.folder / 'config.json'}: quantization_config.{key}={given.get(key)}"
            raise UserError(f"{where}; only {value} can be read; import the BF16 weights of this model")


def _check(folder: HfFolder, model: ModelConfig) -> list[str]:
    """Raise UserError unless the folder has exactly this model's tensors, in shapes and formats that can be read.
    Returns the names of the weights."""
    have = {name for name in folder.names() if not name.endswith(DERIVED)}
    copies = {copy for copy, _ in mtp_copies(model)}
    known = shapes(model)
    wanted: list[str] = []
    for matrix in matrices(model):
        part = matrix.part_shape(known[matrix.name])
        for name in matrix.hf_names:
            if name not in have:
                raise UserError(f"{folder.folder}: lacks {name}; fetch the folder again, all files of it")
            wanted.append(name)
            _check_tensor(folder, name, part, have)
    for name in copies & have:
        _check_tensor(folder, name, (model.vocab_size, model.hidden_size), have)
    scales = {name + SCALE_SUFFIX for name in [*wanted, *copies] if name in have and folder.dtype(name) == FP8}
    if unknown := sorted(have - set(wanted) - copies - scales):
        raise UserError(f"{folder.folder}: has {unknown[0]}, which its config.json does not explain; is it complete?")
    return wanted


def _check_tensor(folder: HfFolder, name: str, shape: tuple[int, ...], have: set[str]) -> None:
    def expect(name: str, shape: tuple[int, ...], formats: Iterable[str]) -> None:
        where = f"{folder.folder}: {name} is {folder.dtype(name)} {list(folder.shape(name))}"
        if folder.shape(name) != shape:
            raise UserError(f"{where}, by config.json it is {list(shape)}; the two do not match")
        if folder.dtype(name) not in formats:
            raise UserError(f"{where}; only {', '.join(formats)} can be read")

    expect(name, shape, (*PLAIN, FP8) if len(shape) == 2 else PLAIN)
    if folder.dtype(name) == FP8:
        scale = name + SCALE_SUFFIX
        if scale not in have:
            raise UserError(f"{folder.folder}: lacks {scale}, the scales of FP8 weights; fetch the folder again")
        expect(scale, grid_shape((shape[0], shape[1])), SCALE_FORMATS)


def _check_copies(folder: HfFolder, model: ModelConfig) -> None:
    """Raise UserError if MTP has an embedding or a head of its own: ours shares the model's."""
    for copy, original in mtp_copies(model):
        if copy in folder.names():
            for rows in row_steps(model.vocab_size, model.hidden_size):
                if not torch.equal(_rows(folder, copy, rows), _rows(folder, original, rows)):
                    raise UserError(f"{folder.folder}: {copy} differs from {original}, which MTP shares here")


def _rows(folder: HfFolder, name: str, rows: slice) -> Tensor:
    """Return some rows of a weight in FP32, from the start of a block on."""
    found = folder.rows(name, rows).float()
    if folder.dtype(name) == FP8:
        scales = folder.rows(name + SCALE_SUFFIX, slice(rows.start // TILE, -(-rows.stop // TILE)))
        found = dequantize(found, scales)
    if not found.isfinite().all():
        raise UserError(f"{folder.folder}: {name} has numbers that are not finite; fetch the folder again")
    return found


def _write(
    checkpoint: Path, folder: HfFolder, model: ModelConfig, scaled: list[str], config: dict[str, Any] | None
) -> None:
    pieces: list[Piece] = []
    known = shapes(model)
    for matrix in matrices(model):
        shape = known[matrix.name]
        height, *width = matrix.part_shape(shape)
        above = [] if matrix.expert is None else [matrix.expert]
        for i, name in enumerate(matrix.hf_names):
            for rows in row_steps(height, prod(width)):
                offsets = *above, i * height + rows.start, *(0 for _ in width)
                sizes = *(1 for _ in above), rows.stop - rows.start, *width
                load = partial(_rows, folder, name, rows)
                pieces.append(Piece(f"model/{matrix.name}", torch.float32, shape, offsets, sizes, load))
    state: dict[str, Any] = {"model": {name: torch.empty(shape, device="meta") for name, shape in known.items()}}
    if scaled:
        state[SCALES] = {}
    for name in scaled:
        shape = grid_shape((folder.shape(name)[0], folder.shape(name)[1]))
        load = partial(_scales, folder, name)
        pieces.append(Piece(f"{SCALES}/{name}", torch.float32, shape, (0, 0), shape, load))
        state[SCALES][name] = torch.empty(shape, device="meta")

    meta = {"model": plain_model(model), "precision": "fp32", "source": str(folder.folder)}
    meta |= {} if config is None else {"config": config}
    text = json.dumps({"step": 0, "meta": meta, "state": split(state)[0]}, indent=1)
    finish(checkpoint, [write_pieces(checkpoint / "rank00000.safetensors", pieces)], text)


def _scales(folder: HfFolder, name: str) -> Tensor:
    scale = name + SCALE_SUFFIX
    return folder.rows(scale, slice(0, folder.shape(scale)[0])).float()


def _end_of_text(folder: HfFolder) -> str | None:
    """Return the token that ends a text, from tokenizer_config.json; None without a tokenizer."""
    there = [name for name in FILES if (folder.folder / name).is_file()]
    settings = {name: folder.json(name) for name in there}
    token = settings.get(SETTINGS, {}).get("eos_token") if TOKENIZER in there else None
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and (not isinstance(token, str) or not token.isprintable() or "${" in token):
        raise UserError(f"{folder.folder / SETTINGS}: eos_token={token!r} is not the text of a token; correct it")
    return token


def _keep_token_ids(folder: HfFolder, made: Path) -> None:
    """Add token ids that only config.json has to generation_config.json, from which an export takes them."""
    recorded = folder.json(GENERATION) if (folder.folder / GENERATION).is_file() else {}
    ids = {key: folder.config[key] for key in TOKEN_IDS if folder.config.get(key) is not None}
    if ids.keys() - recorded.keys():
        write_json(made / GENERATION, {**ids, **recorded})
