"""How large a model is, and what a token costs: parameters, FLOPs, and what a forward pass keeps for its backward pass.

Training FLOPs of a token = 6 * active parameters + 3 * blocks * heads * (d_qk + d_v) * S

A parameter that multiplies a token costs 2 FLOPs forward and 4 backward. Active are the chosen experts and everything else but the
embedding table (a lookup); MTP's blocks, projections and further uses of the head count. The second term is attention's core: 2 S d
FLOPs forward for each of QK^T and PV, halved by the causal mask, times 3 for backward. Recomputation never counts.

Everything here follows from the config alone, in closed form; the tests hold it against the model that is built.
"""

from dataclasses import dataclass

from models.config import ModelConfig
from precision import Plan


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model. `active`: what one token is multiplied by; the head is, the embedding table is not."""

    main: int
    main_active: int
    mtp: int
    mtp_active: int
    embedding: int

    @property
    def total(self) -> int:
        """All that is trained."""
        return self.main + self.mtp

    @property
    def active(self) -> int:
        """Active ones of the main model and MTP; the head, which MTP uses again, counts once."""
        return self.main_active + self.mtp_active


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Exact numbers for the model that `DeepSeek(config)` builds."""
    c, D = config, config.hidden_size
    expert = 3 * D * c.moe_intermediate_size
    attention = _attention(c) + 2 * D
    dense_block = attention + 3 * D * c.intermediate_size
    moe_block = attention + c.num_experts * D + (c.num_shared_experts + c.num_experts) * expert
    idle = (c.num_experts - c.num_experts_per_token) * expert
    num_moe = c.num_layers - c.num_dense_layers
    table = c.vocab_size * D
    main = 2 * table + D + c.num_dense_layers * dense_block + num_moe * moe_block
    mtp_block = moe_block + 2 * D * D + 3 * D
    return ParameterCount(
        main=main,
        main_active=main - table - num_moe * idle,
        mtp=c.num_mtp_layers * mtp_block,
        mtp_active=c.num_mtp_layers * (mtp_block - idle),
        embedding=table,
    )


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of training on one token, forward and backward."""
    count = count_parameters(config)
    active = count.active + config.num_mtp_layers * config.vocab_size * config.hidden_size
    blocks = config.num_layers + config.num_mtp_layers
    core = 3.0 * blocks * config.num_heads * (config.qk_head_dim + config.v_head_dim) * sequence_length
    return 6.0 * active + core


def kept_bytes_per_token(config: ModelConfig, plan: Plan) -> dict[str, float]:
    """Bytes that a token's forward pass keeps for the backward pass without recomputation, by category; `plan` is the model's.

    gemm inputs: in the format the plan keeps. stream: inputs of the norms, and their outputs where somebody reads them unquantised.
    attention: q, k, v and the output of the core. swiglu: its input. logits: the head's output. A forecast: routing indices and
    row statistics, a few bytes, are left out.
    """
    residual = plan.tensors["residual"].format.bytes
    kept = {"gemm inputs": 0.0, "stream": 0.0, "attention": 0.0, "swiglu": 0.0, "logits": 0.0}
    D, heads = config.hidden_size, config.num_heads
    for row in plan.gemms.values():
        shared = row.op in ("attn.kv_a", "moe.router") and not row.recipe.is_fp8  # reads the norm's output, see stream
        if not shared:
            kept["gemm inputs"] += row.in_features * row.rows_per_token * row.recipe.saved.bytes
        if row.name.endswith(".gate_up"):
            kept["swiglu"] += row.out_features * row.rows_per_token * row.recipe.output.bytes
        if row.op == "attn.core":
            kept["attention"] += 0
    for row in plan.tensors.values():
        if row.op == "attn.core":
            kept["attention"] += heads * 2 * (config.qk_head_dim + config.v_head_dim) * row.format.bytes
        if row.op == "norm":
            kept["stream"] += D * residual
    kept["logits"] = config.vocab_size * plan.gemms["lm_head"].rows_per_token * residual
    return kept


def _attention(c: ModelConfig) -> int:
    """Parameters of MLA, its latents' norms included."""
    q_out = c.num_heads * c.qk_head_dim
    q = c.hidden_size * q_out if c.q_lora_rank is None else (c.hidden_size + 1 + q_out) * c.q_lora_rank
    kv_a = c.hidden_size * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank
    kv_b = c.kv_lora_rank * c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
    return q + kv_a + kv_b + c.num_heads * c.v_head_dim * c.hidden_size
