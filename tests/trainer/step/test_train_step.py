"""One step: what it reports and changes is that of its whole batch, however that is cut into microbatches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config import Config
from trainer.step.engine import Engine, build_engine, build_model, is_compiled
from trainer.step.evaluation import mean_loss
from trainer.step.train_step import train_step

Configs = Callable[..., Config]
KEYS = "precision=fp32", "optim.clip=null"  # a clipped step scales the gradients in place


@pytest.fixture
def make(config: Configs) -> Callable[[int], Engine]:
    """make(microbatch_size): an engine whose gradients stay after a step."""

    def engine(size: int) -> Engine:
        made = build_engine(config(*KEYS, f"trainer.microbatch_size={size}"), torch.device("cpu"))
        made.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
        return made

    return engine


def windows(count: int) -> Tensor:
    return torch.randint(320, (count, 25), generator=torch.Generator().manual_seed(0))


def gradients(engine: Engine) -> list[Tensor]:
    return [p.grad for p in engine.model.parameters() if p.grad is not None]


def test_microbatches_make_one_step(make: Callable[[int], Engine]) -> None:
    """Up to the order of FP32 sums."""
    whole, *split = (make(size) for size in (4, 2, 1))
    expected = train_step(whole, 1, windows(4), 4)
    for engine, size in zip(split, (2, 1), strict=True):
        result = train_step(engine, 1, windows(4), size)
        for ours, theirs in zip(gradients(engine), gradients(whole), strict=True):
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
        assert torch.equal(result.load, expected.load) and result.load.sum(1).tolist() == [4 * 24 * 2] * 2
        for key, value in expected.metrics.items():
            torch.testing.assert_close(result.metrics[key], value, rtol=1e-4, atol=0)


def test_the_norm_is_that_of_all_gradients_together(make: Callable[[int], Engine]) -> None:
    engine = make(2)
    result = train_step(engine, 1, windows(4), 2)
    expected = torch.cat([gradient.flatten() for gradient in gradients(engine)]).double().norm()
    torch.testing.assert_close(result.metrics["optim/grad_norm"].double(), expected, rtol=1e-5, atol=0)


def test_the_norm_of_large_gradients_is_finite(make: Callable[[int], Engine]) -> None:
    """Else their step would count, and clipping divide them by infinity."""
    engine = make(4)
    norms = torch.full((len(engine.optimizer.names),), 1e19)
    engine.optimizer.grad_norms = lambda: norms  # type: ignore[method-assign]
    result = train_step(engine, 1, windows(4), 4)
    assert result.verdict.ok and float(result.metrics["optim/grad_norm"]) == pytest.approx(1e19 * len(norms) ** 0.5)


def test_steps_enter_their_amaxes_into_the_histories(config: Configs) -> None:
    engine = build_engine(config("precision=fp8_delayed", "precision.backend=reference"), torch.device("cpu"))
    amaxes = []
    for step in (1, 2):
        train_step(engine, step, windows(4), 2)
        amaxes.insert(0, engine.arena.amax.clone())
    assert torch.equal(engine.arena.history[:, :2], torch.stack(amaxes, 1)) and not engine.arena.history[:, 2:].any()


def test_a_step_moves_router_biases_against_its_load(make: Callable[[int], Engine]) -> None:
    engine = make(2)
    load = train_step(engine, 1, windows(4), 2).load.double()
    expected = engine.model.router_bias_update_rate * torch.sign(load.mean(1, keepdim=True) - load).float()
    assert torch.equal(torch.stack(engine.model.router_bias), expected) and expected.any()


@pytest.mark.parametrize("optimizer", ["adamw_wsd", "muon_wsd"])
def test_decay_spares_norms_embedding_and_routers(config: Configs, optimizer: str) -> None:
    """With such an eps, AdamW moves weights by decay alone."""
    keys = f"optim={optimizer}", "precision=fp32", "optim.eps=1e30", "optim.warmup_steps=0"
    model = (engine := build_engine(config(*keys), torch.device("cpu"))).model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train_step(engine, 1, windows(4), 2)
    assert {name for name, p in model.named_parameters() if torch.equal(p, before[name])} == model.no_decay()


@pytest.mark.parametrize("optimizer", ["adamw_wsd", "muon_wsd"])
def test_a_step_takes_gradients_scaled_to_the_clip(config: Configs, optimizer: str) -> None:
    """Seen in the moments: after one step they are the gradients, AdamW's first ones times 1 - beta1."""
    keys = f"optim={optimizer}", "precision=fp32", f"optim.clip={(clip := 2.0**-6)}"
    engine = build_engine(config(*keys), torch.device("cpu"))
    assert train_step(engine, 1, windows(4), 2).metrics["optim/grad_norm"] > 10 * clip
    states = engine.optimizer.state_dict().values()
    share = {"exp_avg": 1 - config(*keys).optim.betas[0], "momentum": 1.0}
    norms = [state[key].double().norm() / share[key] for state in states for key in share if key in state]
    assert float(torch.stack(norms).norm()) == pytest.approx(clip, rel=1e-5)


def test_a_skipped_step_does_not_advance_the_learning_rate(config: Configs) -> None:
    bad = "debug.inject={step: 2, where: loss, value: nan}"
    engine = build_engine(config("precision=fp32", "optim.warmup_steps=10", bad), torch.device("cpu"))
    rates = [float(train_step(engine, step, windows(4), 2).metrics["optim/lr"]) for step in (1, 2, 3, 4)]
    assert rates == pytest.approx([rates[0] * times for times in (1, 2, 2, 3)])
    assert (int(engine.guard.committed), int(engine.guard.skipped)) == (3, 1)


def test_a_validation_loss_is_the_mean_over_all_windows_also_of_a_last_batch_that_is_smaller(
    make: Callable[[int], Engine],
) -> None:
    engine, tokens, told = make(4), windows(8), list[Any]()
    with torch.no_grad():
        model = engine.model.eval()
        alone = [model.loss(model.hidden(one[None, :-1]), one[None, 1:]) for one in tokens]
        model.train()
    found = mean_loss(model, tokens.split(3), 3, engine.world, told.append)
    assert found == pytest.approx(float(torch.stack(alone).double().mean()), rel=1e-5)
    assert max(alone) - min(alone) > 1e-3, "windows differ"
    assert told == [3, 6, 8] and model.training


@pytest.mark.parametrize(("precision", "old", "newer"), [("bf16", True, True), ("fp8_delayed", False, True)])
def test_blocks_are_compiled_on_gpus_that_can_cast_what_they_cast(
    config: Configs, monkeypatch: pytest.MonkeyPatch, precision: str, old: bool, newer: bool
) -> None:
    """torch.compile cannot store E4M3 before sm_89."""
    keys = f"precision={precision}", "precision.backend=reference"
    made, gpu = config(*keys, "compile.enabled=auto"), torch.device("cuda")
    plan, _ = build_model(made, torch.device("cpu"))
    for capability, expected in (((8, 0), old), ((8, 9), newer)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, known=capability: known)
        assert is_compiled(made, plan, gpu) is expected
    assert is_compiled(config(*keys, "compile.enabled=true"), plan, gpu)
