"""Mapping between our names and Hugging Face's, both ways: tensors and config.json.

A state dict of `DeepSeek` maps to the checkpoint layout of `deepseek_v3` (sigmoid router) or `deepseek_v2` (softmax
router), as DeepSeek published them and as transformers writes and reads them. Each of our tensors is the concatenation,
along its first dimensions, of some of theirs, so one rule is enough:

    ours [2F, D]     ffn.gate_up            = cat(gate_proj [F, D], up_proj [F, D])
    ours [E, 2F, D]  moe.experts.gate_up    = cat over experts e of (e.gate_proj, e.up_proj)
    ours [E, D, F]   moe.experts.down       = cat over experts e of e.down_proj [D, F]
    everything else: one tensor of the same shape

MTP's depth k is their layer num_hidden_layers + k; the published files repeat embedding and head there (`mtp_copies`).
transformers 5.17 reads no MTP from a deepseek_v2, ignores norm_topk_prob there, and always has a bias in deepseek_v3's
router. `to_hf_config` refuses a model for which transformers would compute something else.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from models.config import ModelConfig, RouterScoring, YarnConfig
from precision.errors import UserError

_ATTENTION = {
    "attn.q": "self_attn.q_proj",
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj",
    "attn.o": "self_attn.o_proj",
}

_SAME_KEYS = {  # ours: theirs, equal values
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_dense_layers": "first_k_dense_replace",
    "num_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_groups": "n_group",
    "num_groups_per_token": "topk_group",
    "norm_topk_prob": "norm_topk_prob",
    "routed_scaling_factor": "routed_scaling_factor",
    "balance_loss_weight": "aux_loss_alpha",
    "num_mtp_layers": "num_nextn_predict_layers",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
_OPTIONAL = {  # theirs: its meaning if it is missing from config.json
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "aux_loss_alpha": ModelConfig.balance_loss_weight,
    "initializer_range": ModelConfig.init_std,
}
_FIXED = {  # constant in our models
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "moe_layer_freq": 1,
}
_ROUTER = {  # model_type, architecture, scoring_func, topk_method
    RouterScoring.sigmoid: ("deepseek_v3", "DeepseekV3ForCausalLM", "sigmoid", "noaux_tc"),
    RouterScoring.softmax: ("deepseek_v2", "DeepseekV2ForCausalLM", "softmax", "greedy"),
}
# keys of models that transformers does not support
_OWN = ("norm_position", "qk_norm", "qk_scale", "activation", "force_balanced_routing")
_YARN_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def name_map(config: ModelConfig) -> dict[str, list[str]]:
    """Return, for each tensor of our state dict, the Hugging Face tensors that it concatenates, in order."""
    names = {
        "embed.weight": ["model.embed_tokens.weight"],
        "norm.weight": ["model.norm.weight"],
        "lm_head.weight": ["lm_head.weight"],
    }
    for i in range(config.num_layers):
        names |= _block_names(config, f"layers.{i}", f"model.layers.{i}", dense=i < config.num_dense_layers)
    for k in range(config.num_mtp_layers):
        ours, theirs = f"mtp.{k}", f"model.layers.{config.num_layers + k}"
        names |= _block_names(config, ours, theirs, dense=False)
        parts = {"enorm": "enorm", "hnorm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm"}
        names |= {f"{ours}.{a}.weight": [f"{theirs}.{b}.weight"] for a, b in parts.items()}
    return names


@dataclass(frozen=True)
class Matrix:
    """A tensor of ours, or one expert's of a stack, and the Hugging Face tensors that form its rows in equal parts."""

    name: str
    expert: int | None
    hf_names: tuple[str, ...]

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of each Hugging Face tensor. shape: of the whole tensor of ours."""
        whole = shape if self.expert is None else shape[1:]
        return whole[0] // len(self.hf_names), *whole[1:]


def matrices(config: ModelConfig) -> list[Matrix]:
    """Return `name_map` without stacks, for code that moves a model piece by piece."""
    found = []
    for ours, theirs in name_map(config).items():
        experts = config.num_experts if ".experts." in ours else 1
        each = len(theirs) // experts
        for e in range(experts):
            part = tuple(theirs[e * each : (e + 1) * each])
            found.append(Matrix(ours, e if ".experts." in ours else None, part))
    return found


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of our tensors, by the names of `name_map`, without building the model."""
    c, D, E, F = config, config.hidden_size, config.num_experts, config.moe_intermediate_size
    queries, shared = c.num_heads * c.qk_head_dim, c.num_shared_experts * F
    known: dict[str, tuple[int, ...]] = {
        "embed": (c.vocab_size, D),
        "lm_head": (c.vocab_size, D),
        **dict.fromkeys(("norm", "attn_norm", "ffn_norm", "enorm", "hnorm"), (D,)),
        "attn.q": (queries, D),
        "attn.q_a": (c.q_lora_rank or 0, D),
        "attn.q_norm": (c.q_lora_rank or 0,),
        "attn.q_b": (queries, c.q_lora_rank or 0),
        "attn.kv_a": (c.kv_lora_rank + c.qk_rope_head_dim, D),
        "attn.kv_norm": (c.kv_lora_rank,),
        "attn.kv_b": (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "attn.o": (D, c.num_heads * c.v_head_dim),
        "ffn.gate_up": (2 * c.intermediate_size, D),
        "ffn.down": (D, c.intermediate_size),
        "moe.router": (E, D),
        "moe.gate": (E,),
        "moe.shared.gate_up": (2 * shared, D),
        "moe.shared.down": (D, shared),
        "moe.experts.gate_up": (E, 2 * F, D),
        "moe.experts.down": (E, D, F),
        "proj": (D, 2 * D),
    }
    return {name: known[re.sub(r"^(layers|mtp)\.\d+\.|\.(weight|bias)$", "", name)] for name in name_map(config)}


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model. UserError if transformers would compute something else with it."""
    model_type, architecture, scoring, method = _ROUTER[config.router_scoring]
    for key in _OWN:
        if (value := getattr(config, key)) != getattr(ModelConfig, key):
            value = value.value if isinstance(value, Enum) else value
            raise UserError(
                f"model.{key}={value}: no architecture of transformers has it; the model cannot be exported to Hugging "
                "Face (run.init_from starts a run from its checkpoints)"
            )
    if config.router_scoring is RouterScoring.softmax:
        if config.num_mtp_layers:
            raise UserError(
                f"model.num_mtp_layers={config.num_mtp_layers}: transformers' deepseek_v2 does not support it; leave "
                "--mtp out"
            )
        if config.norm_topk_prob:
            raise UserError(
                "model.norm_topk_prob=True: transformers' deepseek_v2 does not support it; the model cannot be exported"
            )
        if config.hidden_size % config.num_heads:
            raise UserError(
                f"model.num_heads={config.num_heads}: transformers' deepseek_v2 takes divisors of model.hidden_size="
                f"{config.hidden_size} only; the model cannot be exported"
            )
    elif config.num_moe_blocks and config.num_experts // config.num_expert_groups < 2:
        raise UserError(
            f"model.num_experts={config.num_experts}: transformers' deepseek_v3 chooses two in each of "
            f"{config.num_expert_groups} groups; the model cannot be exported"
        )
    yarn = config.rope_scaling
    stretch = {} if yarn is None else {key: getattr(yarn, key) for key in _YARN_KEYS}
    kind = "default" if yarn is None else "yarn"
    return {
        "model_type": model_type,
        "architectures": [architecture],
        **{theirs: getattr(config, ours) for ours, theirs in _SAME_KEYS.items()},
        **_FIXED,
        "num_key_value_heads": config.num_heads,
        "scoring_func": scoring,
        "topk_method": method,
        "seq_aux": True,
        "rope_parameters": {"rope_type": kind, "rope_theta": config.rope_theta, **stretch},
        "rope_theta": config.rope_theta,
        "rope_scaling": None if yarn is None else {"type": kind, **stretch},
    }


def from_hf_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Convert a config.json to a checked ModelConfig. Training settings that it lacks keep their defaults.

    UserError for a model whose architecture differs from ours.
    """
    kind = hf.get("model_type")
    scoring = next((scoring for scoring, (model_type, *_) in _ROUTER.items() if model_type == kind), None)
    if scoring is None:
        raise UserError(f"config.json: model_type={kind}; only deepseek_v3 and deepseek_v2 can be read")
    lacks = [key for key in _SAME_KEYS.values() if hf.get(key) is None and key not in _OPTIONAL]
    if lacks:
        raise UserError(f"config.json: lacks {', '.join(lacks)}; is it the file of a {kind}?")
    _, _, scoring_func, topk_method = _ROUTER[scoring]
    fixed = {**_FIXED, "scoring_func": scoring_func, "topk_method": topk_method}
    if hf.get("num_key_value_heads") is not None:  # null: as many as heads
        fixed["num_key_value_heads"] = hf["num_attention_heads"]
    for key, value in fixed.items():
        if hf.get(key, value) != value:
            raise UserError(f"config.json: {key}={hf[key]}; a {kind} can only be built with {value} here")
    given = {theirs: value for theirs, value in hf.items() if value is not None}
    values: dict[str, Any] = {ours: given.get(theirs, _OPTIONAL.get(theirs)) for ours, theirs in _SAME_KEYS.items()}
    values |= {"num_expert_groups": hf.get("n_group") or 1, "num_groups_per_token": hf.get("topk_group") or 1}
    if scoring is RouterScoring.softmax:
        # with it, DeepSeek's own code skips routed_scaling_factor; transformers ignores the key
        if values["norm_topk_prob"]:
            raise UserError(f"config.json: norm_topk_prob=True; a {kind} can only be built with False here")
        values["router_bias_update_rate"] = 0.0
    theta, yarn = _read_rope(hf)
    numbers = {_SAME_KEYS[ours]: value for ours, value in values.items() if ours in _SAME_KEYS} | {"rope_theta": theta}
    for key, value in (numbers | (asdict(yarn) if yarn else {})).items():
        if isinstance(value, str):
            raise UserError(f"config.json: {key}={value!r}: a text; write it without quotes")
    config = ModelConfig(**values, router_scoring=scoring, rope_theta=theta, rope_scaling=yarn)
    config.validate()
    return config


def _read_rope(hf: Mapping[str, Any]) -> tuple[float, YarnConfig | None]:
    """Return theta and YaRN, from the newer rope_parameters or the older rope_theta and rope_scaling."""
    rope = {"rope_theta": hf.get("rope_theta"), **(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = rope.pop("rope_theta")
    kind = {rope.pop(key, "default") for key in ("type", "rope_type")} - {"default"} or {"default"}
    if theta is None:
        raise UserError("config.json: lacks rope_theta; add it, or rope_parameters")
    if kind == {"default"} and not rope:
        return theta, None
    if kind != {"yarn"} or not rope.keys() <= set(_YARN_KEYS):
        raise UserError(
            f"config.json: rope_scaling={dict(rope)} of type {'/'.join(kind)}; only plain RoPE and YaRN can be read, "
            f"with {', '.join(_YARN_KEYS)}"
        )
    for key in ("factor", "original_max_position_embeddings"):
        if rope.get(key) is None:
            raise UserError(f"config.json: rope_scaling of type yarn lacks {key}; add it, as in DeepSeek's")
    return theta, YarnConfig(**{"mscale": 0.0, "mscale_all_dim": 0.0, **rope})


def _block_names(config: ModelConfig, ours: str, theirs: str, dense: bool) -> dict[str, list[str]]:
    direct = config.q_lora_rank is None
    absent = ("attn.q_a", "attn.q_norm", "attn.q_b") if direct else ("attn.q",)
    pairs = {a: [b] for a, b in _ATTENTION.items() if a not in absent}
    pairs |= {"attn_norm": ["input_layernorm"], "ffn_norm": ["post_attention_layernorm"]}
    if dense:
        pairs |= {"ffn.gate_up": ["mlp.gate_proj", "mlp.up_proj"], "ffn.down": ["mlp.down_proj"]}
    else:
        experts = [f"mlp.experts.{e}" for e in range(config.num_experts)]
        pairs |= {
            "moe.router": ["mlp.gate"],
            "moe.shared.gate_up": ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
            "moe.shared.down": ["mlp.shared_experts.down_proj"],
            "moe.experts.gate_up": [f"{expert}.{part}_proj" for expert in experts for part in ("gate", "up")],
            "moe.experts.down": [f"{expert}.down_proj" for expert in experts],
        }
    names = {f"{ours}.{a}.weight": [f"{theirs}.{part}.weight" for part in b] for a, b in pairs.items()}
    if not dense and config.router_scoring is RouterScoring.sigmoid:
        names[f"{ours}.moe.gate.bias"] = [f"{theirs}.mlp.gate.e_score_correction_bias"]
    return names


def mtp_copies(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the names of MTP's copies of embedding and head, with the originals."""
    for k in range(config.num_mtp_layers):
        layer = f"model.layers.{config.num_layers + k}"
        yield f"{layer}.embed_tokens.weight", "model.embed_tokens.weight"
        yield f"{layer}.shared_head.head.weight", "lm_head.weight"
