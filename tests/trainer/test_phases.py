"""Runs whose batch, sequence length, rates and weights change: what holds in each step, and resuming across it.

Two ranks run this file as a program, over gloo.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composed import config_of
from ranks import joined
from run_lines import bitwise, metrics
from small import SMALL, write_corpus
from torch import Tensor

from precision.errors import UserError
from trainer.config import Config
from trainer.config.timeline import Timeline
from trainer.trainer import Trainer

Configs = Callable[..., Config]
PHASES = (  # steps 1 to 4 of 2 sequences, 5 and 6 of 4, 7 and 8 of 6; from 9 on 4 twice as long
    "{until: 0.336K, global_batch_size: 6, batch_ramp: true}, {until: 8, mtp_loss_weight: 0.1},"
    "{until: 10, sequence_length: 48, global_batch_size: 4, router_bias_update_rate: 0, lr: 1e-3, lr_shape: linear},"
    "{lr: 5e-4}"
)
RUN = ["trainer.max_steps=12", "trainer.global_batch_size=2", "trainer.microbatch_size=1", "optim.schedule=phases"]
RUN += ["optim.lr=2e-3", f"trainer.phases=[{PHASES}]", "health.every=0", "checkpoint.keep=0", "eval.every=5"]
SIZES = [2] * 4 + [4] * 2 + [6] * 2 + [4] * 4
LENGTHS = [24] * 8 + [48] * 4


def seen(trainer: Trainer) -> list[tuple[int, ...]]:
    """Runs it. Shape of each step's tokens."""
    shapes, step = [], trainer._step

    def noted(tokens: Tensor) -> None:
        shapes.append(tuple(tokens.shape))
        step(tokens)

    trainer._step = noted  # type: ignore[method-assign]
    trainer.train()
    return shapes


def died(config: Config, step: int) -> None:
    """A run that ends without a word in a step."""
    trainer = Trainer(config)
    original = trainer._step

    def dies(tokens: Tensor) -> None:
        if trainer.step == step:
            raise MemoryError
        original(tokens)

    trainer._step = dies  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        trainer.train()


def test_a_run_that_dies_at_each_boundary_gives_the_bits_of_one_that_did_not(config: Configs) -> None:
    """With a step that is skipped, the first of a larger batch: nothing moves."""
    keys = (*RUN, "precision=fp8_delayed", "trainer.microbatch_size=2", "run.resume=auto")
    keys += ("debug.inject={step: 5, where: gradient, value: nan}",)
    whole = Trainer(config(*keys, "run.name=whole"))
    assert seen(whole) == [(size, length + 1) for size, length in zip(SIZES, LENGTHS, strict=True)]
    for step in (5, 7, 9, 10):
        died(config(*keys, "run.name=died", "checkpoint.every=2" if step < 10 else "checkpoint.every=9"), step)
    again = Trainer(config(*keys, "run.name=died"))
    again.train()
    folder = whole.run.folder.path
    assert bitwise(again.run.folder.path) == bitwise(folder)
    logged = {line["step"]: line for line in metrics(folder, "loss/lm")}
    assert logged[5]["optim/grad_norm"] is None or not math.isfinite(float(logged[5]["optim/grad_norm"]))
    assert [logged[step]["tokens"] for step in (4, 6, 8, 12)] == [192, 384, 672, 1440]
    weights = {step: (line["loss/total"] - line["loss/lm"] - line["loss/balance"]) / line["loss/mtp"]
               for step, line in logged.items() if step != 5}  # fmt: skip
    assert [round(weights[step], 3) for step in (1, 6, 7, 12)] == [0.3, 0.3, 0.1, 0.1]
    lr = {step: line["optim/lr"] for step, line in logged.items()}
    assert [lr[step] for step in (2, 8, 9, 10, 11, 12)] == pytest.approx([2e-3, 2e-3, 1.5e-3, 1e-3, 5e-4, 5e-4])
    bias = [line["moe/bias_max"] for step, line in logged.items() if step > 8]
    assert len(set(bias)) == 1 and bias[0] > 0, "the router's biases rest"


