"""An FP8 model in BF16 for a while is the BF16 model, and itself again afterwards."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from models import DeepSeek, ModelConfig
from precision import Plan, PrecisionConfig, bind, gemm_layers, refresh_weights
from precision.plain import in_bf16

Recipe = Callable[..., PrecisionConfig]

TINY = Path(__file__).parents[2] / "configs" / "model" / "deepseek_tiny.yaml"
SMALL = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "kv_lora_rank": 16, "num_experts": 4}
SMALL |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
SMALL |= {"intermediate_size": 48, "moe_intermediate_size": 16}


@pytest.fixture
def small_model() -> ModelConfig:
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(TINY), SMALL))
    assert isinstance(config, ModelConfig)
    return config


def build(config: ModelConfig, precision: PrecisionConfig) -> DeepSeek:
    plan = Plan(precision, config.num_layers)
    with torch.device("meta"):
        model = DeepSeek(config, plan)
    model.to_empty(device="cpu")
    model.init_weights(1)
    bind(model, plan, "cpu")
    return model


def losses_and_gradients(model: DeepSeek, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    refresh_weights(model, force=True)
    losses = model(tokens)
    losses.total.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [losses.lm.detach(), losses.mtp.detach(), *gradients]


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_block", "fp8_jit"])
def test_it_computes_as_the_bf16_model_does_and_then_as_before(
    recipe: Recipe, small_model: ModelConfig, name: str
) -> None:
    model = build(small_model, recipe(name, backend="reference", table__lm_head="fp8"))
    twin = build(small_model, recipe("bf16", backend="reference"))
    tokens = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(0))
    before = losses_and_gradients(model, tokens)
    operands = [layer.operand for layer in gemm_layers(model)]
    bits = [None if o is None else o.data.clone() for o in operands]
    with in_bf16(model):
        assert not any(layer.recipe.is_fp8 for layer in gemm_layers(model))
        inside = losses_and_gradients(model, tokens)
    for ours, theirs in zip(inside, losses_and_gradients(twin, tokens), strict=True):
        assert torch.equal(ours, theirs)
    for layer, operand, data in zip(gemm_layers(model), operands, bits, strict=True):
        assert layer.operand is operand and operand is not None and data is not None
        assert torch.equal(operand.data.view(torch.uint8), data.view(torch.uint8))
    for ours, theirs in zip(losses_and_gradients(model, tokens), before, strict=True):
        assert torch.equal(ours, theirs)
    assert not all(torch.equal(*both) for both in zip(before, inside, strict=True)), "FP8 shows; a loss may be equal"


def test_the_model_is_restored_after_a_failure_in_bf16(recipe: Recipe, small_model: ModelConfig) -> None:
    model = build(small_model, recipe("fp8_delayed", backend="reference"))
    recipes = [layer.recipe for layer in gemm_layers(model)]
    with pytest.raises(RuntimeError, match="no"), in_bf16(model):
        raise RuntimeError("no")
    assert [layer.recipe for layer in gemm_layers(model)] == recipes
    assert all(layer.weight_slot is not None for layer in gemm_layers(model) if layer.recipe.is_fp8)
