"""The model section of the config tree: the shape of a DeepSeek-style model, its router, its losses.

Names are DeepSeek's and Hugging Face's where those are clear, `num_` for counts. The defaults are `deepseek_tiny`; one file of
`configs/model/` fills in every key.
"""

from dataclasses import dataclass
from enum import Enum


class RouterScoring(Enum):
    """How router logits become scores: sigmoid with bias balancing (DeepSeek-V3), or softmax (DeepSeek-V2)."""

    sigmoid = "sigmoid"
    softmax = "softmax"


@dataclass
class YarnConfig:
    """YaRN: RoPE stretched beyond the length it was trained for (arXiv 2309.00071); see `layers`."""

    factor: float = 40.0
    """How many times longer the context becomes."""
    original_max_position_embeddings: int = 4096
    """Context length before stretching."""
    beta_fast: float = 32.0
    """Dimensions that turn more often than this within the original context keep their frequency."""
    beta_slow: float = 1.0
    """Dimensions that turn less often than this are slowed down by the whole factor."""
    mscale: float = 1.0
    """Growth of the rotated part of the keys and queries with log(factor)."""
    mscale_all_dim: float = 1.0
    """Growth of the softmax scale with log(factor), twice; the rotated part is divided by it once."""


@dataclass
class ModelConfig:
    """A DeepSeek-style model: latent attention, leading dense blocks, mixture of experts, multi-token prediction."""

    vocab_size: int = 4096
    """Entries of embedding and head."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_layers: int = 4
    """Blocks of the main model, dense ones included, MTP's not."""
    num_dense_layers: int = 1
    """Blocks at the start that have a dense feed-forward layer instead of experts."""
    num_heads: int = 4
    """Attention heads."""
    q_lora_rank: int | None = None
    """Width of the query latent; null: queries come straight from the hidden state."""
    kv_lora_rank: int = 128
    """Width of the key-value latent."""
    qk_nope_head_dim: int = 64
    """Width of a head's query and key without position."""
    qk_rope_head_dim: int = 32
    """Width of a head's query and key with rotary position; the key is shared by all heads."""
    v_head_dim: int = 64
    """Width of a head's value."""
    intermediate_size: int = 768
    """Width of the dense feed-forward layers."""
    moe_intermediate_size: int = 256
    """Width of one expert."""
    num_experts: int = 8
    """Routed experts of a block."""
    num_shared_experts: int = 1
    """Experts that every token passes; they are computed as one of so many times the width."""
    num_experts_per_token: int = 2
    """Routed experts that a token passes."""
    num_expert_groups: int = 1
    """Groups the experts are divided into (V3: one a node); 1: no groups."""
    num_groups_per_token: int = 1
    """Groups a token may choose its experts from."""
    router_scoring: RouterScoring = RouterScoring.sigmoid
    """sigmoid or softmax."""
    norm_topk_prob: bool = True
    """Divide the scores of the chosen experts by their sum."""
    routed_scaling_factor: float = 1.0
    """Factor on the weights of the routed experts, after that division."""
    router_bias_update_rate: float = 0.001
    """Step by which an expert's selection bias moves against its load; 0 with softmax scoring, which has no bias."""
    balance_loss_weight: float = 1e-4
    """Weight of the sequence-wise balance loss."""
    force_balanced_routing: bool = False
    """Deal experts out in turn instead of by score: equal loads, for timing only."""
    num_mtp_layers: int = 1
    """Depth of multi-token prediction; 0: none."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean loss of multi-token prediction."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: YarnConfig | None = None
    """YaRN; null: plain RoPE."""
    max_position_embeddings: int = 4096
    """Longest sequence the model is meant for."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in the norms of the residual stream."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_moe_blocks(self) -> int:
        """Blocks with experts: the main model's and MTP's, which all have them."""
        return self.num_layers - self.num_dense_layers + self.num_mtp_layers

    def validate(self) -> None:
        """ValueError, naming key, value and fix, for a model that cannot be built."""
        _check_ranges(self)
        _check_router(self)
        if self.qk_rope_head_dim % 2:
            _refuse("qk_rope_head_dim", self.qk_rope_head_dim, "RoPE rotates pairs", "set an even number")
        if self.num_dense_layers > self.num_layers:
            _refuse("num_dense_layers", self.num_dense_layers, f"there are {self.num_layers} blocks", "set at most num_layers")
        yarn = self.rope_scaling
        if yarn is not None and yarn.factor < 1:
            _refuse("rope_scaling.factor", yarn.factor, "YaRN stretches the context", "set at least 1, or rope_scaling=null")
        if yarn is not None and not 0 < yarn.beta_slow < yarn.beta_fast:
            _refuse("rope_scaling.beta_fast", yarn.beta_fast, f"beta_slow is {yarn.beta_slow}", "set 0 < beta_slow < beta_fast")


_AT_LEAST_ONE = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "intermediate_size", "moe_intermediate_size", "num_experts", "num_shared_experts"),
    *("num_experts_per_token", "num_expert_groups", "num_groups_per_token", "max_position_embeddings"),
)
_NOT_NEGATIVE = (
    *("num_dense_layers", "num_mtp_layers", "router_bias_update_rate", "balance_loss_weight", "mtp_loss_weight"),
)
_POSITIVE = ("routed_scaling_factor", "rope_theta", "rms_norm_eps", "init_std")


def _refuse(key: str, value: object, why: str, fix: str) -> None:
    raise ValueError(f"model.{key}={value}: {why}; {fix}")


def _check_ranges(c: ModelConfig) -> None:
    for keys, holds, fix in (
        (_AT_LEAST_ONE, lambda value: value >= 1, "set at least 1"),
        (_NOT_NEGATIVE, lambda value: value >= 0, "set 0 or more"),
        (_POSITIVE, lambda value: value > 0, "set a number above 0"),
    ):
        for key in keys:
            if not holds(getattr(c, key)):
                _refuse(key, getattr(c, key), "out of range", fix)
    if c.q_lora_rank is not None and c.q_lora_rank < 1:
        _refuse("q_lora_rank", c.q_lora_rank, "out of range", "set at least 1, or null for a direct query projection")


def _check_router(c: ModelConfig) -> None:
    experts, groups, kept, chosen = c.num_experts, c.num_expert_groups, c.num_groups_per_token, c.num_experts_per_token
    if chosen > experts:
        _refuse("num_experts_per_token", chosen, f"there are {experts} experts", f"set at most model.num_experts={experts}")
    if experts % groups:
        _refuse("num_expert_groups", groups, f"it does not divide the {experts} experts", "set a divisor of model.num_experts")
    if kept > groups:
        _refuse("num_groups_per_token", kept, f"there are {groups} groups", f"set at most model.num_expert_groups={groups}")
    in_group = experts // groups
    if chosen > kept * in_group:
        why = f"the {kept} groups a token may use hold {kept * in_group} experts"
        _refuse("num_experts_per_token", chosen, why, "set fewer, or more model.num_groups_per_token")
    if groups > 1 and in_group < 2:
        why = f"a group's score is the sum of its two best experts, and a group has {in_group}"
        _refuse("num_expert_groups", groups, why, f"set at most {experts // 2}")
    if c.router_scoring is RouterScoring.softmax and groups > 1:
        _refuse("num_expert_groups", groups, "softmax scoring has no groups", "set 1, or model.router_scoring=sigmoid")
    if c.router_scoring is RouterScoring.softmax and c.router_bias_update_rate:
        why = "softmax scoring has no bias and balances by its loss alone"
        _refuse("router_bias_update_rate", c.router_bias_update_rate, why, "set 0, or model.router_scoring=sigmoid")
