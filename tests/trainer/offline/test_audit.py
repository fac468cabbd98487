"""The audit agrees with every recipe, and notices when something else happens than the plan says."""

import dataclasses
import importlib.util
import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from models import DeepSeek, ModelConfig
from models.config import NormPosition
from models.matrices import division
from precision import Feed, Plan, PrecisionConfig, bind, gemm_layers
from precision.backends.products import truncated_matmul
from precision.backends.reference import ReferenceBackend
from precision.config import BackendChoice, Method, Precision, RulesException
from precision.hardware import Gpu
from precision.linear import quantize
from precision.rows import GemmRecipe
from precision.scaling import Slot
from trainer.config import Coefficients, Iteration, Moments, MuonConfig, OptimConfig, Schedule
from trainer.offline.audit import Audit, Finding, audit
from trainer.offline.audit.accumulation import check_sums, probe
from trainer.optim.adamw import LearningRate, Optimizer
from trainer.optim.muon import Muon
from trainer.optim.owners import layout

CONFIGS = Path(__file__).parents[3] / "configs" / "precision"
MODEL = ModelConfig(
    hidden_size=128, num_layers=2, num_heads=2, kv_lora_rank=64, q_lora_rank=64, intermediate_size=160,
    moe_intermediate_size=48, num_experts=4, vocab_size=64,
)  # fmt: skip
FEW_KERNELS = dataclasses.replace(MODEL, num_mtp_layers=0, num_experts=2, num_experts_per_token=1)  # interpreted
OPTIM = OptimConfig(1e-3, [0.9, 0.95], 1e-8, 0.1, 1.0, Moments.fp32, Schedule.wsd, 1, 0.2, 0.1)
Change = Callable[[DeepSeek], object]


def load(name: str) -> PrecisionConfig:
    name, *also = name.split("+")
    merged = OmegaConf.merge(OmegaConf.structured(PrecisionConfig), OmegaConf.load(CONFIGS / f"{name}.yaml"))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, PrecisionConfig)
    config.table.swiglu = Precision.fp8 if "swiglu" in also else None
    config.table.lm_head = Precision.fp8 if "head" in also else config.table.lm_head
    return config


def watch(
    name: str,
    change: Change | None = None,
    exceptions: list[RulesException] | None = None,
    backend: BackendChoice = BackendChoice.reference,
    muon: bool = False,
) -> Audit:
    config, of_model = load(name), MODEL if backend is BackendChoice.reference else FEW_KERNELS
    if name == "fp8_full":
        of_model = dataclasses.replace(of_model, norm_position=NormPosition.post, qk_norm=True)
    config.rules.exceptions = exceptions or []
    config.backend = backend
    plan = Plan(config, of_model.num_layers, None if backend is BackendChoice.reference else Gpu("NVIDIA H200", (9, 0)))
    model = DeepSeek(of_model, plan)
    model.init_weights(0)
    if change is not None:
        change(model)
    arena = bind(model, plan, "cpu")
    optimizer = Optimizer(model, model.no_decay(), OPTIM, LearningRate(OPTIM, 10), torch.device("cpu"))
    if muon:
        settings = MuonConfig(0.95, True, Coefficients.quintic, None, Iteration.bf16, 0.2, False)
        rows = {
            f"{name}.weight": layout(tuple(model.get_parameter(f"{name}.weight").shape), division(of_model, row))
            for name, row in plan.gemms.items()
            if row.op != "lm_head"
        }
        optim = dataclasses.replace(OPTIM, muon=settings)
        optimizer = Muon(model, model.no_decay(), optim, LearningRate(optim, 10), torch.device("cpu"), rows)
    torch.manual_seed(0)
    # a kernel of rotary has a program for each token; a second step is for scales that come from a history
    shape, steps = ((2, 17), 2) if backend is BackendChoice.reference else ((1, 9), 1 if name == "bf16" else 2)
    return audit(model, plan, arena, optimizer, [torch.randint(64, shape) for _ in range(steps)], shortest=128)


