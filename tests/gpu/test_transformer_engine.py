"""Transformer Engine's modules behind our layers: they compute what the reference computes, and keep no state of their
own: amaxes, scales and histories are the arena's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models import DeepSeek, ModelConfig
from precision import GroupedLinear, Linear, Plan, PrecisionConfig, ScalingArena, begin_step, bind
from precision.backends.availability import te_missing
from precision.hardware import detect

Recipe = Callable[..., PrecisionConfig]
pytestmark = pytest.mark.skipif(te_missing() is not None, reason=f"needs Transformer Engine: {te_missing()}")

DEVICE = "cuda"
RECIPES = {
    "bf16": ("bf16", {}),
    "delayed": ("fp8_delayed", {}),
    "delayed, E4M3 gradients, margin, powers of two": (
        "fp8_delayed",
        {"scaling__backward": "e4m3", "scaling__margin": 1, "scaling__power_of_two": True},
    ),
    "current": ("fp8_jit", {"scaling__granularity": "tensor", "scaling__power_of_two": False}),
    "current, powers of two": ("fp8_jit", {"scaling__granularity": "tensor"}),
    "block": ("fp8_block", {}),
}
FP8 = [name for name in RECIPES if name != "bf16"]
STEPS = 3  # the first without history, the others with one


def make(
    recipe: Recipe, name: str, backend: str, inner: int = 256, outer: int = 384, groups: int = 0
) -> tuple[Linear | GroupedLinear, ScalingArena]:
    """A layer of that backend with weights that do not depend on it, and its arena."""
    base, overrides = RECIPES[name]
    plan = Plan(recipe(base, backend=backend, **overrides), 1, detect(DEVICE))
    torch.manual_seed(0)
    if groups:
        layer = GroupedLinear(plan.gemm("layers.0.moe.experts.down", "moe.experts", inner, outer, groups))
    else:
        layer = Linear(plan.gemm("layers.0.ffn.down", "ffn", inner, outer))
    torch.nn.init.normal_(layer.weight, std=0.1)
    if groups:
        layer.weight.data.mul_(torch.logspace(-1, 1, groups)[:, None, None])
    layer.to(DEVICE)
    assert layer.recipe.backend == backend
    return layer, bind(layer, plan, DEVICE)


def data(rows: int, layer: Linear | GroupedLinear, seed: int) -> tuple[Tensor, Tensor]:
    """x and dy, drawn from the seed; gradients as small as they are in training."""
    generator = torch.Generator().manual_seed(seed)
    outer, inner = layer.weight.shape[-2:]
    x = torch.randn(rows, inner, generator=generator).bfloat16().to(DEVICE).requires_grad_()
    return x, (torch.randn(rows, outer, generator=generator) * 1e-6).bfloat16().to(DEVICE)


def step(
    layer: Linear | GroupedLinear, arena: ScalingArena, x: Tensor, dy: Tensor, sizes: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One step, committed if all is finite: y, dx, dw."""
    begin_step(layer, arena)
    layer.weight.grad = x.grad = None
    y = layer(x) if sizes is None else layer(x, torch.tensor(sizes).cumsum(0).int().to(DEVICE))
    y.backward(dy)
    arena.commit(arena.finite())
    assert x.grad is not None and layer.weight.grad is not None
    return y.detach(), x.grad.detach(), layer.weight.grad.detach()


def check_close(got: Tensor, want: Tensor, limit: float, what: str) -> None:
    """Relative error of the whole, in the Frobenius norm."""
    assert got.shape == want.shape
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    assert error <= limit, f"{what}: {error:.4f} off the reference, {limit} allowed"


def limits(name: str) -> dict[str, float]:
    """A scale that differs in its last bit moves a few E5M2 numbers by a quarter. Blocks: TE casts x for the weight
    gradient from the exact tensor, the reference from its FP8 rows."""
    fp8 = name != "bf16"
    return {"y": 0.01, "dx": 0.05 if fp8 else 0.01, "dw": 0.06 if fp8 else 0.01}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("rows", "inner", "outer"), [(256, 256, 384), (37, 144, 272), (1, 128, 128)])
