"""What leaves in FP8, and in which numbers, for each recipe and what it leaves out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import DeepSeek, ModelConfig
from models.hf import Matrix, matrices, shapes
from precision import GroupedLinear, Linear, Plan, PrecisionConfig, bind
from precision.config import BackendChoice, RulesException
from trainer.checkpoint.storage import DTYPE_CODES, SavedTensors
from trainer.offline.hf_fp8 import RunQuantizer, dequantize, listed

MODEL = ModelConfig(
    vocab_size=128, hidden_size=128, num_layers=2, num_heads=2, kv_lora_rank=128, qk_nope_head_dim=32,
    qk_rope_head_dim=32, v_head_dim=64, intermediate_size=384, moe_intermediate_size=128, num_experts=3,
    num_experts_per_token=1,
)  # fmt: skip
Recipe = Callable[..., PrecisionConfig]


class Weights(SavedTensors):
    """Random masters, as if a checkpoint had them; of very different sizes within a row and between rows."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.state = {
            name: torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-9, 3, shape, generator=generator))
            for name, shape in shapes(MODEL).items()
        }
        self._index = {
            f"model/{name}": {"dtype": DTYPE_CODES[tensor.dtype], "shape": list(tensor.shape)}
            for name, tensor in self.state.items()
        }

    def rows(self, name: str, expert: int | None, rows: slice) -> Tensor:
        tensor = self.state[name.removeprefix("model/")]
        return (tensor if expert is None else tensor[expert])[rows]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights()


def quantizer(precision: PrecisionConfig, weights: Weights, backends: Any = None, path: Path = Path()) -> RunQuantizer:
    return RunQuantizer(MODEL, precision, {"rows": backends or {}}, weights, path)


def fp8_of(made: RunQuantizer, weights: Weights, matrix: Matrix) -> Tensor:
    """The numbers that leave, read back: all parts of a matrix."""
    whole = weights.state[matrix.name] if matrix.expert is None else weights.state[matrix.name][matrix.expert]
    height = whole.shape[0] // len(matrix.hf_names)
    parts = [
        dequantize(*made.quantize(matrix, i, slice(0, height), whole[i * height :][:height]))
        for i in range(len(matrix.hf_names))
    ]
    return torch.cat(parts)


def computes_with(precision: PrecisionConfig, weights: Weights) -> dict[str, Tensor]:
    """The FP8 numbers of each layer in a model of these weights, read back."""
    precision.backend = BackendChoice.reference
    plan = Plan(precision, MODEL.num_layers)
    model = DeepSeek(MODEL, plan)
    model.load_state_dict(weights.state)
    bind(model, plan, "cpu")
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear | GroupedLinear) and layer.operand is not None and layer.recipe.is_fp8:
            inverse = layer.operand.scale_inv
            assert inverse is not None
            inverse = inverse[:, None, None] if inverse.dim() == 1 else inverse
            found[name] = layer.operand.data.float() * inverse
    return found


@pytest.mark.parametrize("name", ["fp8_jit", "fp8_delayed"])
def test_the_numbers_are_the_runs(name: str, recipe: Recipe, weights: Weights, tmp_path: Path) -> None:
    """Rows leave under scales of blocks; a tensor without a history under its own scale."""
    if name == "fp8_delayed":
        (tmp_path / "state.json").write_text(json.dumps({"state": {"arena": {"names": []}}}))
        weights.state["history"], weights._index["arena/history"] = torch.zeros(0, 16), {"shape": [0, 16]}
        weights.read = lambda name: weights.state["history"]  # type: ignore[method-assign]
    made = quantizer(recipe(name), weights, path=tmp_path)
    weights.state.pop("history", None)
    expected = computes_with(recipe(name), weights)
    compared = 0
    for matrix in matrices(MODEL):
        if not made.is_fp8(matrix):
            continue
        ours = expected[matrix.name.removesuffix(".weight")]
        ours = ours if matrix.expert is None else ours[matrix.expert]
        theirs = fp8_of(made, weights, matrix)
        if name == "fp8_delayed":
            assert torch.equal(theirs, ours), matrix.name
        else:  # E4M3's normals reach down to 2^-15 of its largest number; a block's scale uses half of it at least
            normal = ours.abs() > ours.abs().amax() * 2.0**-13
            assert torch.equal(theirs[normal], ours[normal]), matrix.name
            assert (theirs - ours).abs().max() <= ours.abs().amax() * 2.0**-16
            assert normal.float().mean() > 0.5
        compared += 1
    assert compared >= 3 * 2 + 2 * (3 * 2 + 2) + 2, "attention, experts of two layers, dense"


