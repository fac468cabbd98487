"""A model that cannot be built is refused in one line: key, value, fix. The files of configs/model are complete."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from models import ModelConfig, RouterScoring, YarnConfig

FILES = sorted((Path(__file__).parents[2] / "configs" / "model").glob("*.yaml"))
SOFTMAX = {"router_scoring": RouterScoring.softmax, "router_bias_update_rate": 0.0}
FOG = ["fog_mla_100m", "fog_mla_300m", "fog_mla_tiny", "fog_moonlight_16b"]
NAMES = [file.stem for file in FILES]


def test_the_shapes_that_are_promised_exist() -> None:
    sizes = ("tiny", "30m", "100m", "300m", "1b", "v2_lite", "v3")
    deepseek = {f"deepseek_{size}" for size in sizes}
    assert deepseek | set(FOG) | {"moonlight_16b"} == set(NAMES)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_every_file_sets_every_key_and_is_valid(file: Path, model_config: Callable[[str], ModelConfig]) -> None:
    assert set(OmegaConf.load(file)) == {field.name for field in fields(ModelConfig)}  # type: ignore[arg-type]
    model_config(file.stem).validate()


def test_the_defaults_are_deepseek_tiny(model_config: Callable[[str], ModelConfig]) -> None:
    assert model_config("deepseek_tiny") == ModelConfig()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_experts_per_token": 9}, "num_experts_per_token=9: only 8 experts; set at most 8"),
        (
            {"num_expert_groups": 4, "num_experts_per_token": 9},
            "num_experts_per_token=9: only 8 experts; set at most 2",
        ),
        ({"num_expert_groups": 3}, "num_expert_groups=3: no divisor of 8 experts; set a divisor of 8, at most 4"),
        (
            {"num_expert_groups": 2, "num_groups_per_token": 3},
            "num_groups_per_token=3: only 2 groups; set at most",
        ),
        (
            {"num_expert_groups": 4, "num_experts_per_token": 3},
            "num_experts_per_token=3: a token has 1 group of 2 experts",
        ),
        (
            {"num_expert_groups": 8, "num_experts_per_token": 1},
            "num_expert_groups=8: a group is scored by its two best",
        ),
        ({**SOFTMAX, "num_expert_groups": 2}, "num_expert_groups=2: softmax has no groups; set 1, or model.router_sco"),
        ({**SOFTMAX, "router_bias_update_rate": 0.1}, "router_bias_update_rate=0.1: softmax has no bias"),
        ({**SOFTMAX, "router_bias_zero_mean": True}, "router_bias_zero_mean=True: softmax has no bias; set false"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7: RoPE rotates pairs; set an even number"),
        ({"num_dense_layers": 5}, "num_dense_layers=5: only 3 blocks; set at most"),
        ({"num_layers": 0}, "num_layers=0: out of range; set at least 1"),
        ({"num_expert_groups": 0}, "num_expert_groups=0: out of range; set at least 1"),
        ({"num_mtp_layers": -1}, "num_mtp_layers=-1: out of range; set 0 or more"),
        ({"init_std": 0.0}, "init_std=0.0: out of range; set a number above 0"),
        ({"mtp_loss_weight": float("nan")}, "mtp_loss_weight=nan: out of range; set 0 or more"),
        (
            {"rope_theta": 1.0, "rope_scaling": YarnConfig()},
            "rope_theta=1.0: YaRN wants frequencies that fall; set the",
        ),
        ({"q_lora_rank": 0}, "q_lora_rank=0: out of range; set at least 1, or null"),
        (
            {"rope_scaling": YarnConfig(factor=0.5)},
            "rope_scaling.factor=0.5: YaRN stretches the context; set at least 1",
        ),
        (
            {"rope_scaling": YarnConfig(beta_fast=1.0)},
            "rope_scaling.beta_slow=1.0: it must lie between 0 and beta_fast=1.0",
        ),
        ({"rope_scaling": YarnConfig(factor=float("nan"))}, "rope_scaling.factor=nan: YaRN stretches the context"),
        (
            {"rope_scaling": YarnConfig(original_max_position_embeddings=0)},
            "rope_scaling.original_max_position_embeddings=0: out of range; set at least 1",
        ),
        ({"rope_scaling": YarnConfig(beta_fast=float("inf"))}, "rope_scaling.beta_fast=inf: out of range; set 0 or mo"),
    ],
)
def test_models_that_cannot_be_built_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"model.{message}")) as error:
        ModelConfig(**overrides).validate()
    assert "\n" not in str(error.value)
