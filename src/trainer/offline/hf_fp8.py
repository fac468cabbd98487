"""Weights in FP8 as DeepSeek publishes them: X.weight in E4M3, X.weight_scale_inv in FP32, one for each 128 x 128.

    w [r, c] = X.weight [r, c] * X.weight_scale_inv [r // 128, c // 128]      the grid: [ceil(R / 128), ceil(C / 128)]

A run exports what it computes with, so its own quantiser makes it, from BF16(master) as always:

    scaling       exported FP8
    block         the run's own, bit for bit
    tensor        the run's own, bit for bit: its scale (of the amax history, in delayed scaling) in every block
    row           under power-of-two scales of blocks instead of rows: the same numbers, except those so far below
                  their block's largest that they become subnormal

Loaders read only whole blocks: a matrix with a side that is not a multiple of 128 stays in BF16. So do the head and
MTP's projection, which no loader reads in FP8. Loaders treat a layer's experts as one module: in FP8 all or none.
`modules_to_not_convert` lists the modules that they would wrongly take for FP8.

Weights that came in FP8 (`hf_import`), experts if all of their layer did, are exported in the very same FP8: their
scales are kept beside the weights.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from models import DeepSeek, ModelConfig
from models.hf import Matrix
from precision import GroupedLinear, Linear, Plan, PrecisionConfig, ScalingArena
from precision.backends import get_backend
from precision.backends.availability import te_scaling
from precision.config import BackendChoice, Granularity, Method, Precision
from precision.errors import UserError
from precision.formats import E4M3, saturating_cast, spread
from precision.rows import TE
from precision.scaling import absolute_max, scale_from_amax
from trainer.checkpoint.reading import STATE
from trainer.checkpoint.storage import SavedTensors
from trainer.offline.row_reader import TILE, row_steps

SCALE_SUFFIX = "_scale_inv"
EXPERTS = ".experts."  # in the names of routed experts' weights, ours and theirs
SCALES = "fp8_scale_inv"
"""Branch of an imported checkpoint's state: scales of weights that came in FP8, by Hugging Face's name."""


def grid_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix."""
    rows, columns = shape
    return -(-rows // TILE), -(-columns // TILE)


def dequantize(data: Tensor, scale_inv: Tensor) -> Tensor:
    """Convert FP8 rows [R, C], from the start of a block, with their scales to FP32. Exact with power-of-two scales."""
    return data.float().mul_(spread(scale_inv.float(), *data.shape))


class Quantizer(Protocol):
    """Makes the FP8 of an export."""

    left: list[str]
    """Layers that computed in FP8 and are exported in BF16, because loaders could not read them otherwise."""
    power_of_two: bool
    """Whether all scales are powers of two."""

    def is_fp8(self, matrix: Matrix) -> bool:
        """Return whether this matrix is exported in FP8."""
        ...

    def quantize(self, matrix: Matrix, part: int, rows: slice, master: Tensor) -> tuple[Tensor, Tensor]:
        """Return FP8 and scales of FP32 rows of the matrix's part `theirs[part]`. The rows begin with a block."""
        ...


class RunQuantizer:
    """Quantises weights by a run's recipe. precision, backends: from config.yaml and backends.json.

    Raises UserError if nothing of the run can be exported in FP8.
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: PrecisionConfig,
        backends: Mapping[str, Any],
        saved: SavedTensors,
        path: Path,
    ) -> None:
        anywhere = replace(precision, backend=BackendChoice.reference, never_slower=False)
        plan = Plan(anywhere, model.num_layers)
        with torch.device("meta"):
            net = DeepSeek(model, plan)
        self._saved, self._rows, chosen = saved, plan.gemms, backends.get("rows", {})
        self._layers = {name: m for name, m in net.named_modules() if isinstance(m, Linear | GroupedLinear)}
        slots = [slot for layer in self._layers.values() for slot in layer.slots()]
        arena = ScalingArena(slots, precision.scaling, plan.delayed, "cpu")
        if plan.delayed and plan.fp8_share:
            names = json.loads((path / STATE).read_text())["state"]["arena"]["names"]
            arena.load_state_dict({"names": names, "history": saved.read("arena/history")})
        self.power_of_two = precision.scaling.power_of_two
        self._scaling = {
            name: te_scaling(precision.scaling) if chosen.get(name, {}).get("backend") == TE else precision.scaling
            for name in plan.gemms
        }
        wanted = {
            name
            for name, row in plan.gemms.items()
            if row.recipe.is_fp8 and chosen.get(name, {}).get("precision", "fp8") == Precision.fp8.value
        }
        self._fp8 = {name for name in wanted if self._fits(name)}
        self._fp8 -= {name for name in self._fp8 if EXPERTS in name and not _experts(name) <= self._fp8}
        self.left = sorted(wanted - self._fp8)
        self._scales: dict[tuple[str, int | None], Tensor] = {}
        if not self._fp8:
            unfit = "no FP8 layer has both sides divisible by"
            why = f"{unfit} {TILE} ({self.left[0]})" if wanted else "nothing ran in FP8"
            raise UserError(f"--dtype fp8: {path}, trained as {precision.name}: {why}; use --dtype bf16")

    def is_fp8(self, matrix: Matrix) -> bool:
        """Return whether it computed in FP8, and loaders can read it."""
        return _row(matrix) in self._fp8

    def quantize(self, matrix: Matrix, part: int, rows: slice, master: Tensor) -> tuple[Tensor, Tensor]:
        name = _row(matrix)
        scaling = self._scaling[name]
        recipe = replace(self._rows[name].recipe, scaling=scaling)
        if scaling.granularity is Granularity.tensor:
            scale = self._scale_of_tensor(matrix)
        else:
            scale = torch.zeros(())  # blocks have their own
            recipe = replace(recipe, scaling=replace(scaling, granularity=Granularity.block, method=Method.current))
        data, inverse = get_backend("reference").quantize_part(master, scale, torch.zeros(()), E4M3, recipe)
        return data, inverse.new_empty(grid_shape((data.shape[0], data.shape[1]))).copy_(inverse)

    def _scale_of_tensor(self, matrix: Matrix) -> Tensor:
        """Return the one scale of a matrix, from its history, else from its own amax; 0-d."""
        key = matrix.name, matrix.expert
        if key not in self._scales:
            name = _row(matrix)
            slot, scaling = self._layers[name].weight_slot, self._scaling[name]
            assert slot is not None and slot.scale is not None
            known = slot.scale if matrix.expert is None else slot.scale[matrix.expert]
            if scaling.method is Method.current or not known > 0:
                stored = f"model/{matrix.name}"
                height, width = self._saved.shape(stored)[-2:]
                parts = (self._saved.rows(stored, matrix.expert, rows) for rows in row_steps(height, width))
                amax = torch.stack([absolute_max(part.to(torch.bfloat16)) for part in parts]).amax()
                known = scale_from_amax(amax, E4M3.max, scaling.margin, scaling.power_of_two)
            self._scales = {key: known}  # the next ones are of another matrix
        return self._scales[key]

    def _fits(self, name: str) -> bool:
        """Return whether loaders read it in FP8: a supported kind, and each part consists of whole blocks."""
        row = self._rows[name]
        if row.op in ("lm_head", "mtp.proj"):
            return False
        height = row.out_features // (2 if name.endswith(".gate_up") else 1)
        return height % TILE == 0 and row.in_features % TILE == 0


class KeptQuantizer:
    """Reproduces the FP8 in which weights came. Raises UserError if none did."""

    def __init__(self, saved: SavedTensors, path: Path) -> None:
        self._saved = saved
        self._scales = {name: saved.read(f"{SCALES}/{name}") for name in saved.names(SCALES)}
        self._of_experts = Counter(name.partition(EXPERTS)[0] for name in self._scales if EXPERTS in name)
        if not self._scales:
            raise UserError(f"--dtype fp8: {path} was not imported from FP8; use --dtype bf16")
        self.left: list[str] = []
        self.power_of_two = all(bool((torch.frexp(scale)[0] == 0.5).all()) for scale in self._scales.values())

    def is_fp8(self, matrix: Matrix) -> bool:
        """Return whether all of it came in FP8; of experts, all three matrices of all of a layer."""
        layer, is_expert, _ = matrix.hf_names[0].partition(EXPERTS)
        if is_expert and self._of_experts[layer] < 3 * self._saved.shape(f"model/{matrix.name}")[0]:
            return False
        return all(name in self._scales for name in matrix.hf_names)

    def quantize(self, matrix: Matrix, part: int, rows: slice, master: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise with the old scales: numbers get their old codes, although FP32 has rounded the products."""
        scale_inv = self._scales[matrix.hf_names[part]][rows.start // TILE : -(-rows.stop // TILE)]
        scale = torch.where(scale_inv == 0, 0.0, scale_inv.reciprocal())
        return saturating_cast(master, spread(scale, *master.shape), E4M3), scale_inv


def listed(matrix: Matrix) -> list[str]:
    """Return the modules of a matrix that is not FP8 but that a loader of FP8 would take for it."""
    name = _row(matrix)
    if EXPERTS in name:
        return [matrix.hf_names[0].partition(EXPERTS)[0] + EXPERTS.rstrip(".")]
    plain = name.endswith(("norm", "embed", ".moe.router", ".moe.gate.bias"))
    return [] if plain else [theirs.removesuffix(".weight") for theirs in matrix.hf_names]


def _experts(name: str) -> set[str]:
    """Return the layers of the experts that `name` is one of."""
    stem = name.rpartition(".")[0]
    return {f"{stem}.gate_up", f"{stem}.down"}


def _row(matrix: Matrix) -> str:
    """Return the name of the matrix's row in the plan, if it has one."""
    return matrix.name.removesuffix(".weight")