def test_a_linear_computes_what_the_reference_does(recipe: Recipe, name: str, rows: int, inner: int, outer: int):
    ours, our_arena = make(recipe, name, "transformer_engine", inner, outer)
    twin, its_arena = make(recipe, name, "reference", inner, outer)
    assert our_arena.names == its_arena.names
    for number in range(STEPS):
        got = step(ours, our_arena, *data(rows, ours, number))
        want = step(twin, its_arena, *data(rows, ours, number))
        for (what, limit), a, b in zip(limits(name).items(), got, want, strict=True):
            check_close(a, b, limit, f"{what} in step {number + 1}")
        torch.testing.assert_close(our_arena.amax, its_arena.amax, rtol=0.01, atol=0)  # dy is the same, so all are
        torch.testing.assert_close(our_arena.scale, its_arena.scale, rtol=0.01, atol=0)
        assert (our_arena.amax > 0).all()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", [(5, 0, 131, 1), (0, 0, 7, 0), (64, 32, 16, 48)])
def test_a_grouped_linear_computes_what_the_reference_does(recipe: Recipe, name: str, sizes: tuple[int, ...]):
    ours, our_arena = make(recipe, name, "transformer_engine", groups=len(sizes))
    twin, its_arena = make(recipe, name, "reference", groups=len(sizes))
    for number in range(STEPS):
        x, dy = data(sum(sizes), ours, number)
        got, want = step(ours, our_arena, x, dy, sizes), step(twin, its_arena, x, dy, sizes)
        # current scaling: TE scales each expert's rows by themselves
        bounds = {"y": 0.06, "dx": 0.15, "dw": 0.15} if name.startswith("current") else limits(name)
        for (what, limit), a, b in zip(bounds.items(), got, want, strict=True):
            check_close(a, b, limit, f"{what} in step {number + 1}")
        torch.testing.assert_close(our_arena.amax, its_arena.amax, rtol=0.01, atol=0)
        torch.testing.assert_close(our_arena.scale, its_arena.scale, rtol=0.01, atol=0)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("groups", [0, 4])
def test_nothing_of_te_is_in_a_checkpoint_or_trained(recipe: Recipe, name: str, groups: int):
    layer, arena = make(recipe, name, "transformer_engine", groups=groups)
    sizes = (16, 16, 16, 16) if groups else None
    step(layer, arena, *data(64, layer, 0), sizes)
    assert list(layer.state_dict()) == ["weight"]
    assert [key for key, _ in layer.named_parameters()] == ["weight"] and not list(layer.named_buffers())
    assert len(list(layer.modules())) == 1
    assert layer.weight.dtype == torch.float32 and layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("name", FP8)
