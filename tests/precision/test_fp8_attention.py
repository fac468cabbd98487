"""FP8 attention against float64: on data that hides no rule of it, within documents, at odd lengths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from precision import AttentionCore, Plan, PrecisionConfig, ScalingArena, document_mask, proof, resolve
from precision import fp8_attention as module
from precision.attention import visible
from precision.config import Accumulation, BackendChoice, Precision
from precision.formats import E4M3, E5M2, static_scale
from precision.fp8_attention import _backward
from precision.hardware import Gpu
from precision.rates import Entry, RateTable

Recipe = Callable[..., PrecisionConfig]
D, V = 48, 32
HALF_STEP = 2.0**-4, 2.0**-3  # largest relative error of a normal number in E4M3, in E5M2


def core_of(config: PrecisionConfig, bound: float | None = D**0.5) -> tuple[AttentionCore, ScalingArena, Plan]:
    config.table.attn.core = Precision.fp8
    plan = Plan(config, 1)
    core = AttentionCore(plan.core("layers.0.attn.core", 2, D, V, bound))
    return core, ScalingArena(core.slots(), config.scaling, plan.delayed, "cpu"), plan


def data(kind: str, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normed q and k, v, dO. sink: every query points at the first key, so that its P is near 1. Tokens' gradients are
    of sizes apart."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, 2, length, D, generator=g) for _ in range(2))
    v, dout = (torch.randn(2, 2, length, V, generator=g) for _ in range(2))
    if kind == "sink":
        q, k = 1.2 * q + torch.randn(D, generator=g), k.clone()
        k[:, :, :1] = q.mean(2, keepdim=True)
    if kind == "peaked":
        q = 0.5 * k + q
    q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
    dout = dout * torch.randn(2, 2, length, 1, generator=g).exp()
    q, k, v = (t.bfloat16().requires_grad_() for t in (q, k, v))
    return q, k, v, dout.bfloat16()


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float, seen: Tensor) -> list[Tensor]:
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    out = (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def errors(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]


def run(core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float, mask: Any) -> list[Tensor]:
    out = core(q, k, v, scale, mask)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize(("kind", "length"), [("gauss", 77), ("peaked", 96), ("sink", 96), ("gauss", 1)])
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_jit"])
def test_close_to_float64(kind: str, length: int, name: str, recipe: Recipe) -> None:
    """Errors of independent roundings: those of an operand's format, a product having two, and dS those of four."""
    core, arena, _ = core_of(recipe(name))
    inputs, scale = data(kind, length), 2 / D**0.5
    seen = visible(None, length, torch.device("cpu"))
    want = exact(*inputs, scale, seen)
    for _ in range(2):  # under the tensors' own amax, then under the history's
        arena.begin_step()
        found = run(core, *inputs, scale, None)
        if length == 1:  # one key: P is 1, nothing depends on q and k
            for grad, other in ((found[1], inputs[1]), (found[2], inputs[0])):  # but for the rounding of O
                size = inputs[3].norm() * inputs[2].detach().norm() * other.detach().norm() * scale
                assert float(grad.norm()) < 2.0**-8 * float(size)
            found, want_here = [found[0], found[3]], [want[0], want[3]]
        else:
            want_here = want
        o, *rest, dv = errors(found, want_here)
        assert o < 2 * HALF_STEP[0] and dv < HALF_STEP[0] + HALF_STEP[1]
        assert all(error < 2 * sum(HALF_STEP) for error in rest)
        arena.commit(arena.finite())


