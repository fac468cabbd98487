"""Loss scaling: GradScaler's decisions, gradients without the scale, and overflows are distinguished from NaNs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_lines import events, metrics
from torch import Tensor

from models import DeepSeek
from precision.config import LossScaleConfig
from precision.errors import UserError
from trainer.config import Config
from trainer.forecast.preflight import check
from trainer.optim.loss_scale import LossScale
from trainer.recovery.nonfinite_probe import probe_microbatch
from trainer.step.engine import Engine, build_engine
from trainer.step.guard import TrainingStopped
from trainer.step.train_step import StepResult, train_step
from trainer.trainer import Trainer

Configs = Callable[..., Config]
CPU = torch.device("cpu")
FP16 = "precision=fp16"
RUN = (FP16, "health.every=0", "model.num_mtp_layers=0", "data.validation_fraction=0.03", "run.name=run")
TOO_HIGH = "precision.loss_scale.initial=1073741824", "precision.loss_scale.interval=3"  # 2^30


def windows(seed: int = 0) -> Tensor:
    return torch.randint(320, (4, 25), generator=torch.Generator().manual_seed(seed))


def trained(engine: Engine, steps: int) -> list[StepResult]:
    return [train_step(engine, step, windows(step), 2) for step in range(1, steps + 1)]


def scales(run: Path) -> dict[int, float | None]:
    return {line["step"]: line.get("optim/loss_scale") for line in metrics(run, "loss/lm")}


def test_its_decisions_are_those_of_gradscaler() -> None:
    """On 300 verdicts drawn at random, resumed before each; the real one is shown a gradient that is finite or not."""
    verdicts = (torch.rand(300, generator=torch.Generator().manual_seed(1)) > 0.2).tolist()
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    config = LossScaleConfig(interval=3, minimum=2.0**-126)
    ours = LossScale(config, CPU)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    seen = set()
    for finite in verdicts:
        saved, ours = ours.state_dict(), LossScale(config, CPU)
        ours.load_state_dict(saved)
        theirs.scale(weight.sum()).backward()
        assert float(ours.scale) == theirs.get_scale()
        seen.add(float(ours.scale))
        assert weight.grad is not None
        weight.grad.fill_(1.0 if finite else torch.inf)
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(finite))
        optimizer.zero_grad()
    assert len(seen) > 5 and 0.1 < verdicts.count(False) / len(verdicts) < 0.3


def test_the_loss_scale_starts_grows_and_stops_falling_at_its_limits() -> None:
    scale = LossScale(LossScaleConfig(), CPU)
    assert float(scale.scale) == 2**16
    for _ in range(2000):
        scale.update(torch.tensor(True))
    assert float(scale.scale) == 2**17 and bool(scale.can_decrease)
    for _ in range(40):
        scale.update(torch.tensor(False))
    assert float(scale.scale) == 1 and not bool(scale.can_decrease)


def norms(engine: Engine, scale: float) -> tuple[float, Tensor]:
    """Loss and gradients of a step that starts from this scale."""
    assert engine.loss_scale is not None
    engine.loss_scale.scale.fill_(scale)
    kept: list[Tensor] = []
    engine.optimizer.zero_grad, zero_grad = lambda: None, engine.optimizer.zero_grad  # type: ignore[method-assign]
    result = train_step(engine, 1, windows(), 2)
    kept = [p.grad.flatten() for p in engine.model.parameters() if p.grad is not None]
    engine.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    zero_grad()
    assert bool(result.verdict.ok)
    return float(result.metrics["loss/total"]), torch.cat(kept)


def test_gradients_are_those_of_the_loss_and_do_not_vanish(config: Configs) -> None:
    """The scale itself leaves no trace; without one FP16 loses what is smaller than 6e-8."""
    keys = "optim.lr=1e-30", "optim.weight_decay=0", "optim.clip=null"  # masters stay, and so do gradients
    keys += ("model.num_experts_per_token=4",)  # all: no router is near a tie
    engine = build_engine(config(FP16, *keys), CPU)
    exact = build_engine(config("precision=fp32", *keys), CPU)
    exact.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
    loss = float(train_step(exact, 1, windows(), 2).metrics["loss/total"])
    gradient = torch.cat([p.grad.flatten() for p in exact.model.parameters() if p.grad is not None])
    found = {power: norms(engine, 2.0**power) for power in (-16, 10, 16)}
    error = {power: float((ours - gradient).norm() / gradient.norm()) for power, (_, ours) in found.items()}
    assert all(abs(ours - loss) < 2.0**-8 * loss for ours, _ in found.values()), "FP16 has 11 bits"
    assert error[16] < 2.0**-5 < error[-16], "a few of FP16's roundings of 2^-11; without a scale most of it is lost"
    assert (found[16][1] == 0).sum() < (found[-16][1] == 0).sum()


def test_an_overflow_skips_the_step_and_halves_the_scale_and_nothing_else(config: Configs) -> None:
    engine = build_engine(config(FP16, *TOO_HIGH), CPU)
    before = [p.detach().clone() for p in engine.model.parameters()]
    results = trained(engine, 1)
    assert not bool(results[0].verdict.ok) and bool(results[0].verdict.overflow)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    results += trained(engine, 16)
    verdicts = [bool(result.verdict.ok) for result in results]
    used = [float(result.metrics["optim/loss_scale"]) for result in results]
    first = verdicts.index(True)
    assert first > 1 and used[: first + 1] == [2.0 ** (30 - i) for i in range(first + 1)]
    assert int(engine.guard.overflowed) == int(engine.guard.skipped) == verdicts.count(False)
    assert max(used[first:]) == 2 * used[first], "it grows after three good steps"


def test_the_ladder_hears_of_an_overflow_only_at_the_smallest_scale(config: Configs) -> None:
    """A gradient that is never finite: two steps for the scale, from 4 to 1, then three in a row, and the end."""
    keys = (*RUN, "precision.loss_scale.initial=4", "recovery.max_consecutive_skips=2", "recovery.rewind.max=0")
    bad = "debug.inject={step: 2, steps: 9, where: gradient, value: nan}"
    with pytest.raises(TrainingStopped, match=r"3 steps in a row skipped .* from step 4 on"):
        Trainer(config(*keys, bad, "trainer.max_steps=12")).train()
    run = Path(config(*keys).run.dir) / "run"
    overflows = events(run, "loss_scale")
    assert [(event["step"], event["loss_scale"]) for event in overflows] == [(2, 4), (3, 2)]
    assert "at a loss scale of 4, first at" in overflows[0]["message"] and "becomes 2" in overflows[0]["message"]
    assert [event["step"] for event in events(run, "nonfinite")] == [4, 5, 6]
    (last,) = [line for line in metrics(run) if line["step"] == 5]
    assert (last["recovery/skipped_steps"], last["recovery/loss_scale_skips"]) == (4, 2)


@pytest.mark.parametrize("where", ["activation", "loss"])
def test_a_nan_of_the_forward_pass_is_no_overflow(config: Configs, where: str) -> None:
    engine = build_engine(config(FP16, f"debug.inject={{step: 2, where: {where}, value: nan}}"), CPU)
    verdict = trained(engine, 2)[1].verdict
    assert not bool(verdict.ok) and not bool(verdict.overflow) and int(engine.guard.overflowed) == 0
    assert engine.loss_scale is not None and float(engine.loss_scale.scale) == 2**15, "as GradScaler: a bad step"


def test_a_spike_skips_the_step_and_leaves_the_scale(config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(config(FP16), CPU)
    judge, yes = engine.guard.judge, torch.tensor(True)
    monkeypatch.setattr(engine.guard, "judge", lambda *args: replace(judge(*args), ok=~yes, spike=yes))
    trained(engine, 1)
    assert engine.loss_scale is not None and float(engine.loss_scale.scale) == 2**16, "nothing overflowed"


def test_a_run_that_is_resumed_has_the_scales_of_one_that_was_not(config: Configs) -> None:
    """And one that comes from another recipe, which has saved none, the first scale."""
    few = "recovery.max_consecutive_skips=2", "run.resume=auto"
    keys = (*RUN, *TOO_HIGH, *few)
    whole = Trainer(config(*keys, "trainer.max_steps=15", "run.name=whole")).train()
    kinds = [event["kind"] for event in events(whole.folder)]
    assert kinds.count("loss_scale") == whole.skipped_steps > 3 and not {"nonfinite", "rollback"} & set(kinds)
    Trainer(config(*keys, "trainer.max_steps=13")).train()
    run = Trainer(config(*keys, "trainer.max_steps=15")).train().folder
    assert scales(run) == scales(whole.folder) and len(set(scales(run).values())) > 5
    Trainer(config(*RUN, *few, "precision=bf16", "trainer.max_steps=16")).train()
    Trainer(config(*keys, "trainer.max_steps=17")).train()
    assert scales(run)[16] is None and scales(run)[17] == 2.0**30


def test_a_probe_shows_gradients_without_the_scale(config: Configs) -> None:
    rows = {}
    for name in ("fp16", "fp32"):
        engine = build_engine(config(f"precision={name}", "model.num_mtp_layers=0"), CPU)
        rows[name] = probe_microbatch(engine, 1, 0, windows(), 4).rows
    for row in ("layers.0.attn.o:grad", "lm_head:weight gradient", "embed:weight gradient"):
        assert rows["fp16"][row].amax == pytest.approx(rows["fp32"][row].amax, rel=0.1)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            ["precision.table.ffn=bf16"],
            r"precision.table.ffn=bf16: others are in FP16, with which layers.0.ffn.gate_up can",
        ),
        (
            ["precision.table.residual=bf16"],
            r"precision.table.residual=bf16: others are in FP16, with which residual can",
        ),
        (["precision.backend=transformer_engine"], r"precision.backend=transformer_engine: "),
        (["precision.loss_scale.initial=3"], r"precision.loss_scale.initial=3: .* power of two"),
        (["precision.loss_scale.minimum=131072"], r"minimum=131072: above precision.loss_scale.initial; set at most"),
        (["precision.loss_scale.interval=0"], r"precision.loss_scale.interval=0: out of range"),
    ],
)
def test_impossible_loss_scale_settings_are_refused(config: Configs, keys: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        check(config(FP16, *keys))
    assert "\n" not in str(refused.value)


def test_tables_for_fp16_may_keep_some_ops_in_fp32(config: Configs) -> None:
    plan = check(
        config(FP16, 'precision.rules.exceptions=[{match: "mtp.*", precision: fp32}]', "precision.table.embed=fp32")
    )
    assert plan.is_fp16 and plan.gemms["mtp.0.proj"].recipe.input.name == "fp32"
    assert not check(config("precision=fp32")).is_fp16


def test_without_fp16_nothing_is_scaled(config: Configs) -> None:
    engine = build_engine(config("precision=bf16"), CPU)
    result = train_step(engine, 1, windows(), 2)
    model: DeepSeek = engine.model
    assert engine.loss_scale is None and model.loss_scale is None and "optim/loss_scale" not in result.metrics
