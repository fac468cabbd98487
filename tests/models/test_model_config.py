"""A model that cannot be built is refused in one line that names key, value and fix; the files of configs/model say everything."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from models import ModelConfig, RouterScoring, YarnConfig

FILES = sorted((Path(__file__).parents[2] / "configs" / "model").glob("*.yaml"))
NAMES = [file.stem for file in FILES]


def test_the_shapes_that_are_promised_exist() -> None:
    assert NAMES == ["deepseek_300m", "deepseek_tiny", "deepseek_v2_lite", "deepseek_v3", "moonlight_16b"]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_every_file_sets_every_key_and_is_valid(file: Path, model_config: Callable[[str], ModelConfig]) -> None:
    assert set(OmegaConf.load(file)) == {field.name for field in fields(ModelConfig)}  # type: ignore[arg-type]
    model_config(file.stem).validate()


def test_the_defaults_are_deepseek_tiny(model_config: Callable[[str], ModelConfig]) -> None:
    assert model_config("deepseek_tiny") == ModelConfig()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_experts_per_token": 9}, "model.num_experts_per_token=9: there are 8 experts; set at most model.num_experts=8"),
        ({"num_expert_groups": 3}, "model.num_expert_groups=3: it does not divide the 8 experts"),
        ({"num_expert_groups": 2, "num_groups_per_token": 3}, "model.num_groups_per_token=3: there are 2 groups"),
        ({"num_expert_groups": 4, "num_experts_per_token": 3}, "model.num_experts_per_token=3: the 1 groups a token may use hold 2"),
        ({"num_expert_groups": 8, "num_experts_per_token": 1}, "model.num_expert_groups=8: a group's score is the sum of its two"),
        (
            {"router_scoring": RouterScoring.softmax, "num_expert_groups": 2, "router_bias_update_rate": 0.0},
            "model.num_expert_groups=2: softmax scoring has no groups; set 1, or model.router_scoring=sigmoid",
        ),
        ({"router_scoring": RouterScoring.softmax}, "model.router_bias_update_rate=0.001: softmax scoring has no bias"),
        ({"qk_rope_head_dim": 7}, "model.qk_rope_head_dim=7: RoPE rotates pairs; set an even number"),
        ({"num_dense_layers": 5}, "model.num_dense_layers=5: there are 4 blocks"),
        ({"num_layers": 0}, "model.num_layers=0: out of range; set at least 1"),
        ({"num_shared_experts": 0}, "model.num_shared_experts=0: out of range"),
        ({"num_mtp_layers": -1}, "model.num_mtp_layers=-1: out of range; set 0 or more"),
        ({"init_std": 0.0}, "model.init_std=0.0: out of range"),
        ({"q_lora_rank": 0}, "model.q_lora_rank=0: out of range; set at least 1, or null"),
        ({"rope_scaling": YarnConfig(factor=0.5)}, "model.rope_scaling.factor=0.5"),
        ({"rope_scaling": YarnConfig(beta_fast=1.0)}, "model.rope_scaling.beta_fast=1.0: beta_slow is 1.0"),
    ],
)
def test_what_cannot_be_built_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        ModelConfig(**overrides).validate()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