def test_documents_are_kept_apart(recipe: Recipe) -> None:
    """The same as each document alone, where scales are powers of two and the same."""
    core, _, _ = core_of(recipe("fp8_delayed", scaling__power_of_two=True))
    q, k, v, dout = data("gauss", 40)
    starts = torch.tensor([[0] * 13 + [13] * 27, [0] * 40])
    ends = torch.tensor([[13] * 13 + [40] * 27, [40] * 40])
    mask = document_mask(torch.stack([starts, ends]).int(), torch.bfloat16, D, V)
    found = run(core, q, k, v, dout, 0.2, mask)
    want = exact(q, k, v, dout, 0.2, visible(mask, 40, torch.device("cpu")))
    tops = torch.full((q.shape[1],), -torch.inf)
    core(q, k, v, 0.2, mask, tops)
    scores = (q.double() @ k.double().mT * 0.2).masked_fill(~visible(mask, 40, torch.device("cpu")), -torch.inf)
    most = 0.2 * (q.double().abs() @ k.double().abs().mT).max() * 2.1 * HALF_STEP[0]  # of a rounded q and a rounded k
    assert (tops - scores.logsumexp(-1).amax((0, 2))).abs().max() < most, "max logits"
    for error in errors(found, want):
        assert error < 2 * sum(HALF_STEP)
    alone = core(q[:1, :, 13:], k[:1, :, 13:], v[:1, :, 13:], 0.2)
    assert errors([found[0][:1, :, 13:]], [alone.detach().double()])[0] < HALF_STEP[0]
    bounds = torch.stack([starts, ends]).int()  # as a kernel would be given them
    assert torch.equal(visible(bounds, 40, torch.device("cpu")), mask)


