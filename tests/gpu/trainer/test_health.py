"""Looks inside and shadows on the GPU: a step that is sampled, compiled or as a CUDA graph, computes what it does
unseen; what its kernels cast is what is seen; a shadow leaves nothing behind."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from precision import begin_step, gemm_layers, refresh_weights
from precision.observe import observing, sampling
from trainer.config import Config
from trainer.health.activations import BlockKurtosis
from trainer.health.casts import Casts, Rows
from trainer.health.health import Health
from trainer.step import second_pass
from trainer.step.engine import Engine
from trainer.step.metrics import copy_to_host
from trainer.step.microbatch import GraphedMicrobatch
from trainer.step.train_step import train_step

Engines = Callable[..., Engine]
BATCH, LENGTH = 8, 128
SIZES = f"trainer.global_batch_size={BATCH}", "trainer.microbatch_size=4", "optim.warmup_steps=1", "optim.lr=1e-3"
WAYS = {
    "eager": ["compile.enabled=false"],
    "compiled": ["compile.enabled=true"],
    "recomputed": ["compile.enabled=true", "recompute=selective"],
    "graph": ["compile.enabled=false", "cuda_graph=true"],
    "compiled graph": ["compile.enabled=true", "cuda_graph=true"],
}
RECIPES = ["bf16", "fp8_delayed", "fp8_jit", "fp8_block"]
RUNS = [(recipe, way) for way in WAYS for recipe in RECIPES if way in ("eager", "graph") or "jit" not in recipe]


def batch(e: Engine, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(e.model.config.vocab_size, (BATCH, LENGTH + 1), generator=generator)


def warm(engine: Engines, recipe: str, way: str) -> Engine:
    """After some steps, so that scales have a history."""
    torch._dynamo.reset()
    e = engine(*SIZES, f"+recipe={recipe}", *WAYS[way])
    for step in (1, 2):
        assert bool(train_step(e, step, batch(e, step), 4).verdict.ok)
    return e


def passes(e: Engine, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A step's losses, gradients and amaxes, without its end; the next one begins where this one did."""
    begin_step(e.model, e.arena)
    losses = [e.microbatch(part, i, 2).total for i, part in enumerate(tokens.to(e.device).split(4))]
    gradients = torch.cat([p.grad.flatten() for p in e.model.parameters() if p.grad is not None])
    found = torch.stack(losses), gradients.clone(), e.arena.amax.clone()
    e.optimizer.zero_grad()
    return found


@pytest.mark.parametrize(("recipe", "way"), RUNS)
def test_a_sampled_step_is_the_step(engine: Engines, recipe: str, way: str) -> None:
    """To the bit where two plain passes are the same; else as near as these are to each other (sums by atomics)."""
    e = warm(engine, recipe, way)
    rows, tokens = Rows(e.arena), batch(e, 3)
    casts, kurtosis = Casts(rows, e.device), BlockKurtosis(e.model.iter_blocks())
    plain, again = passes(e, tokens), passes(e, tokens)
    assert not kurtosis.sums.any(), "no sampler is set"
    with sampling(casts), torch.compiler.set_stance("fail_on_recompile"):
        watched = passes(e, tokens)
    seen, sums = casts._parts.sum(1), kurtosis.sums
    after = passes(e, tokens)
    assert torch.equal(seen, casts._parts.sum(1)) and torch.equal(sums, kurtosis.sums), "no sampler is set any more"
    for found in (watched, after):
        for part, noise, theirs in zip(found, again, plain, strict=True):
            if torch.equal(noise, theirs):
                assert torch.equal(part, theirs)
            allowed = 4 * float((noise - theirs).double().norm()) + 1e-6 * float(theirs.double().norm())
            assert float((part - theirs).double().norm()) <= allowed
    assert torch.isfinite(sums[..., 0]).all() and (sums[..., 1] > 0).all(), "each place of each block"
    unseen = [name for name, row in zip(rows.names, seen.tolist(), strict=True) if not row[0]]
    assert not unseen, "every tensor in FP8"

    whole = Casts(rows, e.device)
    with second_pass.without_side_effects(e), observing(whole):
        for part in tokens.split(4):
            second_pass.run(e, part, BATCH, lambda name, parameter: setattr(parameter, "grad", None))
    theirs = whole._parts.sum(1)
    errors = [(casts[:, 3] / casts[:, 4]).sqrt() for casts in (seen, theirs)]
    torch.testing.assert_close(*errors, rtol=0.1, atol=2e-3)
    torch.testing.assert_close(*(c[:, 2] / c[:, 0] for c in (seen, theirs)), rtol=0.2, atol=5e-3)
    for name, ours, passed in zip(rows.names, seen[:, 0].tolist(), theirs[:, 0].tolist(), strict=True):
        if name.endswith(":weight"):
            assert 2 * ours == passed, f"{name}: once a step, not a pass"
        elif way != "recomputed" and not name.endswith("experts.down:grad"):  # there of tokens, apart of their rows
            assert ours == passed, f"{name}: no row too many, none too few; the batch is small enough to be the sample"


