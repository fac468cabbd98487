"""The learning rate's shape, clipping, and that a step happens as a whole or not at all."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from trainer.config import Moments, OptimConfig, Schedule
from trainer.config.phases import Shape
from trainer.optim import update_norms
from trainer.optim.adamw import LearningRate, Optimizer

CONFIG = OptimConfig(
    lr=0.1, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, clip=1.0, moments=Moments.fp32, schedule=Schedule.wsd,
    warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.1,
)  # fmt: skip


def rate(config: OptimConfig, committed: int, max_steps: int = 100) -> float:
    return LearningRate(config, max_steps).at(torch.tensor(committed)).item()


def test_wsd_rises_stays_and_falls_in_a_straight_line() -> None:
    assert [rate(CONFIG, c) for c in (0, 4, 9)] == pytest.approx([0.01, 0.05, 0.1])
    assert [rate(CONFIG, c) for c in (10, 50, 79)] == pytest.approx([0.1] * 3)
    assert rate(CONFIG, 89) == pytest.approx(0.1 * (1 - 0.5 * 0.9))
    assert [rate(CONFIG, c) for c in (99, 150)] == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize("schedule", [Schedule.wsd, Schedule.cosine])
def test_the_decay_ends_with_the_run_whatever_steps_were_skipped(schedule: Schedule) -> None:
    """`max_steps` counts skipped steps. The warm-up goes by steps that changed the weights."""
    at = LearningRate(replace(CONFIG, schedule=schedule), 100).at
    assert at(torch.tensor(79), 99).item() == pytest.approx(0.01)
    assert at(torch.tensor(4), 9).item() == pytest.approx(0.05)
    assert at(torch.tensor(50), 50) == at(torch.tensor(50))


def test_cosine_starts_after_the_warm_up() -> None:
    config = replace(CONFIG, schedule=Schedule.cosine, decay_fraction=1.0)
    for committed in (9, 30, 60, 99):
        fallen = 0.5 * (1 - math.cos(math.pi * max(committed - 9, 0) / 90))
        assert rate(config, committed) == pytest.approx(0.1 * (1 - 0.9 * fallen), rel=1e-4)


def test_a_phase_without_learning_rate_moves_no_weight() -> None:
    """0.1 + (1e-4 - 0.1) - 1e-4 is not 0."""
    moves = [(2, 6, 1e-4, Shape.cosine), (6, 9, 0.0, Shape.constant)]
    at = LearningRate(replace(CONFIG, schedule=Schedule.phases, warmup_steps=0), 9, moves=moves).at
    before, after, *still = (at(torch.tensor(step)).item() for step in (0, 5, 6, 8))
    assert (before, after, still) == (pytest.approx(0.1), pytest.approx(1e-4), [0, 0])


def test_no_warm_up_and_no_decay_is_constant() -> None:
    config = replace(CONFIG, warmup_steps=0, decay_fraction=0.0)
    assert [rate(config, c) for c in (0, 50, 98)] == pytest.approx([0.1] * 3)


def model_and_optimizer(config: OptimConfig = CONFIG) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    return model, Optimizer(model, {"0.bias"}, config, LearningRate(config, 100), torch.device("cpu"))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().sum().backward()


def test_a_step_equals_plain_adamw() -> None:
    config = replace(CONFIG, warmup_steps=0, clip=None)
    model, optimizer = model_and_optimizer(config)
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(
        [
            {"params": [twin[0].weight, twin[1].weight], "weight_decay": 0.1},  # type: ignore[index]
            {"params": [twin[0].bias], "weight_decay": 0.0},  # type: ignore[index]
        ],
        lr=0.1, betas=(0.9, 0.95),
    )  # fmt: skip
    for committed in range(3):
        for m in (model, twin):
            backward(m)
        optimizer.step(torch.tensor(True), torch.tensor(committed))
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_skipped_step_changes_no_bit() -> None:
    model, optimizer = model_and_optimizer()
    backward(model)
    optimizer.step(torch.tensor(True), torch.tensor(0))
    before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step(torch.tensor(False), torch.tensor(1), optimizer.grad_norms().norm())
    after = dict(model.state_dict()), optimizer.state_dict()
    assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
    assert all(torch.equal(after[1][n][k], t) for n, state in before[1].items() for k, t in state.items())


@pytest.mark.parametrize("clip", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("times", [1e-3, 1.0, 1e3])
def test_clipping_takes_the_global_norm(times: float, clip: float) -> None:
    """Against clip_grad_norm_ and an unclipped step: norms far below, near and far above the clip."""
    config = replace(CONFIG, eps=1.0, clip=clip)  # eps is large: AdamW would else divide the gradients' size out again
    model, optimizer = model_and_optimizer(config)
    twin, plain = model_and_optimizer(replace(config, clip=None))
    for committed in range(3):
        for m in (model, twin):
            (times * m(torch.ones(2, 4)).square().sum()).backward()
        norm = optimizer.grad_norms().norm()
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        torch.testing.assert_close(norm, expected)
        optimizer.step(torch.tensor(True), torch.tensor(committed), norm)
        plain.step(torch.tensor(True), torch.tensor(committed))
        optimizer.zero_grad()
        plain.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    for name, state in optimizer.state_dict().items():
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, plain.state_dict()[name][key])


def test_a_small_norm_changes_no_bit() -> None:
    model, optimizer = model_and_optimizer()
    twin, plain = model_and_optimizer(replace(CONFIG, clip=None))
    for m, o in ((model, optimizer), (twin, plain)):
        backward(m)
        o.step(torch.tensor(True), torch.tensor(0), torch.tensor(0.5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def restore(optimizer: Optimizer, state: dict[str, dict[str, Tensor]]) -> None:
    """Moments and step counts, as a checkpoint is read: in place."""
    for name, tensors in optimizer.state_dict().items():
        for key, tensor in tensors.items():
            tensor.copy_(state[name][key])


def test_with_the_kernel_it_is_the_same_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: clipped steps, a skipped one, a parameter without a gradient, state that goes round."""
    pytest.importorskip("triton")
    config = replace(CONFIG, eps=1e-3)
    twin, plain = model_and_optimizer(config)
    monkeypatch.setattr("trainer.optim.adamw._has_kernel", lambda device: True)
    model, optimizer = model_and_optimizer(config)
    assert optimizer._kernel is not None and plain._kernel is None
    for step in range(6):
        for m, o in ((model, optimizer), (twin, plain)):
            (10.0**step * m(torch.ones(2, 4)).square().sum()).backward()
            if step == 2:
                m[0].bias.grad = None  # type: ignore[index]
            o.step(torch.tensor(step != 3), torch.tensor(step), o.grad_norms().norm())
            o.zero_grad()
        if step == 4:
            state = copy.deepcopy(optimizer.state_dict())
            restore(optimizer, plain.state_dict())
            restore(plain, state)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    for name, expected in plain.state_dict().items():
        state = optimizer.state_dict()[name]
        assert state.keys() == expected.keys() and state["step"] == expected["step"]
        for key, tensor in expected.items():
            torch.testing.assert_close(state[key], tensor)