def test_what_the_run_left_in_bf16_is_not_fp8(recipe: Recipe, weights: Weights) -> None:
    whole = quantizer(recipe("fp8_block"), weights)
    everything = {m.name for m in matrices(MODEL) if whole.is_fp8(m)}
    assert {"layers.0.attn.o.weight", "layers.0.ffn.down.weight", "mtp.0.moe.experts.down.weight"} <= everything
    slower = {"layers.0.attn.o": {"precision": "bf16", "backend": "cuda", "why": "never_slower: 0.9x"}}
    made = quantizer(recipe("fp8_block", never_slower=True), weights, slower)
    assert everything - {m.name for m in matrices(MODEL) if made.is_fp8(m)} == {"layers.0.attn.o.weight"}
    assert made.left == []


def test_experts_are_in_fp8_together_and_the_head_never(recipe: Recipe, weights: Weights) -> None:
    precision = recipe("fp8_block", table__lm_head="fp8", table__mtp__proj="fp8")
    precision.rules.exceptions = [RulesException(match="layers.1.moe.experts.down")]
    made = quantizer(precision, weights)
    assert made.left == ["layers.1.moe.experts.gate_up", "lm_head", "mtp.0.proj"]
    fp8 = {m.name for m in matrices(MODEL) if made.is_fp8(m)}
    assert not {"layers.1.moe.experts.gate_up.weight", "layers.1.moe.experts.down.weight", "lm_head.weight"} & fp8
    assert "mtp.0.moe.experts.gate_up.weight" in fp8


def test_what_loaders_would_take_for_fp8_is_named_as_they_name_it() -> None:
    named = {name for matrix in matrices(MODEL) for name in listed(matrix)}
    assert {"lm_head", "model.layers.1.mlp.experts", "model.layers.0.mlp.gate_proj", "model.layers.2.eh_proj"} <= named
    assert "model.layers.1.mlp.shared_experts.down_proj" in named
    assert not [name for name in named if name.endswith((".gate", "norm", "embed_tokens", "bias", "weight"))]


def test_scales_of_transformer_engine_are_of_tensors(recipe: Recipe, weights: Weights) -> None:
    """It has none of rows."""
    matrix = Matrix("layers.0.attn.o.weight", None, ("o",))
    served = {"layers.0.attn.o": {"precision": "fp8", "backend": "transformer_engine"}}
    made = quantizer(recipe("fp8_jit"), weights, served)
    _, scales = made.quantize(matrix, 0, slice(0, 128), weights.state[matrix.name])
    top = weights.state[matrix.name].bfloat16().abs().max().item()
    assert scales.shape == (1, 1) and 224 <= top / scales.item() <= 448


def test_a_model_whose_sides_are_no_blocks_is_refused(recipe: Recipe, weights: Weights) -> None:
    with pytest.raises(ValueError, match=r"trained as bf16: nothing ran in FP8; use --dtype bf16"):
        quantizer(recipe("bf16"), weights)
    thin = ModelConfig(hidden_size=64)
    with pytest.raises(ValueError, match=r"no FP8 layer has both sides divisible by 128 \(layers\.0\.attn\.o\)"):
        RunQuantizer(thin, recipe("fp8_block"), {}, weights, Path())