def test_microbatches_raise_the_amaxes_and_add_up_in_fp32(recipe: Recipe, name: str):
    layer, arena = make(recipe, name, "transformer_engine")
    step(layer, arena, *data(64, layer, 0))
    begin_step(layer, arena)
    layer.weight.grad = None
    sums, tops = torch.zeros_like(layer.weight), torch.zeros(2, device=DEVICE)
    for size in (1.0, 100.0, 0.01):
        x, dy = data(64, layer, 1)
        before = layer.weight.grad.clone() if layer.weight.grad is not None else 0
        layer(x * size).backward(dy * size)
        assert layer.weight.grad is not None
        sums += layer.weight.grad - before
        tops = torch.maximum(tops, torch.stack([(x * size).abs().max().float(), (dy * size).abs().max().float()]))
    rows = dict(zip(arena.names, arena.amax.tolist(), strict=True))
    assert rows["layers.0.ffn.down:input"] == pytest.approx(tops[0].item(), rel=1e-3)
    assert rows["layers.0.ffn.down:grad"] == pytest.approx(tops[1].item(), rel=1e-3)
    top = layer.weight.detach().bfloat16().abs().max().item()
    assert rows["layers.0.ffn.down:weight"] == pytest.approx(top, rel=1e-6)
    torch.testing.assert_close(layer.weight.grad, sums, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("groups", [0, 4])
def test_a_skipped_step_leaves_no_trace(recipe: Recipe, name: str, groups: int):
    sizes = (16, 3, 0, 45) if groups else None
    spoilt, its_arena = make(recipe, name, "transformer_engine", groups=groups)
    spared, other_arena = make(recipe, name, "transformer_engine", groups=groups)
    for layer, arena in ((spoilt, its_arena), (spared, other_arena)):
        step(layer, arena, *data(64, layer, 0), sizes)
    before = its_arena.history.clone(), its_arena.scale.clone()
    x, dy = data(64, spoilt, 1)
    x.data[3, 5] = float("inf")
    step(spoilt, its_arena, x, dy, sizes)
    assert not its_arena.finite(), "an Inf in x shows in the amaxes"
    if its_arena.delayed:
        assert torch.equal(its_arena.history, before[0]) and torch.equal(its_arena.scale, before[1])
    after = step(spoilt, its_arena, *data(64, spoilt, 2), sizes)
    want = step(spared, other_arena, *data(64, spared, 2), sizes)
    for a, b in zip(after, want, strict=True):
        assert torch.equal(a, b)


def test_scales_come_back_from_the_arena_of_a_checkpoint(recipe: Recipe):
    layer, arena = make(recipe, "delayed", "transformer_engine")
    for number in range(STEPS):
        step(layer, arena, *data(64, layer, number))
    again, new_arena = make(recipe, "delayed", "transformer_engine")
    assert new_arena.load_state_dict(arena.state_dict()) == []
    for a, b in zip(step(again, new_arena, *data(64, layer, 9)), step(layer, arena, *data(64, layer, 9)), strict=True):
        assert torch.equal(a, b)


def test_evaluation_between_steps_changes_nothing(recipe: Recipe):
    for name in RECIPES:
        layer, arena = make(recipe, name, "transformer_engine")
        twin, its_arena = make(recipe, name, "transformer_engine")
        for number in range(STEPS):
            with torch.no_grad():
                layer(data(24, layer, 50)[0])
            got, want = (step(m, a, *data(64, layer, number)) for m, a in ((layer, arena), (twin, its_arena)))
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)


SMALL = ModelConfig(
    vocab_size=320,
    hidden_size=128,
    num_layers=3,
    num_heads=2,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_experts=8,
)


def model(recipe: Recipe, name: str, backend: str) -> tuple[DeepSeek, ScalingArena]:
    base, overrides = RECIPES[name]
    plan = Plan(recipe(base, backend=backend, **overrides), SMALL.num_layers, detect(DEVICE), tokens=128)
    with torch.device("meta"):
        built = DeepSeek(SMALL, plan)
    built.to_empty(device=DEVICE)
    built.init_weights(seed=0)
    return built, bind(built, plan, DEVICE)


@pytest.mark.parametrize("name", RECIPES)
def test_a_whole_model_learns_the_same(recipe: Recipe, name: str):
    tokens = torch.randint(SMALL.vocab_size, (2, 65), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = {}
    for backend in ("transformer_engine", "reference"):
        built, arena = model(recipe, name, backend)
        for _ in range(2):
            begin_step(built, arena)
            built.zero_grad()
            loss = built(tokens).total
            loss.backward()
            arena.commit(arena.finite())
        grads = {key: p.grad.detach() for key, p in built.named_parameters() if p.grad is not None}
        found[backend] = loss.detach(), grads, list(built.state_dict()), arena.names
    (loss, grads, keys, names), (want, its_grads, its_keys, its_names) = found.values()
    assert keys == its_keys and grads.keys() == its_grads.keys()
    assert set(its_names) <= set(names), "TE quantises x for each layer that reads it, so some rows are more"
    torch.testing.assert_close(loss, want, rtol=2e-3, atol=0)
    total = {
        side: torch.cat([g.flatten() for g in side_grads.values()])
        for side, side_grads in (("te", grads), ("ref", its_grads))
    }
    check_close(total["te"], total["ref"], 0.02 if name == "bf16" else 0.15, "all gradients")
