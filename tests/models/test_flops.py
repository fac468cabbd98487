"""Closed forms agree with the models that are built, and with the sizes that were published."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pairwise import pairwise
from torch import Tensor

from models import DeepSeek, ModelConfig
from models.block import MoEBlock
from models.config import Activation
from models.flops import count_parameters, flops_per_token, head_gradient_bytes, kept_bytes_per_token
from precision import Plan, begin_step, bind, gemm_layers, topk_experts
from precision.config import BackendChoice, Precision
from precision.hardware import Gpu

FP8 = torch.float8_e4m3fn
OnMeta = Callable[..., tuple[DeepSeek, Plan]]


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        *((f"deepseek_{size}", "swiglu") for size in ("tiny", "30m", "100m", "300m", "1b", "v2_lite", "v3")),
        *((name, "swiglu") for name in ("moonlight_16b", "fog_mla_100m", "fog_mla_300m", "fog_moonlight_16b")),
        *(("fog_mla_tiny", activation.value) for activation in Activation),
    ],
)
def test_counts_are_those_of_the_model_on_the_meta_device(
    name: str, activation: str, model_config: Callable[[str], ModelConfig], on_meta: OnMeta
) -> None:
    config = replace(model_config(name), activation=Activation(activation))
    model, plan = on_meta(config, "fp8_delayed")
    count = count_parameters(config)
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.mtp == sum(p.numel() for p in model.mtp.parameters())
    assert count.embedding == model.embed.weight.numel()
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    idle = experts - experts * config.num_experts_per_token // config.num_experts
    assert count.active == count.total - count.embedding - idle
    gemms = sum(row.flops_per_token for row in plan.gemms.values())
    vectors = [(n, p.numel()) for n, p in model.named_parameters() if p.dim() == 1]
    chosen = config.num_experts_per_token / config.num_experts
    norms = sum(size * chosen if ".experts." in n else size for n, size in vectors)
    core = 3 * len(model.iter_blocks()) * config.num_heads * (config.qk_head_dim + config.v_head_dim) * 1024
    assert flops_per_token(config, 1024) == 3 * gemms + 6 * norms + core


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("deepseek_v3", 671.0e9, 37e9), ("deepseek_v2_lite", 15.7e9, 2.4e9), ("moonlight_16b", 15.96e9, 2.6e9)],
)
def test_published_sizes(name: str, total: float, active: float, model_config: Callable[[str], ModelConfig]) -> None:
    count = count_parameters(model_config(name))
    assert count.main == pytest.approx(total, rel=2e-3)
    assert count.main_active == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("deepseek_tiny", 6.6e6, 3.7e6),
        ("deepseek_30m", 36e6, 12e6),
        ("deepseek_100m", 91e6, 36e6),
        ("deepseek_300m", 312e6, 89e6),
        ("deepseek_1b", 1.07e9, 0.21e9),
    ],
)
def test_research_sizes_are_what_their_files_say(
    name: str, total: float, active: float, model_config: Callable[[str], ModelConfig]
) -> None:
    count = count_parameters(model_config(name))
    assert count.total == pytest.approx(total, rel=0.02)
    assert count.active == pytest.approx(active, rel=0.02)


RECIPES = {
    **dict.fromkeys(("fp32", "bf16", "fp8_delayed"), (None, None)),
    "fp8_delayed head": (Precision.fp8, None),
    "fp8_full swiglu": (None, Precision.fp8),
}


@pytest.mark.parametrize(
    ("name", "q_lora_rank", "shape"), pairwise([*RECIPES], [None, 128], ["deepseek_tiny", "fog_mla_tiny"])
)
def test_the_forecast_of_kept_bytes_is_what_autograd_keeps(
    name: str, q_lora_rank: int | None, shape: str, model_config: Callable[[str], ModelConfig], on_meta: OnMeta
) -> None:
    config = replace(model_config(shape), q_lora_rank=q_lora_rank)
    model, plan = on_meta(config, name.split()[0], *RECIPES[name])
    model.to_empty(device="cpu").init_weights(0)
    bind(model, plan, "cpu")
    compute = [t for layer in gemm_layers(model) for t in layer.operand or () if t is not None]
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *compute)}
    kept = {}

    def note(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    batch, length = 4, 128
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        losses = model(torch.zeros(batch, length + 1, dtype=torch.int64))
    assert losses.total.requires_grad
    measured = sum(size for pointer, size in kept.items() if pointer not in weights) - head_gradient_bytes(plan)
    assert sum(kept_bytes_per_token(config, plan).values()) == pytest.approx(measured / (batch * length), rel=0.02)


def in_kernels(config: ModelConfig, recipe: str, on_meta: OnMeta) -> tuple[DeepSeek, Plan]:
    """The model and plan that an H200 would have."""
    precision = on_meta(config, recipe)[1].config
    precision.backend = BackendChoice.cuda
    plan = Plan(precision, config.num_layers, Gpu("NVIDIA H200", (9, 0)))
    with torch.device("meta"):
        return DeepSeek(config, plan), plan


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_block"])
def test_experts_in_kernels_keep_one_result(
    recipe: str, model_config: Callable[[str], ModelConfig], on_meta: OnMeta
) -> None:
    """[gate, up] of the rows in BF16. Of x nothing of their own unless tokens travelled; in BF16 its rows, unless these
    are gathered again."""
    config = replace(model_config("moonlight_16b"), num_layers=2)
    reference = kept_bytes_per_token(config, on_meta(config, recipe)[1])
    plan = in_kernels(config, recipe, on_meta)[1]
    cuda, spread = kept_bytes_per_token(config, plan), kept_bytes_per_token(config, plan, spread=2)
    again, spread_again = (kept_bytes_per_token(config, plan, selective=True, spread=n) for n in (1, 2))
    width, rows = (2, 6 * 2048 * 2) if recipe == "bf16" else (1, 0)
    downs = width * (11264 + 2816 + 6 * 1408)  # of the dense layer, the shared experts and the routed ones
    arrived = 2 * (1 - 0.5**6) * 2048 * width
    assert reference["gemm"] - cuda["gemm"] == downs + 6 * 2048 * width - rows
    assert spread["gemm"] - cuda["gemm"] == (0 if rows else arrived)
    assert spread_again["gemm"] - again["gemm"] == arrived
    attention = sum(cuda[kind] - again[kind] for kind in ("norm", "attention"))
    assert 0 < attention < sum(cuda.values()) - sum(again.values()) - rows
    assert reference["swiglu"] == cuda["swiglu"] == spread["swiglu"] == 2 * 2 * (11264 + 2816 + 6 * 1408)
    for n in (1, 2):  # 64 experts' tiles
        in_tiles = kept_bytes_per_token(config, plan, spread=n, tokens=4096)
        more = 127 / 128 * 64 * 128 / n / 4096
        assert in_tiles["swiglu"] - cuda["swiglu"] == pytest.approx(more * 2 * 2 * 1408, rel=0.01)
        kept = in_tiles["gemm"] - (cuda, spread)[n - 1]["gemm"]
        assert kept == pytest.approx(more * 2048 * 2 if rows else 0, rel=0.01)


@pytest.mark.parametrize(("recipe", "kinds"), [("bf16", [torch.bfloat16]), ("fp8_delayed", [torch.bfloat16, FP8])])
def test_router_shared_and_routed_experts_keep_the_same_x(
    recipe: str, kinds: list[torch.dtype], on_meta: OnMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk_experts, "has_kernel", lambda score: True)
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
    config = ModelConfig(num_layers=2, num_experts=2, num_experts_per_token=2, num_mtp_layers=0, **sizes)
    model, plan = in_kernels(config, recipe, on_meta)
    model.to_empty(device="cpu").init_weights(0)
    arena = bind(model, plan, torch.device("cpu"))
    begin_step(model, arena)
    block = model.iter_blocks()[-1][1]
    assert isinstance(block, MoEBlock)
    block.moe.experts.keep_rows = False
    kept: dict[int, Tensor] = {}

    def note(t: Tensor) -> Tensor:
        return kept.setdefault(t.untyped_storage().data_ptr(), t)

    tokens = 100
    assert block.ffn_norm is not None
    x = block.ffn_norm(torch.randn(tokens, 128, dtype=torch.bfloat16, requires_grad=True), block.moe.feed)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        block.moe(x, 1)
    # weights of so many rows are there, too
    wide = [t for t in kept.values() if t.dim() == 2 and t.shape[1] == 128 and len(t) not in (2, 128, 256, 512)]
    assert [(len(t), t.dtype) for t in wide] == [(tokens, kind) for kind in kinds]
