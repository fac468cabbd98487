"""Looks and shadows on the GPU: what training works on is the same bits before and after, compiled or as a CUDA graph,
and what kernels cast is what is seen."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from precision import gemm_layers, refresh_weights
from trainer.build import Engine
from trainer.config import Config
from trainer.health.health import Health
from trainer.metrics import copy_to_host
from trainer.trainer import train_step

Engines = Callable[..., Engine]
BATCH, LENGTH = 8, 128
SIZES = f"trainer.global_batch_size={BATCH}", "trainer.microbatch_size=4", "optim.warmup_steps=1", "optim.lr=1e-3"


def batch(e: Engine, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(e.model.config.vocab_size, (BATCH, LENGTH + 1), generator=generator)


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


@pytest.mark.parametrize("how", ["compile.enabled=false", "compile.enabled=true", "cuda_graph=true"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_jit", "fp8_block"])
def test_nothing_is_left_behind(engine: Engines, config: Callable[..., Config], recipe: str, how: str) -> None:
    if how != "compile.enabled=true":
        how_else = ["compile.enabled=false"] if how != "compile.enabled=false" else []
        e = engine(*SIZES, f"+recipe={recipe}", how, *how_else)
    elif recipe in ("fp8_delayed", "fp8_block"):
        e = engine(*SIZES, f"+recipe={recipe}", how)
    else:
        pytest.skip("two recipes stand for all")
    for step in (1, 2):
        assert bool(train_step(e, step, batch(e, step), 4).verdict.ok)
    has_fp8 = recipe != "bf16"
    health = Health(replace(config().health, every=1, shadow_every=int(has_fp8)), e, lambda entry: None, BATCH, 4)
    before = state(e)
    addresses = [t.data_ptr() for layer in gemm_layers(e.model) for t in layer.operand or () if t is not None]
    health.before(3, batch(e, 3))
    assert all(p.grad is None for p in e.model.parameters())
    after = state(e)
    assert addresses == [t.data_ptr() for layer in gemm_layers(e.model) for t in layer.operand or () if t is not None]
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    result = train_step(e, 3, batch(e, 3), 4)
    assert bool(result.verdict.ok)
    line = health.tell(3, copy_to_host(health.collect(result.load, result.verdict.ok)))
    assert all(math.isfinite(line[f"act/kurtosis_{place}"]) for place in ("qkv", "ffn", "block"))
    assert 1e-5 < line["optim/update_ratio"] < 0.1
    if has_fp8:
        assert 0.02 < line["fp8/error_mean"] < 0.06 and line["fp8/error_worst"] < 0.3
        assert line["shadow/cosine_mean"] > 0.9 and abs(line["shadow/loss_gap"]) < 0.02


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block"])
def test_kernels_cast_as_the_reference_does(engine: Engines, config: Callable[..., Config], recipe: str) -> None:
    seen: list[dict] = []
    for backend in ("cuda", "reference"):
        e = engine(*SIZES, f"+recipe={recipe}", f"precision.backend={backend}", "compile.enabled=false")
        health = Health(replace(config().health, every=1), e, lambda entry: None, BATCH, 4)
        health.before(1, batch(e, 1))
        load = torch.zeros(0, 4, device=e.device)
        seen.append(copy_to_host(health.collect(load, torch.tensor(True, device=e.device))))
    ours, theirs = (torch.tensor(values["tensors/fp8/error"]) for values in seen)
    torch.testing.assert_close(ours, theirs, rtol=0.1, atol=2e-3)