def test_rows_of_ds_sum_to_nothing_where_attention_is_peaked(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """D has to be made of the dO that makes dP. The exact one does three times worse at least."""
    core, _, _ = core_of(recipe("fp8_delayed"))
    q, k, v, dout = data("sink", 96)
    seen: list[Tensor] = []

    def spy(ds: Tensor, factor: Tensor, fmt: Any) -> Tensor:
        if fmt is E5M2 and ds.dim() == 4 and ds.shape[-1] == 96:
            seen.append(ds)
        return cast(ds, factor, fmt)

    cast = module.saturating_cast
    monkeypatch.setattr(module, "saturating_cast", spy)
    run(core, q, k, v, dout, 2 / D**0.5, None)
    ours = torch.cat(seen, 1)

    def imbalance(ds: Tensor) -> float:
        return float(ds.sum(-1).abs().sum() / ds.abs().sum())

    mixed = exact(q, k, v, dout, 2 / D**0.5, visible(None, 96, torch.device("cpu")))[0]
    dout8 = (dout.float() * 100).to(torch.float8_e5m2).float() / 100
    p = (q.float() @ k.float().mT * 2 / D**0.5).masked_fill(~visible(None, 96, q.device), -torch.inf).softmax(-1)
    broken = p * (dout8 @ v.float().mT - (dout.float() * mixed.float()).sum(-1, keepdim=True))
    assert 3 * imbalance(ours) < imbalance(broken.detach())


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nonfinite_numbers_reach_an_amax(which: int, bad: float, recipe: Recipe) -> None:
    core, arena, _ = core_of(recipe("fp8_delayed"))
    q, k, v, dout = (t.detach().clone() for t in data("gauss", 9))
    (q, k, v, dout)[which][0, 0, 3, 5] = bad
    run(core, q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, 0.2, None)
    assert not bool(arena.finite())


def test_the_same_bits_twice_and_head_by_head(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    core, _, _ = core_of(recipe("fp8_delayed"))
    inputs = data("gauss", 33)
    first, again = (run(core, *inputs, 0.2, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    monkeypatch.setattr(module, "_SCORES", 1)
    for whole, alone in zip(first, run(core, *inputs, 0.2, None), strict=True):
        torch.testing.assert_close(whole, alone, rtol=2.0**-6, atol=1e-4)


@pytest.mark.parametrize("width", [48, 96, 128, 192, 256])
def test_static_scales_never_clip_a_normed_head(width: int) -> None:
    largest = torch.tensor(width**0.5).bfloat16().float()  # one feature holds all
    scale = static_scale(width**0.5, E4M3.max)
    assert float(largest) * scale <= E4M3.max < 4 * float(largest) * scale
    if width in (128, 192):
        assert scale == 32


def test_without_a_norm_queries_are_scaled_and_a_note_warns(recipe: Recipe) -> None:
    core, arena, plan = core_of(recipe("fp8_delayed"), None)
    assert [slot.format for slot in core.slots()] == [E4M3, E4M3, E4M3, E5M2, E5M2]
    assert any("without model.qk_norm" in note for note in plan.notes)
    q, k, v, dout = data("gauss", 20)
    q = (30 * q.detach()).requires_grad_()
    found = run(core, q, k, v, dout, 0.01, None)
    want = exact(q, k, v, dout, 0.01, visible(None, 20, torch.device("cpu")))
    assert max(errors(found, want)) < 2 * sum(HALF_STEP)
    core, _, plan = core_of(recipe("fp8_delayed"))
    assert not plan.notes and core.q_slot.format is None and arena.num_scaled == 5


def test_a_graph_holds_both_passes(recipe: Recipe) -> None:
    core, arena, _ = core_of(recipe("fp8_delayed"))
    inputs = data("gauss", 16)
    want = run(core, *inputs, 0.2, None)
    amax = arena.amax.clone()
    arena.begin_step()
    compiled = torch.compile(lambda q, k, v: core(q, k, v, 0.2), backend="aot_eager", fullgraph=True)
    out = compiled(*inputs[:3])
    found = [out.detach(), *torch.autograd.grad(out, inputs[:3], inputs[3])]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert torch.equal(arena.amax, amax)
    assert _backward is torch.ops.octet.fp8_attention_backward.default


HOPPER = Gpu("NVIDIA H200", (9, 0))


@pytest.mark.parametrize("backend", [BackendChoice.auto, BackendChoice.reference])
def test_a_hopper_gpu_has_kernels_for_it(backend: BackendChoice, recipe: Recipe) -> None:
    config = recipe("fp8_full")
    config.backend, config.accumulation = backend, Accumulation.fast
    plan = Plan(config, 1, HOPPER)
    row = plan.core("layers.0.attn.core", 2, D, V, D**0.5)
    assert row.recipe.is_fp8 and "static 64" in plan.to_text()
    assert row.recipe.backend == ("reference" if backend is BackendChoice.reference else "cuda")
    assert row.recipe.sums_fast == (backend is BackendChoice.auto), "the reference's sums are exact"


@pytest.mark.parametrize("why", ["wide", "wrong", "slower"])
def test_a_core_without_a_good_kernel_stays_in_bf16(why: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe("fp8_full", never_slower=why == "slower")
    if why == "wrong":
        monkeypatch.setitem(proof.refused, proof.FP8_ATTENTION, "result of attention, error 1.0")
    if why == "slower":
        entry = Entry("core", "delayed/tensor", "fp32", (V, D, 1), 4096, {"bf16": 1.0, "cuda": 1.25})
        monkeypatch.setattr(resolve, "load_rates", lambda gpu: RateTable([entry]))
    plan = Plan(config, 1, HOPPER)
    row = plan.core("layers.0.attn.core", 2, 320 if why == "wide" else D, V, D**0.5)
    assert not row.recipe.is_fp8
    assert row.decided_by == ("never_slower: 0.80x" if why == "slower" else "no FP8 kernel")
    says = {"wide": "heads up to 256", "wrong": "are wrong here", "slower": ""}[why]
    assert any(says in note for note in plan.notes) or why == "slower"


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("backend", [BackendChoice.auto, BackendChoice.cuda])
def test_wrong_products_of_linears_leave_a_core_its_kernels(
    backend: BackendChoice, measured: bool, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe("fp8_full", never_slower=True)
    config.backend = backend
    entry = Entry("core", "delayed/tensor", "fp32", (V, D, 1), 4096, {"bf16": 1.25, "cuda": 1.0})
    monkeypatch.setattr(resolve, "load_rates", lambda gpu: RateTable([entry] * measured))
    first = Plan(config, 1, HOPPER)
    first.core("layers.0.attn.core", 2, D, V, D**0.5)
    monkeypatch.setitem(proof.refused, proof.GEMMS, "product, error 1.0")
    for saved in (None, first.backends()):
        row = Plan(config, 1, HOPPER, saved=saved).core("layers.0.attn.core", 2, D, V, D**0.5)
        assert row.recipe.is_fp8 and row.recipe.backend == "cuda"


def test_exceptions_take_a_core_in_fp8(recipe: Recipe) -> None:
    plan = Plan(recipe("fp8_full", rules__first_blocks=1), 2)
    rows = [plan.core(f"layers.{i}.attn.core", 2, D, V, D**0.5) for i in range(2)]
    assert [row.recipe.is_fp8 for row in rows] == [False, True]
    assert rows[0].decided_by == "first_blocks: 1"