def test_muons_momentum_is_seen_too() -> None:
    found = watch("bf16", muon=True)
    assert all(finding.agrees for finding in found.findings)
    assert any(finding.name == "optim.moments" for finding in found.findings)


def run(name: str, change: Change | None = None, exceptions: list[RulesException] | None = None) -> list[Finding]:
    return watch(name, change, exceptions).findings


@pytest.mark.parametrize("name", ["fp32", "fp16", "fp8_delayed+head", "fp8_block+swiglu"])  # the others: below
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


def test_each_product_of_attention_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncast(p: torch.Tensor, scale: float) -> torch.Tensor:
        return p

    monkeypatch.setattr("precision.fp8_attention._quantize_probabilities", uncast)
    findings = run("fp8_full")
    assert sum(" = " in finding.name for finding in findings) == 3 * 7
    wrong = {finding.name.partition(".core ")[2] for finding in findings if not finding.agrees}
    assert wrong == {"O = P v forward", "dV = P^T dO backward"}


def test_an_operand_of_attention_under_its_own_amax_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """v alone, in a recipe whose scales come from histories."""

    def own(x: torch.Tensor, slot: Slot, recipe: GemmRecipe) -> tuple[torch.Tensor, torch.Tensor]:
        current = dataclasses.replace(recipe, scaling=dataclasses.replace(recipe.scaling, method=Method.current))
        return quantize(x, slot, current if slot.names[0].endswith(".core:v") else recipe)

    monkeypatch.setattr("precision.fp8_attention.quantize", own)
    wrong = {finding.name.partition(".core ")[2] for finding in run("fp8_full") if not finding.agrees}
    assert wrong == {"O = P v forward", "dP = dO v^T backward"}


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


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing")


