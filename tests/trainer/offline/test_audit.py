"""The audit agrees with every recipe, and notices when something else happens than the plan says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from models import DeepSeek, ModelConfig
from precision import Feed, Plan, PrecisionConfig, bind
from precision.backends.reference import ReferenceBackend
from precision.config import RulesException
from trainer.config import Moments, OptimConfig, Schedule
from trainer.offline.audit import Finding, audit
from trainer.optim.adamw import Optimizer

CONFIGS = Path(__file__).parents[3] / "configs" / "precision"
MODEL = ModelConfig(
    hidden_size=128, num_layers=2, num_heads=2, kv_lora_rank=64, q_lora_rank=64, intermediate_size=160,
    moe_intermediate_size=48, num_experts=4, vocab_size=64,
)  # fmt: skip
OPTIM = OptimConfig(1e-3, [0.9, 0.95], 1e-8, 0.1, 1.0, Moments.fp32, Schedule.wsd, 1, 0.2, 0.1)
Change = Callable[[DeepSeek], object]


def run(name: str, change: Change | None = None, exceptions: list[RulesException] | None = None) -> list[Finding]:
    merged = OmegaConf.merge(OmegaConf.structured(PrecisionConfig), OmegaConf.load(CONFIGS / f"{name}.yaml"))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, PrecisionConfig)
    config.rules.exceptions = exceptions or []
    plan = Plan(config, MODEL.num_layers)
    model = DeepSeek(MODEL, plan)
    model.init_weights(0)
    if change is not None:
        change(model)
    arena = bind(model, plan, "cpu")
    optimizer = Optimizer(model, model.no_decay(), OPTIM, 10, torch.device("cpu"))
    torch.manual_seed(0)
    return audit(model, plan, arena, optimizer, [torch.randint(64, (2, 17)) for _ in range(2)])


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8_delayed", "fp8_jit", "fp8_block"])
def test_every_row_is_what_happens(name: str) -> None:
    findings = run(name)
    assert len(findings) > 40
    assert [finding for finding in findings if not finding.agrees] == []


def test_exceptions_are_what_happens() -> None:
    findings = run("fp8_jit", exceptions=[RulesException("layers.1.moe.experts.*"), RulesException("mtp.*.attn.*")])
    assert all(finding.agrees for finding in findings)
    seen = {finding.name: finding.seen for finding in findings}
    assert seen["layers.1.moe.experts.down"].startswith("input bf16") and seen["layers.1.moe.dispatch"] == "bf16"
    assert seen["layers.1.attn.o"].startswith("input e4m3")


def wrong_rows(name: str, change: Change) -> list[str]:
    return [finding.name for finding in run(name, change) if not finding.agrees]


def test_a_layer_in_another_precision_is_noticed() -> None:
    def swap(model: DeepSeek) -> None:
        layer = model.layers[0].attn.o  # type: ignore[union-attr]
        layer.recipe, layer.input_slot, layer.weight_slot, layer.grad_slot = model.lm_head.recipe, None, None, None  # type: ignore[union-attr]

    assert wrong_rows("fp8_jit", swap) == ["layers.0.attn.o"]


def test_sums_in_bf16_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ReferenceBackend.forward

    def sloppy(self: ReferenceBackend, x, x_inv, weight, offsets, recipe):
        if offsets is not None or x_inv is not None:
            return exact(self, x, x_inv, weight, offsets, recipe)
        total = torch.zeros(len(x), len(weight.data), dtype=x.dtype)
        for k in range(0, x.shape[1], 8):
            total += x[:, k : k + 8] @ weight.data[:, k : k + 8].t()
        return total.to(recipe.output.dtype)

    monkeypatch.setattr(ReferenceBackend, "forward", sloppy)
    assert "lm_head" in wrong_rows("bf16", lambda model: None)


def test_a_norm_in_bf16_is_noticed() -> None:
    class Bf16Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()

    assert wrong_rows("bf16", lambda model: setattr(model, "norm", Bf16Norm())) == ["norm"]


@pytest.mark.parametrize("part", ["combine", "accumulate"])
def test_a_sum_over_experts_in_another_format_is_noticed(part: str) -> None:
    def lie(model: DeepSeek) -> None:
        experts = model.layers[1].moe.experts  # type: ignore[union-attr]
        setattr(experts, part, torch.bfloat16 if part == "accumulate" else torch.float32)

    assert wrong_rows("fp8_delayed", lie) == [f"layers.1.moe.{part}"]


def test_tokens_that_travel_in_another_format_are_noticed() -> None:
    def lie(model: DeepSeek) -> None:
        experts = model.layers[1].moe.experts  # type: ignore[union-attr]
        experts.dispatch, experts.rows_feed = torch.bfloat16, Feed(experts.gate_up)  # type: ignore[union-attr]

    assert wrong_rows("fp8_delayed", lie) == ["layers.1.moe.dispatch"]
