"""Attention's kernels in FP8 are their definition in Triton's interpreter, within documents and at odd lengths."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from precision import AttentionCore, Plan, PrecisionConfig, ScalingArena, document_mask
from precision.attention import visible
from precision.config import Precision
from precision.observe import sampling
from precision.rows import CUDA

kernels = pytest.importorskip("precision.kernels.fp8_attention", reason="Triton is missing")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_fp8_attention.py has the GPU")
Recipe = Callable[..., PrecisionConfig]
D, V, HEADS, SCALE = 48, 32, 2, 0.3
TILES = {"forward": (64, 32, 4, 1), "values": (32, 64, 4, 1), "keys": (32, 32, 4, 1), "queries": (32, 32, 4, 1)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences take several blocks: masked, whole and diagonal ones."""
    monkeypatch.setattr(kernels, "TILES", TILES)


def cores(config: PrecisionConfig, bound: float | None = D**0.5) -> list[tuple[AttentionCore, ScalingArena]]:
    """The kernels' core and the reference's."""
    config.table.attn.core = Precision.fp8
    made = []
    for backend in (CUDA, "reference"):
        plan = Plan(config, 1)
        row = plan.core("layers.0.attn.core", HEADS, D, V, bound)
        core = AttentionCore(dataclasses.replace(row, recipe=dataclasses.replace(row.recipe, backend=backend)))
        made.append((core, ScalingArena(core.slots(), config.scaling, plan.delayed, "cpu")))
    return made


def inputs(length: int, peaked: float) -> list[Tensor]:
    """Normed q and k, v and dO as MLA has them: transposed views, v of a wider tensor. peaked: how far every query
    points at the first key."""
    g = torch.Generator().manual_seed(length)
    q, k, v, dout = (torch.randn(2, length, HEADS, w, generator=g) for w in (D, D, 8 + V, V))
    q = q + peaked * k[:, :1]
    q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
    dout = dout * torch.randn(2, length, HEADS, 1, generator=g).exp()
    return [t.bfloat16().transpose(1, 2).requires_grad_() for t in (q, k, v[..., 8:], dout)]


