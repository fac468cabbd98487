"""Numerics: formats, the precision plan, scales, and the layers that compute by them. Knows GEMMs, knows no model."""

from precision.amax_probe import AmaxProbe
from precision.attention import attention_core, document_mask, latent_attention, returns_lse
from precision.binding import begin_step, bind
from precision.config import PrecisionConfig
from precision.cross_entropy import IGNORED
from precision.ffn import expert_ffn, gated_ffn
from precision.fp8_attention import AttentionCore
from precision.fused import combine_rows, deliver, gather_rows, rms_norm, swiglu
from precision.head import linear_cross_entropy
from precision.kurtosis import Kurtosis
from precision.linear import GroupedLinear, Linear, gemm_layers, refresh_weights
from precision.max_logits import MaxLogits
from precision.operand import Feed, GradRows, Operand
from precision.plan import Plan
from precision.rows import GemmRow
from precision.scaling import ScalingArena
from precision.topk_experts import choose_experts

__all__ = [
    "IGNORED",
    "AmaxProbe",
    "AttentionCore",
    "Feed",
    "GemmRow",
    "GradRows",
    "GroupedLinear",
    "Kurtosis",
    "Linear",
    "MaxLogits",
    "Operand",
    "Plan",
    "PrecisionConfig",
    "ScalingArena",
    "attention_core",
    "begin_step",
    "bind",
    "choose_experts",
    "combine_rows",
    "deliver",
    "document_mask",
    "expert_ffn",
    "gated_ffn",
    "gather_rows",
    "gemm_layers",
    "latent_attention",
    "linear_cross_entropy",
    "refresh_weights",
    "returns_lse",
    "rms_norm",
    "swiglu",
]