def test_fewer_tokens_in_a_step_clip_no_gradient(config: Configs) -> None:
    """Each weighs more in the mean, and scales of past steps do not know. Also where a run resumes right before it."""
    keys = ("precision=fp8_delayed", "health.every=0", "run.name=run", "run.resume=auto", "trainer.microbatch_size=1")
    phases = "trainer.phases=[{until: 2, global_batch_size: 8}, {global_batch_size: 2}]"
    before = Trainer(config(*keys, phases, "trainer.max_steps=2"))
    before.train()
    old, scales = before.run.engine.arena.scale.clone(), []
    trainer = Trainer(config(*keys, phases, "trainer.max_steps=4"))
    step, arena = trainer._step, trainer.run.engine.arena

    def noted(tokens: Tensor) -> None:
        scales.append(arena.scale.clone())
        step(tokens)

    trainer._step = noted  # type: ignore[method-assign]
    trainer.train()
    grad = torch.tensor([name.endswith(":grad") for name in arena.names])
    torch.testing.assert_close(scales[0], torch.where(grad, old / 4, old))


def test_other_phases_ahead_are_taken_and_those_behind_refused(config: Configs) -> None:
    keys = (*RUN, "precision=fp32", "run.name=run", "run.resume=auto")
    died(config(*keys, "checkpoint.every=3"), 8)  # saved at step 6
    with pytest.raises(UserError, match=r"trainer\.phases: .* was trained from step 1 on 2 sequences of 24; from"):
        Trainer(config(*keys, "trainer.phases=[{until: 6}, {lr: 1e-3}]"))
    other = "trainer.phases=[{until: 0.336K, global_batch_size: 4, batch_ramp: true}, {lr: 1e-3}]"
    with pytest.raises(UserError, match=r"trainer\.phases"):
        Trainer(config(*keys, other))
    ahead = "{until: 0.336K, global_batch_size: 6, batch_ramp: true}, {global_batch_size: 2, lr: 1e-3}"
    assert seen(Trainer(config(*keys, f"trainer.phases=[{ahead}]"))) == [(2, 25)] * 6


def test_a_run_of_epochs_ends_with_them(config: Configs) -> None:
    keys = ("trainer.max_steps=null", "trainer.max_tokens=0.01 epochs", "precision=fp32", "health.every=0")
    for late in ("profile.steps=[8,90000]", "debug.inject={step: 90000, where: loss, value: nan}"):
        with pytest.raises(UserError, match=r"such .* 1 to trainer\.max_tokens="):
            Trainer(config(*keys, late))
    trainer = Trainer(config(*keys, "checkpoint.every=1K", "logging.every=50%", "run.name=run"))
    trainer.train()
    tokens = 0.01 * trainer.run.data.train.sidecar.num_tokens
    assert tokens <= 96 * trainer.step < tokens + 96
    assert [line["step"] for line in metrics(trainer.run.folder.path, "loss/lm")][-1] == trainer.step
    steps = [int(path.name[5:]) for path in (trainer.run.folder.path / "checkpoints").iterdir()]
    assert trainer.step in steps


def main(folder: Path) -> None:
    """Two ranks train to step 7, past the ramp."""
    with joined() as world:
        places = [f"data.path={folder / 'corpus'}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder}"]
        keys = ["precision=fp32", "precision.backend=reference", "run.name=moved", "trainer.max_steps=7"]
        Trainer(config_of([*SMALL, *RUN, *places, *keys, "parallel=fsdp"]), [], world).train()


def test_another_number_of_processes_takes_over_in_the_middle_of_it(
    tmp_path: Path, start_ranks: Callable[..., None]
) -> None:
    write_corpus(tmp_path / "corpus", 120)
    start_ranks(__file__, 2, tmp_path)
    places = [f"data.path={tmp_path / 'corpus'}", f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={tmp_path}"]
    keys = [*SMALL, *RUN, *places, "precision=fp32", "precision.backend=reference"]
    moved = Trainer(config_of([*keys, "run.name=moved", "run.resume=auto"]))
    assert moved.step == 7
    assert seen(moved) == [(6, 25), *[(4, 49)] * 4]
    whole = Trainer(config_of([*keys, "run.name=whole"]))
    whole.train()
    assert moved.run.loader.cursor == whole.run.loader.cursor
    losses = [[line["loss/lm"] for line in metrics(t.run.folder.path, "loss/lm")] for t in (moved, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 12
    assert Timeline(moved.config.trainer).tokens(12) == metrics(moved.run.folder.path)[-2]["tokens"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