def run(core: AttentionCore, tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    q, k, v, dout = tensors
    out = core(q, k, v, SCALE, mask, tops := torch.full((HEADS,), -torch.inf))
    return [out.detach(), tops, *torch.autograd.grad(out, (q, k, v), dout.detach())]


def exact(tensors: list[Tensor], seen: Tensor) -> list[Tensor]:
    q, k, v, dout = (t.detach().double().requires_grad_() for t in tensors)
    logits = (q @ k.mT * SCALE).masked_fill(~seen, -torch.inf)
    out = logits.softmax(-1) @ v
    return [out.detach(), logits.detach().logsumexp(-1).amax((0, 2)), *torch.autograd.grad(out, (q, k, v), dout)]


def error(x: Tensor, want: Tensor) -> float:
    return float((x.double() - want).norm() / want.norm())


def masks(length: int, documents: bool) -> Tensor | None:
    if not documents:
        return None
    starts = torch.tensor([[0] * 13 + [13] * (length - 13), [0] * length])
    ends = torch.tensor([[13] * 13 + [length] * (length - 13), [length] * length])
    return document_mask(torch.stack([starts, ends]).int(), torch.bfloat16, D, V)


@pytest.mark.parametrize(
    ("name", "length", "peaked", "documents"),
    [("fp8_delayed", 1, 0, False), ("fp8_delayed", 77, 0, True), ("fp8_jit", 77, 0, True), ("fp8_jit", 96, 3, False)],
)
def test_as_close_to_float64_as_the_reference(
    length: int, peaked: float, documents: bool, name: str, recipe: Recipe
) -> None:
    """Forward P is rounded under a running maximum, so errors agree and not bits. One key: q and k have no gradient."""
    tensors, mask = inputs(length, peaked), masks(length, documents)
    want = exact(tensors, visible(mask, length, torch.device("cpu")))
    (ours, our_arena), (theirs, their_arena) = cores(recipe(name, accumulation="fast" if documents else "fp32"))
    for _ in range(2):  # under the tensors' own amax, then under the history's
        for arena in (our_arena, their_arena):
            arena.begin_step()
        found, reference = run(ours, tensors, mask), run(theirs, tensors, mask)
        assert all(x.dtype is torch.bfloat16 and x.transpose(1, 2).is_contiguous() for x in found[::2])
        for ours_, theirs_, want_ in zip(found, reference, want, strict=True):
            if float(want_.norm()) > 0:
                assert error(ours_, want_) <= 1.1 * error(theirs_, want_) + 2.0**-8
        torch.testing.assert_close(our_arena.amax, their_arena.amax, rtol=2.0**-10, atol=1e-30)
        for arena in (our_arena, their_arena):
            arena.commit(arena.finite())


def test_heads_that_are_not_normed_are_scaled(recipe: Recipe) -> None:
    tensors = inputs(33, 0)
    tensors[0] = (8 * tensors[0].detach()).requires_grad_()
    want = exact(tensors, visible(None, 33, torch.device("cpu")))
    (ours, _), (theirs, _) = cores(recipe("fp8_delayed"), None)
    for found, reference, true in zip(run(ours, tensors, None), run(theirs, tensors, None), want, strict=True):
        assert error(found, true) <= 1.1 * error(reference, true) + 2.0**-8


def test_large_logits_of_a_second_document_are_finite(recipe: Recipe) -> None:
    """Where its rows meet a whole block of the first one before their own keys."""
    tensors = inputs(64, 0)
    tensors[:2] = [(1000 * x.detach()).requires_grad_() for x in tensors[:2]]
    places = torch.tensor([[0] * 40 + [40] * 24, [40] * 40 + [64] * 24])[:, None].expand(2, 2, 64).int()
    mask = document_mask(places.contiguous(), torch.bfloat16, D, V)
    (ours, _), (theirs, _) = cores(recipe("fp8_delayed"), None)
    found, reference = run(ours, tensors, mask), run(theirs, tensors, mask)
    assert all(torch.isfinite(x).all() for x in (*found, *reference))
    torch.testing.assert_close(found[1], reference[1], rtol=2.0**-20, atol=0)


@pytest.mark.parametrize(("which", "bad"), [(i, float("nan") if i % 2 else float("inf")) for i in range(4)])
def test_nonfinite_numbers_reach_an_amax(which: int, bad: float, recipe: Recipe) -> None:
    tensors = [t.detach().clone() for t in inputs(9, 0)]
    tensors[which][0, 0, 3, 5] = bad
    core, arena = cores(recipe("fp8_delayed"))[0]
    run(core, [t.requires_grad_() for t in tensors], None)
    assert not bool(arena.finite())


def test_a_sampled_step_is_shown_ds_of_some_queries(recipe: Recipe) -> None:
    """The kernels never hold dS: rows of the first head are computed again, and the step is the same."""
    tensors, seen = inputs(40, 0), {}

    def sampler(place: int, x: Tensor, data: Tensor, inv: Tensor, fmt: object, live: Tensor | None = None) -> None:
        seen[place] = x.double(), data.double() * inv

    (core, _), (theirs, _) = cores(recipe("fp8_delayed"))
    plain = run(core, tensors, None)
    with sampling(sampler):
        sampled = run(core, tensors, None)
        own = dict(seen)
        run(theirs, tensors, None)
    assert all(torch.equal(a, b) for a, b in zip(plain, sampled, strict=True))
    assert core.scores_slot.place is not None
    place = int(core.scores_slot.place)
    ours, read = own[place]
    assert ours.shape[-1] == 40 and error(read, ours) < 2.0**-3
    assert float(ours.abs().max()) > 0 and set(own) == set(seen)
