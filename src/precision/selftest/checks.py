"""The list of checks: the kernels that each covers, and the op that runs without them if the check fails.

A kernel that is missing here fails a test (`tests/precision/selftest`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from precision.attention import returns_lse
from precision.hardware import HOPPER, knows_fp8
from precision.proof import (
    ATTENTION,
    CASTS,
    EXPERTS,
    FP8_ATTENTION,
    GEMMS,
    LOSS,
    MUON,
    OPTIMIZER,
    PEERS,
    ROTARY,
    ROUTER,
    STATISTICS,
)
from precision.selftest import muon, operands, others, products


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == HOPPER


def _any_gpu(device: torch.device) -> bool:
    return True


def _attends(device: torch.device) -> bool:
    """Whether attention within documents has a kernel, which is what returns its log-sum-exp on a GPU."""
    return returns_lse(device, torch.bfloat16, 192, 128, documents=True)


@dataclass(frozen=True)
class Check:
    """One check. function(device, *options): raises Mismatch if a kernel is wrong. kernels: those it launches,
    MODULE.NAME. is_for: whether runs launch them on a GPU."""

    op: str
    function: Callable[..., None]
    kernels: tuple[str, ...]
    options: tuple[str | float, ...] = ()
    is_for: Callable[[torch.device], bool] = _is_hopper

    @property
    def name(self) -> str:
        """The function and its options."""
        return " ".join([self.function.__name__, *map(str, self.options)])

    def run(self, device: torch.device) -> None:
        """Run the check."""
        self.function(device, *self.options)


def _of(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}._{name}_kernel" for name in names)


_ATTENTION = (*_of("document_attention", "forward", "keys", "queries"), "attention_tiles.delta_kernel")
_FP8_FORWARD = "hopper_attention._forward_kernel", "fp8_attention._transpose_kernel"
_FP8_SMALL = _of("fp8_attention", "forward", "keys", "queries")
_FP8_BACKWARD = *_of("hopper_attention_backward", "values", "scores"), *_of("fp8_attention", "scale", "transpose")
_EXPERTS = *_of("grouped_gemm", "nt", "wgrad"), "hopper_gemm._nt_wgrad_kernel"
_BLOCKS = *_of("swiglu_blocks", "backward"), *_of("swiglu", "backward_rows"), *_of("cast", "blocks")
_SWIGLU = _of("swiglu", "amax", "forward", "backward", "backward_rows")
_ADAMW = (
    *_of("adamw", "prepare", "adamw"),
    *_of("update_norms", "factors", "squares", "add_up"),
    *_of("gradient_norms", "squares", "total"),
)
_STATISTICS = *_of("kurtosis", "kurtosis"), *_of("cast_statistics", "cast_statistics")
_MLA, _SMALL = (150, 192, 128), (77, 24, 16)  # positions and head sizes; not powers of two
_SMALL_IN_FP8 = 77, 48, 32
CHECKS = (  # the longest to compile first; each check compiles its own variants
    Check(ATTENTION, others.attention_backward, _ATTENTION[1:], _MLA, _attends),
    Check(FP8_ATTENTION, others.attention_in_fp8_backward, _FP8_BACKWARD, (*_MLA, "fp32", 100.0)),
    Check(FP8_ATTENTION, others.attention_in_fp8_backward, _FP8_SMALL[1:], (*_SMALL_IN_FP8, "fp32", 0.0)),
    Check(FP8_ATTENTION, others.attention_in_fp8_backward, _FP8_SMALL[1:], (*_SMALL_IN_FP8, "fast", 100.0)),
    Check(EXPERTS, products.experts_products, _EXPERTS, ("tensor",)),
    Check(EXPERTS, products.experts_products, _EXPERTS, ("row",)),
    Check(EXPERTS, products.experts_products, _EXPERTS, ("block",)),
    Check(EXPERTS, products.experts_products, _EXPERTS, ("tensor", "fast")),
    Check(EXPERTS, products.experts_products_bf16, _EXPERTS[1:]),
    Check(MUON, muon.products, ("hopper_triangle._triangle_kernel", "newton_schulz._product_kernel")),
    Check(FP8_ATTENTION, others.attention_in_fp8_forward, _FP8_FORWARD, (*_MLA, "fp32")),
    Check(FP8_ATTENTION, others.attention_in_fp8_forward, _FP8_SMALL[:1], (*_SMALL_IN_FP8, "fp32")),
    Check(FP8_ATTENTION, others.attention_in_fp8_forward, _FP8_SMALL[:1], (*_SMALL_IN_FP8, "fast")),
    Check(ATTENTION, others.attention_backward, _ATTENTION[1:], _SMALL, _attends),
    Check(ATTENTION, others.attention_forward, _ATTENTION[:1], _SMALL, _attends),
    Check(ATTENTION, others.attention_forward, _ATTENTION[:1], _MLA, _attends),
    Check(CASTS, operands.activations, _SWIGLU, ("rows",)),
    Check(EXPERTS, operands.activations, _SWIGLU, ("experts",)),
    Check(CASTS, operands.activations_in_blocks, _BLOCKS, ("rows",)),
    Check(CASTS, operands.saved_activations, (*_of("swiglu", "forward", "backward"), _BLOCKS[0])),
    Check(EXPERTS, operands.activations_in_blocks, _BLOCKS, ("experts",)),
    Check(CASTS, operands.casts, _of("cast", "amax", "tensor", "tensor_transposed", "rows", "blocks", "transpose")),
    Check(EXPERTS, operands.experts_casts, (*_of("cast", "blocks", "transpose"), *_of("route", "gather"))),
    Check(CASTS, operands.weights, _of("weights", "amax", "amaxes", "cast", "transpose")),
    Check(CASTS, operands.norms, _of("norm", "amax", "forward", "backward")),
    Check(GEMMS, products.products, ("hopper_gemm._nt_wgrad_kernel", "grouped_gemm._wgrad_kernel")),
    Check(EXPERTS, products.routes, _of("route", "count", "scan", "place", "gather", "combine")),
    Check(OPTIMIZER, others.optimizer, _ADAMW, is_for=_any_gpu),
    Check(MUON, muon.elementwise, _of("muon", "advance", "apply"), is_for=_any_gpu),
    Check(PEERS, products.peers, (*_of("peers", "push", "take"), *_of("read_back", "read_back")), is_for=_any_gpu),
    Check(LOSS, others.losses, _of("cross_entropy", "cross_entropy"), is_for=_any_gpu),
    Check(ROTARY, others.heads, _of("rotary", "forward", "backward")),
    Check(ROUTER, others.choices, _of("topk_experts", "choose"), is_for=_any_gpu),
    Check(STATISTICS, others.statistics, _STATISTICS, is_for=knows_fp8),
)
