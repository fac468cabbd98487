"""Helpers of the model tests: small configs, models ready to run, and their twins in transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tensors import to_hf
from omegaconf import OmegaConf
from safetensors.torch import save_file

from models import DeepSeek, ModelConfig
from models.hf import to_hf_config
from precision import Plan, PrecisionConfig, bind
from precision.config import Precision

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_layers": 3,
    "num_heads": 3,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "routed_scaling_factor": 2.5,
}


def _precision(recipe: str) -> PrecisionConfig:
    """A precision config by file name."""
    path = CONFIGS / "precision" / f"{recipe}.yaml"
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PrecisionConfig), OmegaConf.load(path)))
    assert isinstance(config, PrecisionConfig)
    return config


def _model_config(name: str) -> ModelConfig:
    """A model config by file name."""
    path = CONFIGS / "model" / f"{name}.yaml"
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(path)))
    assert isinstance(config, ModelConfig)
    return config


def _on_meta(
    config: ModelConfig, recipe: str = "fp32", head: Precision | None = None, swiglu: Precision | None = None
) -> tuple[DeepSeek, Plan]:
    """The model without memory, and its plan. head: precision of the head, if not the recipe's. swiglu: of its saved
    input."""
    precision = _precision(recipe)
    precision.table.lm_head, precision.table.swiglu = head or precision.table.lm_head, swiglu
    plan = Plan(precision, config.num_layers)
    with torch.device("meta"):
        return DeepSeek(config, plan), plan


def _build(recipe: str = "fp32", **overrides: Any) -> DeepSeek:
    """A small model with random weights of a size at which every part matters; gains and router biases random, too."""
    model, plan = _on_meta(ModelConfig(**{**SMALL, **overrides}), recipe)
    model.to_empty(device="cpu")
    model.init_weights(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.15, generator=generator)
        for bias in model.router_bias:
            bias.normal_(0.0, 0.1, generator=generator)
    bind(model, plan, "cpu")
    return model


def _save_as_hf(model: DeepSeek, folder: Path) -> None:
    """config.json and model.safetensors, as transformers reads them."""
    (folder / "config.json").write_text(json.dumps(to_hf_config(model.config)))
    tensors = {name: t.clone() for name, t in to_hf(model.config, model.state_dict()).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def model_config() -> Callable[[str], ModelConfig]:
    return _model_config


@pytest.fixture(scope="session")
def on_meta() -> Callable[..., tuple[DeepSeek, Plan]]:
    return _on_meta


@pytest.fixture(scope="session")
def build() -> Callable[..., DeepSeek]:
    return _build


@pytest.fixture(scope="session")
def save_as_hf() -> Callable[[DeepSeek, Path], None]:
    return _save_as_hf


@pytest.fixture
def tokens() -> torch.Tensor:
    """[2, 41]: two sequences of 40 positions."""
    return torch.randint(0, SMALL["vocab_size"], (2, 41), generator=torch.Generator().manual_seed(2))
