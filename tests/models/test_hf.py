"""The way to Hugging Face's names and back changes nothing, and what does not fit is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hf_tensors import from_hf, to_hf

from models import DeepSeek, ModelConfig, RouterScoring, YarnConfig
from models.hf import from_hf_config, matrices, name_map, shapes, to_hf_config

Build = Callable[..., DeepSeek]
# not in a config.json
TRAINING_ONLY = ("router_bias_update_rate", "router_bias_zero_mean", "mtp_loss_weight", "force_balanced_routing")


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_tensors_come_back_bit_for_bit(q_lora_rank: int | None, build: Build) -> None:
    model = build(q_lora_rank=q_lora_rank, num_mtp_layers=2, num_shared_experts=2)
    state = model.state_dict()
    back = from_hf(model.config, to_hf(model.config, state))
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


def test_names_are_those_of_the_published_checkpoints(model_config: Callable[[str], ModelConfig]) -> None:
    theirs = [name for names in name_map(model_config("deepseek_v3")).values() for name in names]
    assert len(theirs) == len(set(theirs))
    for name in (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.self_attn.q_a_layernorm.weight",
        "model.layers.3.mlp.experts.255.down_proj.weight",
        "model.layers.60.mlp.gate.e_score_correction_bias",
        "model.layers.60.mlp.shared_experts.up_proj.weight",
        "model.layers.61.eh_proj.weight",
        "model.layers.61.shared_head.norm.weight",
        "model.layers.61.self_attn.kv_a_proj_with_mqa.weight",
    ):
        assert name in theirs


@pytest.mark.parametrize("name", ["deepseek_tiny", "deepseek_v2_lite", "deepseek_v3"])
def test_shapes_and_matrices_of_a_model_that_was_not_built(
    name: str, model_config: Callable[[str], ModelConfig], on_meta: Callable
) -> None:
    config = model_config(name)
    state = on_meta(config, "bf16")[0].state_dict()
    assert shapes(config) == {ours: tuple(tensor.shape) for ours, tensor in state.items()}
    found = matrices(config)
    joined: dict[str, list[str]] = {}
    for matrix in found:
        joined[matrix.name] = [*joined.get(matrix.name, []), *matrix.hf_names]
    assert joined == name_map(config)
    assert [m.expert for m in found if m.name == f"layers.{config.num_layers - 1}.moe.experts.down.weight"] == list(
        range(config.num_experts)
    )


def test_mtp_repeats_embedding_and_head_without_copying_them(build: Build) -> None:
    model = build()
    tensors = to_hf(model.config, model.state_dict())
    layer = f"model.layers.{model.config.num_layers}"
    assert tensors[f"{layer}.embed_tokens.weight"].data_ptr() == model.embed.weight.data_ptr()
    assert tensors[f"{layer}.shared_head.head.weight"].data_ptr() == model.lm_head.weight.data_ptr()


@pytest.mark.parametrize("name", ["deepseek_tiny", "deepseek_300m", "deepseek_v2_lite", "moonlight_16b", "deepseek_v3"])
def test_config_comes_back(name: str, model_config: Callable[[str], ModelConfig]) -> None:
    config = model_config(name)
    back = from_hf_config(to_hf_config(config))
    assert replace(back, **{key: getattr(config, key) for key in TRAINING_ONLY}) == config


def test_the_published_config_of_v3_is_ours(model_config: Callable[[str], ModelConfig]) -> None:
    published = {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    extended = {"rope_scaling": YarnConfig(), "max_position_embeddings": 163840}  # after pretraining
    assert from_hf_config(published) == replace(model_config("deepseek_v3"), init_std=0.02, **extended)


def test_yarn_without_mscale_means_what_transformers_makes_of_it() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    hf = {**to_hf_config(ModelConfig()), "rope_scaling": yarn, "rope_parameters": None}
    assert from_hf_config(hf).rope_scaling == YarnConfig(4.0, 64, mscale=0.0, mscale_all_dim=0.0)
    with pytest.raises(ValueError, match="only plain RoPE and YaRN"):
        from_hf_config({**hf, "rope_scaling": {"type": "linear", "factor": 2.0}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", True),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("topk_method", "greedy"),
        ("num_key_value_heads", 1),
        ("model_type", "llama"),
    ],
)
def test_a_config_that_is_built_otherwise_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key}={value}"):
        from_hf_config({**to_hf_config(ModelConfig()), key: value})


def test_a_deepseek_v2_with_normalised_weights_is_refused() -> None:
    """DeepSeek's code and transformers compute different weights for it."""
    config = ModelConfig(
        router_scoring=RouterScoring.softmax, router_bias_update_rate=0.0, num_mtp_layers=0, norm_topk_prob=False
    )
    assert from_hf_config(to_hf_config(config)).router_scoring is RouterScoring.softmax
    with pytest.raises(ValueError, match="norm_topk_prob=True"):
        from_hf_config({**to_hf_config(config), "norm_topk_prob": True})


def test_what_deepseek_v2_would_compute_otherwise_is_not_exported() -> None:
    softmax = ModelConfig(router_scoring=RouterScoring.softmax, router_bias_update_rate=0.0, num_mtp_layers=0)
    with pytest.raises(ValueError, match="norm_topk_prob=True"):
        to_hf_config(softmax)
    with pytest.raises(ValueError, match="num_mtp_layers=1"):
        to_hf_config(replace(softmax, num_mtp_layers=1, norm_topk_prob=False))
    with pytest.raises(ValueError, match=r"num_heads=3: .* takes divisors of model\.hidden_size"):
        to_hf_config(replace(softmax, num_heads=3, norm_topk_prob=False))


def test_a_single_expert_of_deepseek_v3_is_not_exported() -> None:
    """transformers' router takes the best two of each group."""
    alone = replace(ModelConfig(), num_experts=1, num_experts_per_token=1)
    with pytest.raises(ValueError, match=r"num_experts=1: .* chooses two in each of 1 groups"):
        to_hf_config(alone)
    assert to_hf_config(replace(alone, num_dense_layers=alone.num_layers, num_mtp_layers=0))


def test_routing_without_scores_is_not_exported() -> None:
    """transformers would choose experts by score."""
    with pytest.raises(ValueError, match=r"model\.force_balanced_routing=True: no architecture of transformers"):
        to_hf_config(replace(ModelConfig(), force_balanced_routing=True))


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_key_value_heads", "q_lora_rank"])
def test_null_is_as_if_the_key_were_missing(key: str) -> None:
    hf = to_hf_config(replace(ModelConfig(), num_mtp_layers=0))
    assert from_hf_config({**hf, key: None}) == from_hf_config({k: v for k, v in hf.items() if k != key})
    with pytest.raises(ValueError, match=r"lacks n_shared_experts"):
        from_hf_config({**hf, "n_shared_experts": None})
