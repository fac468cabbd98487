"""The model section of the config tree: the shape of a DeepSeek-style model, its router, its losses.

Names follow DeepSeek and Hugging Face where those are clear, with `num_` for counts. The defaults are `deepseek_tiny`;
each file of `configs/model/` sets every key.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from precision.errors import counted, refuse


class NormPosition(Enum):
    """Position of a sublayer's norm: on its input (DeepSeek), or on its output, before the residual sum (FOG)."""

    pre = "pre"
    post = "post"


class Activation(Enum):
    """Activation of the feed-forward layers: SwiGLU, gated (DeepSeek), or FOG's without a gate."""

    swiglu = "swiglu"
    gelu = "gelu"
    xielu = "xielu"


class RouterScoring(Enum):
    """How router logits become scores: sigmoid with bias balancing (DeepSeek-V3), or softmax (DeepSeek-V2)."""

    sigmoid = "sigmoid"
    softmax = "softmax"


@dataclass
class YarnConfig:
    """YaRN: RoPE stretched beyond the length it was trained for (arXiv 2309.00071); see `layers`."""

    factor: float = 40.0
    """Factor by which the context is extended."""
    original_max_position_embeddings: int = 4096
    """Context length before stretching."""
    beta_fast: float = 32.0
    """Dimensions that turn more often than this within the original context keep their frequency."""
    beta_slow: float = 1.0
    """Dimensions that turn less often than this are slowed down by the whole factor."""
    mscale: float = 1.0
    """Growth of the rotated part of keys and queries with log(factor)."""
    mscale_all_dim: float = 1.0
    """Growth of keys and queries as a whole with log(factor), put into the softmax scale; see `layers`."""

    def validate(self) -> None:
        """Raise a UserError, with key, value and fix, for values that yield no frequencies."""
        if not 1 <= self.factor < math.inf:
            self._refuse("factor", "YaRN stretches the context", "set at least 1")
        if self.original_max_position_embeddings < 1:
            self._refuse("original_max_position_embeddings", "out of range", "set at least 1")
        if not 0 < self.beta_slow < self.beta_fast:
            why = f"it must lie between 0 and beta_fast={self.beta_fast}"
            self._refuse("beta_slow", why, "set the published 1 and 32")
        for key in ("beta_fast", "mscale", "mscale_all_dim"):
            if not 0 <= getattr(self, key) < math.inf:
                self._refuse(key, "out of range", "set 0 or more")

    def _refuse(self, key: str, why: str, fix: str) -> None:
        refuse(f"model.rope_scaling.{key}", getattr(self, key), why, fix)