@pytest.mark.parametrize("way", ["graph", "compiled graph"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_block"])
def test_a_sampled_step_is_a_graph_from_the_second_one_on(engine: Engines, recipe: str, way: str) -> None:
    """And shows what the first one has shown, which ran the plain way."""
    e = warm(engine, recipe, way)
    tokens = batch(e, 3)
    casts, kurtosis = Casts(Rows(e.arena), e.device), BlockKurtosis(e.model.iter_blocks())
    unseen, seen, found = passes(e, tokens), [], []
    for _ in range(4):
        casts.forget()
        kurtosis.forget()
        with sampling(casts):
            found.append(passes(e, tokens))
        seen.append((casts._parts.sum(1), kurtosis.sums.clone()))
    assert isinstance(e.microbatch, GraphedMicrobatch) and set(e.microbatch._graphs) == {"first", "sampled"}
    found.append(passes(e, tokens))
    assert torch.equal(casts._parts.sum(1), seen[-1][0]), "a pass that is not sampled shows nothing"
    for each in found:
        for part, theirs in zip(each, unseen, strict=True):
            assert float((part - theirs).double().norm()) <= 1e-2 * float(theirs.double().norm())
    for more in seen[1:]:
        for part, theirs in zip(more, seen[0], strict=True):
            torch.testing.assert_close(part, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("way", ["compiled", "graph"])
def test_a_sampled_step_waits_for_nothing(engine: Engines, way: str) -> None:
    e = warm(engine, "fp8_delayed", way)
    casts, tokens = Casts(Rows(e.arena), e.device), batch(e, 3).to(e.device)
    for step in (3, 4, 5):
        torch.cuda.set_sync_debug_mode("error" if step == 5 else "default")
        try:
            with sampling(casts):
                train_step(e, step, tokens, 4)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def state(e: Engine) -> dict[str, Tensor]:
    """What a step begins with, copied; operands as the step makes them."""
    kept = {name: t.clone() for name, t in e.model.state_dict().items()}
    for name, moments in e.optimizer.state_dict().items():
        kept |= {f"{name}/{key}": t.clone() for key, t in moments.items()}
    kept |= {key: getattr(e.arena, key).clone() for key in ("amax", "scale", "history")}
    kept |= {"rng": torch.get_rng_state(), "gpu rng": torch.cuda.get_rng_state()}
    amax = e.arena.amax.clone()
    refresh_weights(e.model, force=True)
    e.arena.amax.copy_(amax)
    for i, layer in enumerate(gemm_layers(e.model)):
        assert layer.operand is not None
        kept |= {f"{i}.{k}": t.float() for k, t in zip("abcd", layer.operand, strict=True) if t is not None}
    return kept


@pytest.mark.parametrize("way", ["eager", "compiled", "graph"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_block"])
def test_a_sampled_step_leaves_the_state_unchanged(
    engine: Engines, config: Callable[..., Config], recipe: str, way: str
) -> None:
    e = warm(engine, recipe, way)
    has_fp8 = recipe != "bf16"
    health = Health(replace(config().health, every=None, shadow_every=int(has_fp8)), e, lambda entry: None, BATCH, 4)
    before = state(e)
    addresses = [t.data_ptr() for layer in gemm_layers(e.model) for t in layer.operand or () if t is not None]
    health.before(3, batch(e, 3))
    assert all(p.grad is None for p in e.model.parameters())
    after = state(e)
    assert addresses == [t.data_ptr() for layer in gemm_layers(e.model) for t in layer.operand or () if t is not None]
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    with health.inside(3, logged=True):
        result = train_step(e, 3, batch(e, 3), 4)
    assert bool(result.verdict.ok)
    line = health.report(3, copy_to_host(health.collect(result.load, result.verdict.ok)))
    assert all(math.isfinite(line[f"act/kurtosis_{place}"]) for place in ("qkv", "ffn", "block"))
    assert 1e-5 < line["optim/update_ratio"] < 0.1
    if has_fp8:
        assert 0.02 < line["fp8/error_mean"] < 0.06 and line["fp8/error_worst"] < 0.3
        assert line["shadow/cosine_mean"] > 0.9 and abs(line["shadow/loss_gap"]) < 0.02


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block"])
def test_kernels_cast_as_the_reference_does(engine: Engines, config: Callable[..., Config], recipe: str) -> None:
    seen: list[dict] = []
    for backend, compiled in (("cuda", "true"), ("reference", "false")):
        torch._dynamo.reset()
        e = engine(*SIZES, f"+recipe={recipe}", f"precision.backend={backend}", f"compile.enabled={compiled}")
        health = Health(replace(config().health, every=1), e, lambda entry: None, BATCH, 4)
        with health.inside(1, logged=True):
            result = train_step(e, 1, batch(e, 1), 4)
        seen.append(copy_to_host(health.collect(result.load, result.verdict.ok)))
    for what, near in (("fp8/error", 2e-3), ("blocks/kurtosis_qkv", 0.1)):
        ours, theirs = (torch.tensor(values[f"tensors/{what}"]) for values in seen)
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=near)