def test_a_step_marks_parameters_as_changed() -> None:
    model, optimizer = model_and_optimizer()
    before = [p._version for p in model.parameters()]
    backward(model)
    optimizer.step(torch.tensor(True), torch.tensor(0), optimizer.grad_norms().norm())
    assert all(p._version > version for p, version in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("at_once", [1 << 20, 5])
def test_the_norm_of_an_update_is_that_of_what_changed(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(update_norms, "_AT_ONCE", at_once)
    model, optimizer = model_and_optimizer(replace(CONFIG, warmup_steps=0))
    assert float(optimizer.norms(torch.tensor(True))[1]) == 0, "nothing has happened yet"
    for committed in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        backward(model)
        optimizer.step(torch.tensor(True), torch.tensor(committed), optimizer.grad_norms().norm())
        changed = torch.stack([(p.detach() - b).norm() for p, b in zip(model.parameters(), before, strict=True)]).norm()
        assert float(optimizer.norms(torch.tensor(True))[1]) == pytest.approx(float(changed), rel=1e-5)
        optimizer.zero_grad()
    assert float(optimizer.norms(torch.tensor(False))[1]) == 0, "a skipped step changed nothing"


def test_moments_in_bf16_move_weights_as_fp32_ones_do() -> None:
    """1,000 steps: as far as BF16's rounding of both moments lets them; a skipped step changes no bit."""
    optimizers = []
    for moments in (Moments.fp32, Moments.bf16):
        weight = nn.Parameter(torch.zeros(64, 32))
        model = nn.ParameterDict({"weight": weight})
        config = replace(CONFIG, moments=moments, clip=None, weight_decay=0.0, lr=1e-3)
        optimizers.append((weight, Optimizer(model, set(), config, LearningRate(config, 1000), torch.device("cpu"))))
    generator = torch.Generator().manual_seed(0)
    for step in range(1000):
        gradient = torch.randn(64, 32, generator=generator)
        for weight, optimizer in optimizers:
            weight.grad = gradient.clone()
            before = [weight.detach().clone(), *(t.clone() for t in optimizer.state_dict()["weight"].values())]
            optimizer.step(torch.tensor(step != 500), torch.tensor(step))
            if step == 500:
                after = [weight.detach(), *optimizer.state_dict()["weight"].values()]
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    (wide, _), (narrow, optimizer) = optimizers
    assert optimizer.state_dict()["weight"]["exp_avg"].dtype is torch.bfloat16
    assert float((wide - narrow).detach().norm() / wide.detach().norm()) < 0.01
    norms = [float(each.norms(torch.tensor(True))[1]) for _, each in optimizers]
    assert norms[1] == pytest.approx(norms[0], rel=0.01)