@needs_triton
@pytest.mark.parametrize(  # cuBLAS has blocks on a GPU only
    ("name", "keeps"),
    [
        ("bf16", True),
        ("fp8_delayed+swiglu", False),
        pytest.param("fp8_delayed+swiglu", True, marks=pytest.mark.exhaustive),
        pytest.param("fp8_jit", True, marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_are_what_happens(name: str, keeps: bool) -> None:
    """keeps: linears keep a transposed copy of their weight."""

    def choose(model: DeepSeek) -> None:
        for layer in gemm_layers(model):
            layer.keeps_transposed = keeps

    found = watch(name, choose, backend=BackendChoice.cuda)
    assert [finding for finding in found.findings if not finding.agrees] == []
    names = {finding.name for finding in found.findings}
    for kind in ("layers.0.attn_norm statistics", "layers.1.moe.gate scores", "optim arithmetic"):
        assert kind in names
    assert "layers.1.moe.experts.down" in found.probes or "layers.1.moe.experts.gate_up" in found.probes
    assert any("registers" in line for line in found.unseen), "kernels are not seen through"


@needs_triton
def test_the_audit_notices_a_difference_inside_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    from precision.backends.cuda import CudaBackend
    from precision.kernels import ffn_ops, grouped_gemm, norm

    nt, combine, rms_norm, forward = grouped_gemm.nt, ffn_ops.combine, norm.rms_norm, CudaBackend.forward

    def bf16_statistics(*args: Any, **kwargs: Any) -> Any:
        y, data, inv, rstd = rms_norm(*args, **kwargs)
        return y, data, inv, rstd.bfloat16().float()

    def coarse_sum(rows: torch.Tensor, to: Any, add: Any = None, partial: Any = None) -> Any:
        total, weights = combine(rows, to, add, partial)
        return total * 1.02, weights

    monkeypatch.setattr(norm, "rms_norm", bf16_statistics)
    monkeypatch.setattr(ffn_ops, "combine", coarse_sum)
    monkeypatch.setattr(grouped_gemm, "nt", lambda *args: nt(*args) * 0.99)
    monkeypatch.setattr(CudaBackend, "forward", lambda *args: forward(*args) * (0.99 if args[4] is None else 1.0))
    found = watch("fp8_delayed", backend=BackendChoice.cuda)
    wrong = {finding.name: finding.seen for finding in found.findings if not finding.agrees}
    assert wrong["layers.0.attn_norm statistics"] == "less than fp32"
    assert wrong["layers.1.moe.accumulate"] == "bf16"
    assert wrong["layers.1.moe.experts.down"].endswith("sums fp32+fast")
    assert wrong["layers.0.attn.o"].endswith("sums fp32+fast")


@needs_triton
def test_kernels_of_attention_are_what_happens_and_a_coarse_softmax_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running maximum under P and the tensor cores' sums of scores are allowed for. One step of BF16, here in the
    second layer, is not."""
    from precision.kernels import fp8_attention as kernels

    forward, calls = kernels.forward, itertools.count()

    def coarse(*args: Any) -> Any:
        out, lse = forward(*args)
        return out, lse * (1 + 2.0**-8 * (next(calls) % FEW_KERNELS.num_layers))

    monkeypatch.setattr(kernels, "forward", coarse)
    findings = watch("fp8_full", backend=BackendChoice.cuda).findings
    assert {finding.name for finding in findings if not finding.agrees} == {"layers.1.attn.core softmax"}
    names = {finding.name for finding in findings}
    assert names >= {"layers.0.attn.core softmax", "layers.0.attn.q_head_norm statistics"}


def test_a_probe_measures_the_bias_of_each_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(load("fp8_delayed"), 1)
    row = plan.gemm("layers.0.ffn.down", "ffn", 64, 32)
    exact = probe(row, 16, torch.device("cpu"), 128)
    assert exact.word == "fp32" and exact.lengths == (128, 128, 128)
    assert max(map(abs, (exact.fprop, exact.dgrad, exact.wgrad))) < 4 * 2.0**-8 / 128, "of the mean of 128^2 roundings"
    for name in ("forward", "dgrad", "wgrad"):
        method = getattr(ReferenceBackend, name)
        monkeypatch.setattr(ReferenceBackend, name, lambda *args, method=method: method(*args) * 0.98)
        assert probe(row, 16, torch.device("cpu"), 128).word == ("fast" if name == "wgrad" else "fp32+fast")


def test_the_only_expert_is_probed_as_experts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Plan(load("fp8_delayed"), 1).gemm("layers.0.moe.experts.down", "moe.experts", 64, 32, groups=1)
    forward, ends = ReferenceBackend.forward, []

    def seen(*args: Any) -> torch.Tensor:
        ends.append(args[4])
        return forward(*args)

    monkeypatch.setattr(ReferenceBackend, "forward", seen)
    assert probe(row, 16, torch.device("cpu"), 128).word == "fp32" and ends[0].tolist() == [128]


def test_sums_too_short_to_tell_are_those_that_are_planned() -> None:
    """The sum of 16 terms that a tensor core truncates rounds to BF16 as the FP32 sum does; that of 2,048 does not."""
    generator = torch.Generator().manual_seed(0)
    for length, both in ((16, True), (2048, False)):
        a, w = (1 + torch.rand(shape, generator=generator) / 4 for shape in ((8, length), (length, 8)))
        a8, w8, inv = a.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), torch.tensor(2.0)
        exact, short = a8.float() @ w8.float(), truncated_matmul(a8.float(), w8.float())
        for product, fast in ((exact, False), (short, True)):
            y = (4 * product).bfloat16()
            assert check_sums(y, a8, inv, w8, inv, None, fast)
            assert check_sums(y, a8, inv, w8, inv, None, not fast) == both


def test_attention_within_documents_is_said_to_be_unseen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model.num_layers=1", "model.num_mtp_layers=0", "model.hidden_size=64", "trainer.sequence_length=16"]
    monkeypatch.setattr("sys.argv", ["audit_precision.py", *words, "trainer.document_masking=true"])
    runpy.run_path(str(CONFIGS.parents[1] / "scripts" / "audit_precision.py"))["run"]()
    assert "\nnot seen: trainer.document_masking: the text is random, " in capsys.readouterr().out
