"""The ladder on a GPU: verdicts are read late, spikes cost no waiting, a rewind is in place, under CUDA graphs too."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_lines import events, metrics

from trainer.config import Config
from trainer.step.engine import Engine
from trainer.step.guard import Verdict
from trainer.step.train_step import train_step
from trainer.trainer import Trainer

Configs = Callable[..., Config]
SOURCE = Path(__file__).parents[3] / "src"
RUN = ["data=text", f"data.path={SOURCE}", "data.glob='**/*.py'", "model.vocab_size=512", "trainer.max_steps=15"]
RUN += ["trainer.global_batch_size=8", "trainer.microbatch_size=4", "checkpoint.every=3", "checkpoint.keep=0"]
RUN += ["logging.every=5", "logging.console.enabled=false", "recovery.max_consecutive_skips=2", "health.every=0"]
BAD = range(56, 80)  # windows of steps 8, 9, 10


@pytest.mark.parametrize("graph", ["false", "true"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_a_rewind_ends_where_a_run_without_the_data_does(
    config: Configs, tmp_path: Path, recipe: str, graph: str
) -> None:
    keys = [*RUN, f"+recipe={recipe}", f"cuda_graph={graph}", f"run.dir={tmp_path}", f"data.cache_dir={tmp_path}/cache"]
    trainer = Trainer(config(*keys, "run.name=rewound"))
    guard, loader = trainer.run.engine.guard, trainer.run.loader
    judge = guard.judge

    def told_otherwise(*step: object) -> Verdict:
        verdict = judge(*step)  # type: ignore[arg-type]
        return replace(verdict, ok=torch.zeros_like(verdict.ok)) if loader.served[0] in BAD else verdict

    guard.judge = told_otherwise  # type: ignore[method-assign]  # a graph cannot have a fault in one step
    pointers = [p.data_ptr() for p in trainer.run.engine.model.parameters()]
    run = trainer.train().folder
    assert [p.data_ptr() for p in trainer.run.engine.model.parameters()] == pointers
    (rollback,) = events(run, "rollback")
    assert (rollback["step"], rollback["first"], rollback["to"]) == (10, 8, 6)
    assert loader.state_dict()["left_out"] == [[BAD.start, BAD.stop]]
    plain = Trainer(config(*keys, "run.name=plain"))
    plain.run.loader.leave_out([[BAD.start, BAD.stop]])
    plain.train()
    ours, theirs = (metrics(tmp_path / name) for name in ("rewound", "plain"))
    for key in ("loss/total", "loss/validation"):
        assert [line[key] for line in ours if key in line] == pytest.approx(
            [line[key] for line in theirs if key in line], rel=5e-3
        )
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]


def test_watching_for_spikes_does_not_synchronise_and_skips_one(engine: Callable[..., Engine]) -> None:
    e = engine(
        *RUN, "+recipe=fp8_delayed", "compile.enabled=false", "recovery.spikes.enabled=true",
        "recovery.spikes.window=8", "recovery.spikes.min_steps=4", "debug.inject={step: 7, where: loss, value: 1e4}",
    )  # fmt: skip
    tokens = torch.randint(512, (8, 129), device="cuda")
    verdicts = []
    for step in range(1, 9):
        torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
        try:
            verdicts.append(train_step(e, step, tokens, 4).verdict)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [bool(verdict.ok) for verdict in verdicts] == [True] * 6 + [False, True]
    spike = e.guard.spike(verdicts[6])
    assert spike is not None and "loss" in spike.line
    assert int(e.guard.spiked) == int(e.guard.skipped) == 1 and int(e.guard.committed) == 7