@dataclass
class ModelConfig:
    """A DeepSeek-style model: latent attention, leading dense blocks, mixture of experts, multi-token prediction."""

    vocab_size: int = 4096
    """Entries of embedding and head."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_layers: int = 3
    """Blocks of the main model, dense ones included, MTP's not."""
    num_dense_layers: int = 1
    """Number of leading blocks with a dense feed-forward layer instead of experts."""
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
    moe_intermediate_size: int = 128
    """Width of one expert."""
    num_experts: int = 8
    """Routed experts of a block."""
    num_shared_experts: int = 1
    """Experts that every token passes; computed as one expert of num_shared_experts times the width."""
    num_experts_per_token: int = 2
    """Routed experts that a token passes."""
    num_expert_groups: int = 1
    """Groups that the experts are divided into (V3: one per node); 1: no groups."""
    num_groups_per_token: int = 1
    """Groups a token may choose its experts from."""
    norm_position: NormPosition = NormPosition.pre
    """pre: DeepSeek's blocks. post: FOG's (`models.block`), with a scaled embedding and no final norm."""
    qk_norm: bool = False
    """Divide each head's query and key by its rms; then no norm of attention has a trained gain."""
    qk_scale: float = 1.0
    """Factor on the softmax scale 1 / sqrt(d_qk): with qk_norm it bounds logits by qk_scale * sqrt(d_qk)."""
    activation: Activation = Activation.swiglu
    """swiglu: gated. gelu, xielu: without a gate; widths 1.5 times as large give as many parameters."""
    router_scoring: RouterScoring = RouterScoring.sigmoid
    """sigmoid or softmax."""
    norm_topk_prob: bool = True
    """Divide the scores of the chosen experts by their sum."""
    routed_scaling_factor: float = 1.0
    """Factor on the weights of the routed experts, after that division."""
    router_bias_update_rate: float = 0.001
    """Step by which an expert's selection bias moves against its load; 0 with softmax scoring, which has no bias."""
    router_bias_zero_mean: bool = False
    """Subtract the mean step of a block from each of its steps, so that its biases keep their mean (Moonlight)."""
    balance_loss_weight: float = 1e-4
    """Weight of the sequence-wise balance loss."""
    force_balanced_routing: bool = False
    """Assign experts in turn instead of by score: equal loads, for timing only."""
    num_mtp_layers: int = 1
    """Depth of multi-token prediction; 0: none."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean loss of multi-token prediction."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: YarnConfig | None = None
    """YaRN; null: plain RoPE."""
    max_position_embeddings: int = 4096
    """Longest sequence the model is designed for."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in the norms of the residual stream."""
    init_std: float = 0.016
    """Standard deviation of the initial weights."""

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_moe_blocks(self) -> int:
        """Number of blocks with experts: the main model's and MTP's, which all have them."""
        return self.num_layers - self.num_dense_layers + self.num_mtp_layers

    def validate(self) -> None:
        """Raise a UserError, with key, value and fix, for a model that cannot be built."""
        self._check_ranges()
        self._check_router()
        if self.qk_rope_head_dim % 2:
            self._refuse("qk_rope_head_dim", "RoPE rotates pairs", "set an even number")
        if self.num_dense_layers > self.num_layers:
            self._refuse(
                "num_dense_layers", f"only {counted(self.num_layers, 'block')}", "set at most model.num_layers"
            )
        if self.rope_scaling is not None:
            self.rope_scaling.validate()
            if self.rope_theta <= 1:
                self._refuse("rope_theta", "YaRN wants frequencies that fall", "set the published 10000")

    def _refuse(self, key: str, why: str, fix: str) -> None:
        refuse(f"model.{key}", getattr(self, key), why, fix)

    def _check_ranges(self) -> None:
        for keys, least, fix in (
            (_AT_LEAST_ONE, 1, "set at least 1"),
            (_NOT_NEGATIVE, 0, "set 0 or more"),
            (_POSITIVE, sys.float_info.min, "set a number above 0"),
        ):
            for key in keys:
                if not least <= getattr(self, key) < math.inf:
                    self._refuse(key, "out of range", fix)
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            self._refuse("q_lora_rank", "out of range", "set at least 1, or null for a direct query projection")
        for key in (*_AT_LEAST_ONE, "num_mtp_layers", "q_lora_rank"):
            if (getattr(self, key) or 0) > (most := _MOST.get(key, _MOST_OF_OTHERS)):
                self._refuse(key, "out of range", f"set at most {most}")

    def _check_router(self) -> None:
        experts, groups, kept = self.num_experts, self.num_expert_groups, self.num_groups_per_token
        per_group = experts // groups
        divisor = f"set a divisor of {experts}, at most {max(experts // 2, 1)}"
        if experts % groups:
            self._refuse("num_expert_groups", f"no divisor of {counted(experts, 'expert')}", divisor)
        if kept > groups:
            self._refuse(
                "num_groups_per_token", f"only {counted(groups, 'group')}", "set at most model.num_expert_groups"
            )
        if self.num_experts_per_token > experts:
            why = f"only {counted(experts, 'expert')}"
            self._refuse("num_experts_per_token", why, f"set at most {kept * per_group}")
        if self.num_experts_per_token > kept * per_group:
            why = f"a token has {counted(kept, 'group')} of {counted(per_group, 'expert')}"
            self._refuse("num_experts_per_token", why, "set fewer, or more model.num_groups_per_token")
        if groups > 1 and per_group < 2:
            why = f"a group is scored by its two best experts, and has {per_group}"
            self._refuse("num_expert_groups", why, divisor)
        if self.router_scoring is RouterScoring.softmax:
            if groups > 1:
                self._refuse("num_expert_groups", "softmax has no groups", "set 1, or model.router_scoring=sigmoid")
            if self.router_bias_update_rate:
                why = "softmax has no bias, it balances by its loss alone"
                self._refuse("router_bias_update_rate", why, "set 0, or model.router_scoring=sigmoid")
            if self.router_bias_zero_mean:
                why = "softmax has no bias"
                self._refuse("router_bias_zero_mean", why, "set false, or model.router_scoring=sigmoid")


def plain_model(model: ModelConfig) -> dict[str, Any]:
    """Return a model's config as JSON values, for a checkpoint's meta."""
    return json.loads(json.dumps(asdict(model), default=lambda choice: choice.value))


_AT_LEAST_ONE = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "intermediate_size", "moe_intermediate_size", "num_experts", "num_shared_experts"),
    *("num_experts_per_token", "num_expert_groups", "num_groups_per_token", "max_position_embeddings"),
)
_NOT_NEGATIVE = (
    *("num_dense_layers", "num_mtp_layers", "router_bias_update_rate", "balance_loss_weight", "mtp_loss_weight"),
)
_MOST = {"num_layers": 4096, "num_mtp_layers": 4096, "vocab_size": 2**31, "max_position_embeddings": 2**31}
_MOST_OF_OTHERS = 2**18  # a tensor multiplies up to three of them, and torch counts its bytes in 64 bits
_POSITIVE = ("routed_scaling_factor", "qk_scale", "rope_theta", "rms_norm_eps", "init_std")
