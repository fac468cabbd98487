"""A bad step on a GPU: kept on the device without waiting, read at the log, run again there, and by replay_step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_lines import events

from trainer.config import Config
from trainer.offline.replay import config_of, find, replay
from trainer.step.engine import Engine
from trainer.step.train_step import train_step
from trainer.trainer import Trainer

Configs = Callable[..., Config]
ROOT = Path(__file__).parents[3]
RUN = ["data=text", f"data.path={ROOT / 'src'}", "data.glob='**/*.py'", "model.vocab_size=512", "trainer.max_steps=10"]
RUN += ["trainer.global_batch_size=8", "trainer.microbatch_size=4", "checkpoint.every=3", "checkpoint.keep=0"]
RUN += ["logging.every=5", "logging.console.enabled=false", "health.every=0", "+recipe=fp8_delayed"]


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_keeping_the_evidence_waits_for_nothing(engine: Callable[..., Engine], compiled: str) -> None:
    e = engine(*RUN, f"compile.enabled={compiled}", "debug.inject={step: 5, where: activation, value: nan}")
    tokens = torch.randint(512, (8, 129), device="cuda")
    verdicts = []
    for step in range(1, 7):
        torch.cuda.set_sync_debug_mode("error" if step in (4, 6) or (step == 5 and compiled == "false") else "default")
        try:
            verdicts.append(train_step(e, step, tokens, 4).verdict)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [bool(verdict.ok) for verdict in verdicts] == [True] * 4 + [False, True]
    (kept,) = e.snapshot.take()
    assert kept is not None and kept.microbatch == 0 and kept.committed == 4
    assert e.guard.places[e.guard.first_place(kept.own[0], kept.loss[:1]) or 0].endswith("attn (forward)")


@pytest.mark.parametrize(("last", "compiled"), [(False, "true"), (True, "false")])
def test_a_bad_step_is_reported_at_the_log_and_replayed(
    config: Configs, tmp_path: Path, last: bool, compiled: str
) -> None:
    """Step 5 is logged: nothing is committed after it, and it is run again at once. Step 4 names the command."""
    step = 5 if last else 4
    fault = f"debug.inject={{step: {step}, where: activation, value: inf}}"
    places = [f"run.dir={tmp_path}", f"data.cache_dir={tmp_path}/cache", "run.name=run"]
    run = Trainer(config(*RUN, *places, fault, f"compile.enabled={compiled}")).train().folder
    (event,) = events(run, "nonfinite")
    assert event["tensor"].endswith(".attn") and event["where"] == "forward" and event["amax"] == "inf"
    first = 8 * (step - 1)
    if last:
        assert event["elements"] == 1 and event["windows"] == [first, first] and event["text"]
    else:
        assert event["windows"] == [first, first + 3] and f"replay_step.py {run} {step}" in event["message"]
    course = find(run, step, 10)
    done = replay(course, config_of(course, [], True), ROOT / "configs" / "precision" / "bf16.yaml", None)
    bad = done.ours.probe.first_bad
    assert bad is not None and (bad.name, bad.not_finite) == (event["tensor"], 1)
    assert done.ours.probe.bad_sequences == [0] and done.ours.place == f"{event['tensor']} (forward)"
