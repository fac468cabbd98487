"""Whole runs on the ladder: faults on purpose, rewinds, data that is left out, and the end of it."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_lines import bitwise, events, metrics
from torch import Tensor

from trainer.config import Config
from trainer.offline.replay import config_of, find, replay
from trainer.step.guard import TrainingStopped
from trainer.trainer import Trainer

FP32 = Path(__file__).parents[3] / "configs" / "precision" / "fp32.yaml"
Configs = Callable[..., Config]
FAST = ("data.validation_fraction=0.03", "model.num_mtp_layers=0", "health.every=0", "precision=fp32")
RUN = ("run.name=run", "run.resume=auto", "trainer.max_steps=13", "checkpoint.every=3", "checkpoint.keep=0")
RUN += ("recovery.max_consecutive_skips=2", *FAST)
BAD_DATA = "debug.inject={step: 1, steps: 99, where: gradient, value: nan, windows: [28, 40]}"  # steps 8, 9, 10


def without_the_bad_data(config: Config) -> Path:
    """The run of a loader that leaves the windows out from the start."""
    trainer = Trainer(config)
    trainer.run.loader.leave_out([[28, 40]])
    return trainer.train().folder


def test_a_rewind_ends_with_the_bits_of_a_run_that_never_read_the_data(config: Configs) -> None:
    keys = (*RUN, "precision=fp8_delayed")
    trainer = Trainer(config(*keys, BAD_DATA))
    run = trainer.train().folder
    whole = without_the_bad_data(config(*keys, "run.name=whole"))
    assert [line["step"] for line in metrics(run, "loss/lm")] == list(range(1, 14))
    assert bitwise(run) == bitwise(whole)
    (event,) = events(run, "rollback")
    assert (event["step"], event["first"], event["to"], event["windows"]) == (10, 8, 6, [[28, 40]])
    assert "rewinding to step_00000006" in event["message"] and "(backward)" in event["message"]
    assert [line["step"] for line in events(run, "nonfinite")] == [8, 9, 10], "events stay"
    assert metrics(run)[-2]["recovery/rewinds"] == 1
    assert trainer.run.loader.state_dict()["left_out"] == [[28, 40]]
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [f"step_{step:08d}" for step in (3, 6, 9, 12, 13)], "step 9 is saved on the way back only"


def test_a_streak_that_a_new_phase_finds_takes_the_step_after_it_along(config: Configs) -> None:
    """On a GPU, where steps are reviewed at the next log, save or phase."""
    phase = "trainer.phases=[{until: 9}, {mtp_loss_weight: 0}]"
    keys = (*RUN, phase, "recovery.max_consecutive_skips=1", "checkpoint.every=6", "logging.every=13")
    trainer = Trainer(config(*keys, BAD_DATA))
    step, review = trainer._step, trainer._review

    def as_on_a_gpu(tokens: Tensor) -> None:
        trainer._review = lambda: None  # type: ignore[method-assign]
        step(tokens)
        trainer._review = review  # type: ignore[method-assign]

    trainer._step = as_on_a_gpu  # type: ignore[method-assign]
    run = trainer.train().folder
    assert [line["windows"] for line in events(run, "rollback")] == [[[28, 40]]]
    assert bitwise(run) == bitwise(without_the_bad_data(config(*keys, "run.name=whole")))


def test_a_crash_right_after_a_rewind_forgets_nothing(config: Configs) -> None:
    """Neither what is left out, nor the lower learning rate, nor how often."""
    keys = (*RUN, BAD_DATA, "recovery.rewind.lr_factor=0.5", "recovery.rewind.lr_steps=3", "recovery.rewind.max=1")
    through = Trainer(config(*keys, "run.name=through")).train().folder
    trainer = Trainer(config(*keys))
    original = trainer._step

    def dies(tokens: Tensor) -> None:
        if trainer.run.ladder.rewinds:
            raise MemoryError
        original(tokens)

    trainer._step = dies  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        trainer.train()
    again = Trainer(config(*keys))
    assert again.step == 6
    run = again.train().folder
    assert bitwise(run) == bitwise(through) and len(again.run.ladder.rewinds) == 1
    schedule = again.run.engine.optimizer.schedule
    schedule.lower(1.0, 0)
    rates = [
        line["optim/lr"] / float(schedule.at(torch.tensor(line["step"] - 1)))
        for line in metrics(run)
        if "optim/lr" in line
    ]
    assert rates == pytest.approx([1.0] * 6 + [0.5] * 4 + [1.0] * 3), "to 3 committed steps beyond the 7 before the row"


def test_a_run_that_falls_back_beyond_a_rewind_repeats_what_came_before_it(config: Configs) -> None:
    """Windows in the margin, which it has read, and the learning rate. A margin counts batches of the present phase."""
    keys = (*RUN, BAD_DATA, "recovery.rewind.margin=2", "recovery.rewind.lr_factor=0.5", "recovery.rewind.lr_steps=3")
    keys += ("trainer.phases=[{until: 12}, {global_batch_size: 8}]",)
    through = Trainer(config(*keys, "run.name=through")).train().folder
    assert events(through, "rollback")[0]["windows"] == [[20, 48]]
    run = Trainer(config(*keys)).train().folder
    for step in (6, 9, 12, 13):  # as if damaged: the run falls back to step 3
        (run / "checkpoints" / f"step_{step:08d}" / "state.json").write_text("damaged")
    again = Trainer(config(*keys))
    assert again.step == 3
    assert bitwise(again.train().folder) == bitwise(through)
    seen = replay(find(through, 6, 9), config_of(find(through, 6, 9), [], faults=False), FP32, None)
    assert seen.ours.loss == pytest.approx(seen.target.logged["loss/total"], rel=1e-6)  # type: ignore[index]


def test_the_same_trouble_goes_back_further_and_then_stops(config: Configs) -> None:
    """A fault that comes again whatever the data."""
    keys = (*RUN, "checkpoint.every=2", "debug.inject={step: 8, steps: 9, where: loss, value: inf}")
    with pytest.raises(TrainingStopped) as stop:
        Trainer(config(*keys)).train()
    message = str(stop.value)
    assert stop.value.exit_code == 1 and "\n" not in message
    for part in (
        "3 steps in a row skipped (recovery.max_consecutive_skips=2), from step 8 on, first at loss (forward)",
        "the run has rewound 2 times already (to step 6, 4), and the trouble recurred",
        "recovery.rewind.max=4 for more attempts",
    ):
        assert part in message
    run = Path(config(*keys).run.dir) / "run"
    messages = events(run, "rollback")
    assert [line.get("to") for line in messages] == [6, 4, None] and messages[-1]["message"].endswith("the run stops")
    assert [line.get("attempt") for line in messages] == [1, 2, None]
    assert messages[0]["windows"] != messages[1]["windows"]


def test_another_trouble_begins_at_the_first_rung(config: Configs) -> None:
    """Two places of bad data, with checkpoints between: one rewind is allowed for each."""
    twice = "debug.inject={step: 1, steps: 99, where: loss, value: nan, windows: [12, 60]}"
    keys = (*RUN, "recovery.max_consecutive_skips=1", "recovery.rewind.max=1", "trainer.max_steps=14")
    trainer = Trainer(config(*keys, twice))
    data = trainer.run.engine.injector.data  # type: ignore[union-attr]
    trainer.run.engine.injector.data = lambda windows: data(windows[(windows < 20) | (windows >= 52)])  # type: ignore
    run = trainer.train().folder
    assert [(line["first"], line["to"], line["attempt"]) for line in events(run, "rollback")] == [(4, 3, 1), (12, 9, 1)]
    assert trainer.run.loader.state_dict()["left_out"] == [[12, 20], [52, 60]]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["recovery.rewind.max=0"], "recovery.rewind.max=0. Look at"),
        (["checkpoint.every=0"], "there is no intact checkpoint from before step 8. Look at"),
    ],
)
def test_a_run_that_cannot_rewind_stops_with_the_reason(config: Configs, keys: list[str], says: str) -> None:
    with pytest.raises(TrainingStopped, match=r"recovery\.max_consecutive_skips=2") as stop:
        Trainer(config(*RUN, BAD_DATA, *keys)).train()
    assert says in str(stop.value)


def test_a_stop_within_a_streak_keeps_the_checkpoint_to_rewind_to(config: Configs) -> None:
    """Two skipped steps, then the end; the resumed run meets the third. `keep` would leave the last checkpoint only."""
    keys = (*RUN, BAD_DATA, "checkpoint.keep=1")
    run = Trainer(config(*keys, "trainer.max_steps=9")).train().folder

    def steps() -> list[str]:
        return sorted(path.name for path in (run / "checkpoints").iterdir() if "set_aside" not in path.name)

    assert steps() == ["step_00000006", "step_00000009"], "of step 7, which was committed, there is none"
    Trainer(config(*keys)).train()
    (event,) = events(run, "rollback")
    assert (event["step"], event["first"], event["to"]) == (10, 8, 6)
    assert steps() == ["step_00000013"], "without a row, as many as keep says"


SPIKES = ("recovery.spikes.enabled=true", "recovery.spikes.window=8", "recovery.spikes.min_steps=4", *FAST)
SPIKES += ("recovery.spikes.threshold=12",)  # 3.3 times the usual norm: no healthy step of a small run comes near


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """All that a skipped step must leave alone."""
    e = trainer.run.engine
    watch = e.guard._spikes
    assert watch is not None
    tensors = {f"model.{k}": v for k, v in e.model.state_dict().items()} | watch.state_dict()
    tensors |= {f"optimizer.{n}.{k}": v for n, s in e.optimizer.state_dict().items() for k, v in s.items()}
    return tensors | {"committed": e.guard.committed}


@pytest.mark.parametrize(("where", "module"), [("loss", "loss"), ("gradient", "gradient norm")])
def test_a_spike_is_skipped_and_reported(config: Configs, where: str, module: str) -> None:
    cfg = config(*SPIKES, f"debug.inject={{step: 7, where: {where}, value: 1e4}}", "trainer.max_steps=8")
    trainer, kept = Trainer(cfg), {}
    original = trainer._step

    def snapshot(tokens: Tensor) -> None:
        kept[trainer.step - 1] = copy.deepcopy(everything(trainer))
        original(tokens)

    trainer._step = snapshot  # type: ignore[method-assign]
    summary = trainer.train()
    assert [name for name, tensor in kept[6].items() if not torch.equal(tensor, kept[7][name])] == []
    assert any(not torch.equal(tensor, everything(trainer)[name]) for name, tensor in kept[7].items())
    (event,) = events(summary.folder, "spike")
    assert event["step"] == 7 and event["module"] == module and event["value"] > event["threshold"] > 0
    assert f"{module} {event['value']:.4g} above" in event["message"] and not events(summary.folder, "nonfinite")
    line = metrics(summary.folder)[-2]
    assert (line["recovery/spikes"], line["recovery/skipped_steps"]) == (1, 1) and math.isfinite(line["loss/lm"])


def test_watching_a_healthy_run_changes_no_bit(config: Configs) -> None:
    runs = [Trainer(config("trainer.max_steps=13", *keys)).train().folder for keys in (SPIKES, FAST)]
    assert bitwise(runs[0]) == bitwise(runs[1]) and not events(runs[0], "spike")


def test_a_streak_of_spikes_causes_a_rewind(config: Configs) -> None:
    run = Trainer(config(*RUN, *SPIKES, BAD_DATA.replace("nan", "1e4"))).train().folder
    (event,) = events(run, "rollback")
    assert event["to"] == 6 and "gradient norm (spike)" in event["message"]
    assert [line["step"] for line in events(run, "spike")][:3] == [8, 9, 10]


def test_a_phase_that_raises_the_loss_is_no_streak_of_spikes(config: Configs) -> None:
    """Nor where a run resumes right before it."""
    keys = (*SPIKES, "run.name=run", "run.resume=auto", "model.num_mtp_layers=1", "model.mtp_loss_weight=0.1")
    keys += ("optim.lr=1e-6",)  # the loss stays: its spread is least
    for steps in (5, 8):
        phases = "trainer.phases=[{until: 5}, {mtp_loss_weight: 1}]"
        run = Trainer(config(*keys, phases, f"trainer.max_steps={steps}")).train().folder
    assert not events(run, "spike") and metrics(run)[-2]["recovery/skipped_steps"] == 0
    loss = [line["loss/total"] for line in metrics(run, "loss/total")]
    assert loss[5] > 1.4 * loss[4], "what would be one"
