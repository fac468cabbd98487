"""Faults also come up in compiled blocks, in their step and their place alone."""

import math
from collections.abc import Callable

import pytest
import torch

from precision import begin_step, bind
from trainer.config import Config, InjectConfig, InjectPlace
from trainer.config.schema import Recompute
from trainer.parallel.blocks import parallelize
from trainer.step.engine import build_model
from trainer.step.injection import Injector

Configs = Callable[..., Config]
ONE_KIND = "model.num_layers=3", "model.num_dense_layers=0", "model.num_mtp_layers=0"  # of block to compile
FEW_EXPERTS = "model.num_experts=2", "model.num_experts_per_token=1"  # a graph has each expert's product


@pytest.mark.parametrize("recompute", [Recompute.full, pytest.param(Recompute.none, marks=pytest.mark.exhaustive)])
def test_compiled_blocks_have_them(config: Configs, recompute: Recompute) -> None:
    torch.compiler.reset()
    device = torch.device("cpu")
    plan, model = build_model(config("precision=bf16", *ONE_KIND, *FEW_EXPERTS), device)
    faults = enumerate((InjectPlace.activation, InjectPlace.gradient), start=2)
    injectors = [Injector(InjectConfig(step=step, where=where, value=float("inf")), model) for step, where in faults]
    arena = bind(model, plan, device)
    parallelize(model, recompute, True, backend="aot_eager")
    tokens = torch.randint(6, 320, (2, 25), generator=torch.Generator().manual_seed(0))
    bad = []
    for step in (1, 2, 3, 4):
        begin_step(model, arena)
        arena.amax.zero_()
        for injector in injectors:
            injector.before(step, 0)
        model(tokens).total.backward()
        bad.append([name for name, ok in zip(arena.names, arena.amax.isfinite().tolist(), strict=True) if not ok])
        model.zero_grad()
    before, activation, gradient, after = bad
    assert before == after == []
    assert next(name for name in activation if not name.endswith(":grad")) == "layers.1.attn"
    assert all(name.endswith(":grad") for name in gradient) and "layers.1.attn:grad" in gradient
    assert not any(name.startswith("layers.2") for name in gradient)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_spoilt_weight_is_not_the_master(config: Configs, precision: str) -> None:
    """FP32 computes with the master itself. The next step makes the weight from it again."""
    device = torch.device("cpu")
    plan, model = build_model(config(f"precision={precision}"), device)
    injector = Injector(InjectConfig(step=1, where=InjectPlace.weight, value=float("nan")), model)
    arena = bind(model, plan, device)
    tokens = torch.randint(6, 320, (2, 25), generator=torch.Generator().manual_seed(0))
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for step in (1, 2):
        begin_step(model, arena)
        injector.before(step, 0)
        losses.append(float(model(tokens).total.detach()))
    assert [math.isfinite(loss) for loss in losses] == [False, True]
    assert all(torch.equal(p, masters[name]) for name, p in model.named_parameters())
