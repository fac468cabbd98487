"""On a GPU attention in FP8 is its definition: errors, sums without bias, the same bits twice, compiled, recomputed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.documents import bounds_of
from precision import AttentionCore, Plan, PrecisionConfig, ScalingArena, document_mask
from precision.attention import visible
from precision.backends.availability import cuda_problem
from precision.config import Precision
from precision.formats import E5M2, saturating_cast
from precision.hardware import detect
from trainer.parallel.blocks import _recompute_all_but_core

Recipe = Callable[..., PrecisionConfig]
SCALE, HEADS = 2**0.5 / 192**0.5, 3
CUDA = torch.device("cuda")
HALF_STEP = 2.0**-4  # largest relative error of a normal number in E4M3


@pytest.fixture(autouse=True)
def hopper() -> None:
    if (problem := cuda_problem(detect("cuda"))) is not None:
        pytest.skip(problem)


def core_of(config: PrecisionConfig, backend: str, d_qk: int, d_v: int) -> tuple[AttentionCore, ScalingArena]:
    config.table.attn.core = Precision.fp8
    plan = Plan(config, 1)
    row = plan.core("layers.0.attn.core", HEADS, d_qk, d_v, d_qk**0.5)
    core = AttentionCore(dataclasses.replace(row, recipe=dataclasses.replace(row.recipe, backend=backend)))
    return core, ScalingArena(core.slots(), config.scaling, plan.delayed, "cuda")


def data(kind: str, length: int, d_qk: int = 192, d_v: int = 128) -> list[Tensor]:
    """Normed q and k, v, dO, by position in memory. mean: v and dO have one; sink: every query points at the first
    key."""
    g = torch.Generator("cuda").manual_seed(length)
    q, k, v, dout = (torch.randn(2, length, HEADS, w, device="cuda", generator=g) for w in (d_qk, d_qk, d_v, d_v))
    if kind == "sink":
        q = q + 0.5 * k[:, :1]
    if kind == "mean":
        v, dout = v + 1, dout + 1
    q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
    dout = dout * torch.randn(2, length, HEADS, 1, device="cuda", generator=g).exp()
    return [t.bfloat16().transpose(1, 2).requires_grad_() for t in (q, k, v, dout)]


def run(core: Callable[..., Tensor], tensors: list[Tensor], mask: Tensor | None = None) -> list[Tensor]:
    q, k, v, dout = tensors
    out = core(q, k, v, SCALE, mask)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())]


def exact(tensors: list[Tensor], seen: Tensor) -> list[Tensor]:
    q, k, v, dout = (t.detach().double().requires_grad_() for t in tensors)
    out = (q @ k.mT * SCALE).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("kind", ["gauss", "mean", "sink"])
@pytest.mark.parametrize(("length", "documents"), [(1, False), (77, False), (128, True), (1000, True), (2048, False)])
@pytest.mark.parametrize(("d_qk", "d_v"), [(192, 128), (128, 128), (48, 32)])
def test_as_close_to_float64_as_the_reference(
    kind: str, length: int, documents: bool, d_qk: int, d_v: int, recipe: Recipe
) -> None:
    tensors, mask = data(kind, length, d_qk, d_v), None
    if documents:
        generator = torch.Generator("cuda").manual_seed(length)
        ends = torch.rand(2, length, device="cuda", generator=generator) * 100 < 1
        mask = document_mask(bounds_of(ends.cumsum(1, dtype=torch.int32)), torch.bfloat16, d_qk, d_v)
    want = exact(tensors, visible(mask, length, CUDA))
    for accumulation in ("fp32", "fast") if kind != "mean" else ("fp32",):  # which loses a percent of coherent sums
        config = recipe("fp8_delayed", accumulation=accumulation)
        (ours, our_arena), (theirs, their_arena) = (core_of(config, b, d_qk, d_v) for b in ("cuda", "reference"))
        for _ in range(2):  # under the tensors' own amax, then under the history's
            for arena in (our_arena, their_arena):
                arena.begin_step()
            found, reference = run(ours, tensors, mask), run(theirs, tensors, mask)
            for name, x, y, true in zip(("out", "dq", "dk", "dv"), found, reference, want, strict=True):
                size = float(true.norm())
                if length == 1 and name in ("dq", "dk"):
                    continue  # one key: nothing depends on them
                mine, its = (float((t.double() - true).norm()) for t in (x, y))
                assert mine <= 1.1 * its + 2.0**-8 * size, (name, mine / size, its / size)
            torch.testing.assert_close(our_arena.amax[:4], their_arena.amax[:4], rtol=0, atol=0)
            if length > 1:  # dS of one key is a rounding; O, which it is made of, has the rounding of P
                torch.testing.assert_close(our_arena.amax[4], their_arena.amax[4], rtol=HALF_STEP, atol=0)
            for arena in (our_arena, their_arena):
                arena.commit(arena.finite())


def test_the_same_bits_twice_compiled_and_recomputed(recipe: Recipe) -> None:
    tensors = data("gauss", 700)
    core, arena = core_of(recipe("fp8_delayed"), "cuda", 192, 128)
    arena.begin_step()
    first = run(core, tensors)

    def kept(*args: Any) -> Tensor:
        return _recompute_all_but_core(core, *args)

    for other in (core, torch.compile(core, fullgraph=True), kept):
        assert all(torch.equal(a, b) for a, b in zip(first, run(other, tensors), strict=True))


def test_fp32_sums_have_no_bias(recipe: Recipe) -> None:
    """Operands of one sign over 65,536 positions, with P uniform: O and dV against float64 of the same FP8 numbers; so
    is dK, for keys above the mean."""
    from precision.kernels import fp8_attention as kernels
    from precision.kernels.common import Cast

    S, D, V, few = 1 << 16, 64, 64, 64
    one = torch.ones((), device="cuda")
    g = torch.Generator("cuda").manual_seed(0)

    def in_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)[None, None]

    k8 = in_fp8(torch.zeros(S, D, device="cuda"), torch.float8_e4m3fn)
    q8 = in_fp8(torch.randn(S, D, device="cuda", generator=g) + 1, torch.float8_e4m3fn)
    v8 = in_fp8(torch.randn(S, V, device="cuda", generator=g) + 1, torch.float8_e4m3fn)
    dout8 = in_fp8(torch.rand(S, V, device="cuda", generator=g) + 1, torch.float8_e5m2)
    bounds = torch.tensor([0, S], device="cuda", dtype=torch.int32)[:, None, None].expand(2, 1, S).contiguous()
    out, _ = kernels.forward(q8, one, k8, one, v8, one, bounds, 0.1, False)
    row = torch.arange(1, S + 1, device="cuda", dtype=torch.float64)[:, None]
    v, dout, q = (t[0, 0].double() for t in (v8, dout8, q8))
    mean = v.cumsum(0) / row
    bias = (out[0, 0].double() - mean)[S // 2 :].mean() / mean[S // 2 :].mean()
    assert abs(float(bias)) < 1e-3
    scale, amax = torch.tensor(2.0**14, device="cuda"), torch.zeros((), device="cuda")
    how = Cast(E5M2, 1, True, 0, False)
    exact_out, exact_lse = mean.bfloat16()[None, None], row.log().float()[None, None, :, 0].contiguous()
    _, dk, dv, _ = kernels.backward(
        dout8, one, q8, one, k8, one, v8, one, bounds, exact_out, exact_lse, scale, amax, how, 0.1, False
    )
    p = (1 / row).float()
    p8 = (p * 448).to(torch.float8_e4m3fn).double() / 448
    want = (p8 * dout).flip(0).cumsum(0).flip(0)[:few]
    assert abs(float((dv[0, 0, :few].double() - want).mean() / want.mean())) < 1e-3
    total = (dout * exact_out[0, 0].double()).sum(-1, keepdim=True)
    ds = p * ((dout @ v[:few].mT) - total).float()
    ds = torch.where(row > torch.arange(few, device="cuda"), ds, 0)
    ds8 = saturating_cast(ds, scale, E5M2).double() / scale
    want = ds8.mT @ q * 0.1
    above = v[:few].sum(-1) > 1.1 * V
    assert int(above.sum()) > 3
    assert abs(float((dk[0, 0, :few].double() - want)[above].mean() / want[above].mean())) < 1e-3
