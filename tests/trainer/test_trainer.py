"""Whole runs: they learn, log, skip bad steps bit for bit, resume bit for bit, and change precision on the way."""

import copy
import json
import math
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import pairwise
from run_folders import snapshot
from run_lines import bitwise, events, metrics
from small import write_corpus

from trainer import build
from trainer.config import Config
from trainer.run.resume_source import check_origin, checkpoint_origin, moved_rate
from trainer.step.guard import TrainingStopped
from trainer.trainer import Trainer

Configs = Callable[..., Config]
Small = Callable[..., list[str]]
ROOT = Path(__file__).parents[2]
RECIPES = ["bf16", "fp8_delayed", "fp8_jit", "fp8_block"]
LOOKS = "act/", "fp8/error", "fp8/saturated", "fp8/underflown"


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that a skipped step must leave alone."""
    p = trainer.run.engine
    tensors = {f"model.{k}": v for k, v in p.model.state_dict().items()}
    tensors |= {f"optimizer.{n}.{k}": v for n, s in p.optimizer.state_dict().items() for k, v in s.items()}
    return tensors | {"history": p.arena.history, "committed": p.guard.committed}


def train(config: Config) -> tuple[Trainer, Path]:
    trainer = Trainer(config)
    summary = trainer.train()
    return trainer, summary.folder


def stopped_after(config: Config, steps: int) -> Path:
    """A run that ends after some steps, as by a signal."""
    trainer = Trainer(config)
    step, calls = trainer._step, iter(range(1, 1000))

    def counted(tokens: torch.Tensor):
        if next(calls) == steps:
            signal.raise_signal(signal.SIGTERM)
        return step(tokens)

    trainer._step = counted  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped, match=rf"SIGTERM after step {steps}, saved; resume with run\.resume=/.*/runs/"):
        trainer.train()
    return trainer.run.folder.path


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_learns_and_leaves_a_whole_folder(config: Configs, recipe: str) -> None:
    microbatch = 2 if recipe == "bf16" else 4  # sums over microbatches are the same in all
    keys = f"trainer.microbatch_size={microbatch}", "trainer.max_steps=12", "optim.lr=1e-2", "eval.every=6"
    cfg = config(f"+recipe={recipe}", *keys, "eval.at_end=2")
    trainer, run = train(cfg)
    logged = metrics(run, "loss/lm")
    assert abs(logged[0]["loss/lm"] - math.log(320)) < 0.1
    assert logged[-1]["loss/lm"] < logged[0]["loss/lm"] - 1
    wanted = {
        "step",
        "tokens",
        "loss/total",
        "loss/lm",
        "loss/mtp",
        "loss/balance",
        "optim/grad_norm",
        "optim/param_norm",
    }
    wanted |= {"optim/lr", "perf/tokens_per_second", "perf/step_seconds", "perf/tflops_per_gpu", "memory/peak_gib"}
    wanted |= {"recovery/skipped_steps", "moe/load_max_over_mean"} | ({"fp8/scale_min"} if recipe != "bf16" else set())
    assert wanted <= set(logged[-1])
    assert logged[-1]["loss/total"] == pytest.approx(
        logged[-1]["loss/lm"] + 0.3 * logged[-1]["loss/mtp"] + logged[-1]["loss/balance"], rel=1e-5
    )
    assert [line["step"] for line in metrics(run, "loss/validation")] == [6, 12]
    for name in ("config.yaml", "overrides.txt", "environment.json", "precision_plan.txt", "logs/rank0.log"):
        assert (run / name).stat().st_size >= 0
    assert (run / "precision_plan.txt").read_text() == trainer.run.engine.plan.to_text()
    backends = json.loads((run / "backends.json").read_text())
    assert {row["backend"] for row in backends["rows"].values()} == {"reference"} and backends["gpu"] is None
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000012"]
    assert int(trainer.run.engine.guard.committed) == 12


@pytest.mark.parametrize("recipe", [pytest.param("bf16", marks=pytest.mark.exhaustive), "fp8_delayed"])
def test_recomputation_changes_no_bit(config: Configs, recipe: str) -> None:
    keys = f"+recipe={recipe}", "trainer.max_steps=3", "eval.at_end=2"
    runs = [train(config(*keys, f"recompute={kind}"))[1] for kind in ("none", "selective", "full")]
    plain, *recomputed = (bitwise(run) for run in runs)
    for line, *others in zip(plain, *recomputed, strict=True):
        looks = {key: line.pop(key) for key in list(line) if key.startswith(LOOKS)}
        for other in others:  # what is cast twice counts twice, in both sums of a mean
            assert {key: other.pop(key) for key in looks} == pytest.approx(looks, rel=1e-12)
            assert other == line


PLACES = {
    "loss": ("loss", "forward"),
    "activation": ("layers.1.attn", "forward"),
    "gradient": ("layers.1.attn", "backward"),
    "weight": ("layers.1.moe", "forward"),
}


@pytest.mark.parametrize(
    ("recipe", "where", "value"), pairwise(["bf16", "fp8_delayed", "fp8_block"], [*PLACES], ["nan", "inf"])
)
def test_a_bad_step_changes_nothing_and_is_reported(config: Configs, recipe: str, where: str, value: str) -> None:
    inject = f"debug.inject={{step: 2, where: {where}, value: {value}}}"
    cfg = config(f"+recipe={recipe}", inject, "trainer.max_steps=3", "eval.at_end=2")
    trainer = Trainer(cfg)
    kept: dict[int, dict[str, torch.Tensor]] = {}
    original = trainer._step

    def whole_step(tokens: torch.Tensor):
        kept[trainer.step - 1] = copy.deepcopy(everything(trainer))
        return original(tokens)

    trainer._step = whole_step  # type: ignore[method-assign]
    summary = trainer.train()
    kept[3] = everything(trainer)
    changed = [name for name, tensor in kept[1].items() if not torch.equal(tensor, kept[2][name])]
    assert changed == []
    assert any(not torch.equal(tensor, kept[3][name]) for name, tensor in kept[2].items()), "the next step counts again"
    assert summary.skipped_steps == 1 and math.isfinite(summary.validation_loss)
    (event,) = events(summary.folder, "nonfinite")
    assert event["step"] == 2
    module, direction = PLACES[where]
    assert event["module"].startswith(module) and event["where"] == direction, event
    assert metrics(summary.folder)[-2]["recovery/skipped_steps"] == 1


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_a_stopped_run_resumes_bit_for_bit(config: Configs, recipe: str) -> None:
    common = (
        f"+recipe={recipe}",
        "run.resume=auto",
        "eval.every=2",
        "debug.inject={step: 2, where: gradient, value: nan}",
    )
    _, whole = train(config(*common, "run.name=whole"))
    run = stopped_after(config(*common, "run.name=stopped"), 3)
    train(config(*common, "run.name=stopped", "profile.steps=[2,3]"))
    assert bitwise(run) == bitwise(whole)
    assert events(run, "resume")
    said = [line["message"].partition(";")[0] for line in events(run, "config")]
    too_late = "has no effect: the run resumes after step 3"
    assert said == [f"profile.steps=[2, 3] {too_late}", f"debug.inject.step=2 {too_late}"]


def test_a_killed_run_gives_the_metrics_of_one_that_was_not(config: Configs, overrides: Small, programs: Any) -> None:
    """SIGKILL at random moments, started again until it is done."""
    common = ["+recipe=fp8_delayed", "run.resume=auto", "trainer.max_steps=12", "checkpoint.every=3", "eval.every=7"]
    _, whole = train(config(*common, "run.name=whole"))
    command = [ROOT / "train.py", *overrides(*common, "run.name=killed")]
    killed, run = 0, whole.parent / "killed"
    while killed < 2:
        process = programs.start(*command)
        seen = len(list((run / "checkpoints").glob("step_*"))) if run.exists() else 0
        newest = max((p.name for p in (run / "checkpoints").glob("step_*")), default="") if seen else ""
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            latest = max((p.name for p in (run / "checkpoints").glob("step_*")), default="")
            if latest > newest:
                time.sleep(random.uniform(0, 0.3))
                break
            time.sleep(0.01)
        process.kill()
        _, err = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), err
        killed += 1
        if process.returncode == 0:  # it ended before the signal came; started again, it would add an evaluation
            shutil.rmtree(run)
            killed = 0
    assert programs.run(*command).returncode == 0
    assert bitwise(run) == bitwise(whole)


def test_random_numbers_continue_where_the_checkpoint_was(config: Configs) -> None:
    trainer = Trainer(config("run.name=run", "trainer.max_steps=1"))
    torch.rand(1000)
    trainer.train()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    resumed = Trainer(config("run.name=run", "run.resume=auto", "trainer.max_steps=2"))
    assert torch.equal(torch.get_rng_state(), state)
    resumed.run.close(None)


def test_a_run_may_resume_in_another_precision(config: Configs) -> None:
    run = stopped_after(config("+recipe=fp8_delayed", "run.name=run", "run.resume=auto"), 3)
    _, same = train(config("+recipe=bf16", "run.name=run", "run.resume=auto"))
    assert same == run
    messages = [line["message"] for line in events(run, "resume")]
    assert any("fp8_delayed -> bf16" in message for message in messages)
    assert "bf16" in (run / "precision_plan.txt").read_text().splitlines()[0]


def test_a_resumed_run_prints_a_learning_rate_that_moves(config: Configs) -> None:
    """The decay over the last 3/4: of 6 steps it takes 4, and step 4 is its second; of 12 it takes 9, and that is its
    first."""
    words = "run.name=run", "run.resume=auto", "optim.decay_fraction=0.75", "optim.lr=1e-3", "optim.min_lr_ratio=0"
    run = stopped_after(config(*words), 3)
    shutil.copytree(run, run.with_name("same"))
    train(config(*words, "run.name=same"))
    train(config(*words, "trainer.max_steps=12"))
    line = "learning rate of step 4: 0.0005 -> 0.000889: the schedule spans the whole run, 6 -> 12 steps"
    skipped = moved_rate(checkpoint_origin(config(*words), ""), config(*words, "trainer.max_steps=12"), 3, committed=2)
    assert skipped == line, "the decay counts skipped steps"
    for name, expected in (("same", []), ("run", [line])):
        said = [line["message"] for line in events(run.with_name(name))]
        assert [message for message in said if message.startswith("learning rate")] == expected


def test_what_a_run_may_not_change_is_refused(config: Configs) -> None:
    run = stopped_after(config("run.name=run", "run.resume=auto"), 2)
    before = sorted(run.rglob("*"))
    for change, message in (
        ("model.num_mtp_layers=2", r"model\.num_mtp_layers=2: .* was trained with 1"),
        ("trainer.seed=9", r"trainer\.seed=9"),
        ("trainer.sequence_length=16", r"trainer\.sequence_length=16"),
        ("trainer.max_steps=1", r"trainer\.max_steps=1: .*step_00000002 is already past it; set 2 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(config("run.name=run", "run.resume=auto", change))
        changed = config("run.name=run", "run.resume=auto", change, "dry_run=true")
        with pytest.raises(ValueError, match=message):
            check_origin(changed)
    same = config(f"run.resume={run}", "dry_run=true")
    check_origin(same)
    assert sorted(run.rglob("*")) == before


def test_a_setting_that_may_not_change_is_refused_before_data_is_prepared(
    config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped_after(config("run.name=run", "checkpoint.every=1", "checkpoint.keep=0"), 2)
    newest = run / "checkpoints" / "step_00000002" / "state.json"
    changed = config(f"run.resume={run}", "trainer.seed=9")
    monkeypatch.setattr(build, "_find_data", lambda config, world: pytest.fail("data was prepared"))
    with pytest.raises(ValueError, match=r"trainer\.seed=9: .* was trained with 1; set trainer\.seed=1"):
        Trainer(changed)
    newest.write_text(newest.read_text().replace("1", "9"))  # a damaged checkpoint decides nothing
    with pytest.raises(pytest.fail.Exception, match="data was prepared"):
        Trainer(changed)


def test_another_text_is_refused_before_anything_is_written(config: Configs, tmp_path: Path) -> None:
    """Even where the run would go back to an earlier checkpoint, and put later ones aside."""
    run = stopped_after(config("run.name=run", "checkpoint.every=1", "checkpoint.keep=0"), 3)
    other = tmp_path / "other"
    other.mkdir()
    for i in range(12):
        (other / f"{i}.txt").write_text(" ".join(f"another text {i * j * 7919 % 65521}" for j in range(400)))
    before = snapshot(run)
    first = run / "checkpoints" / "step_00000001"
    changed = config(f"run.resume={first}", "checkpoint.keep=0", f"data.path={other}", "data.validation_fraction=0.3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a tokenizer that is too small: the refusal comes alone
        with pytest.raises(ValueError, match=r"^data: .*train\.bin is not the text of the run to resume"):
            Trainer(changed)
    assert snapshot(run) == before


def test_what_a_run_once_started_from_may_be_gone_when_it_resumes(config: Configs, tmp_path: Path) -> None:
    _, origin = train(config("trainer.max_steps=1", "run.name=origin"))
    keys = "run.name=run", "run.resume=auto", f"run.init_from={origin}"
    run = stopped_after(config(*keys), 2)
    origin.rename(tmp_path / "moved")
    check_origin(config(*keys))
    _, same = train(config(*keys))
    assert same == run
    text = "run.init_from={}: has no effect: the run resumes from its own checkpoint"
    assert not any("init_from" in line["message"] for line in events(run, "config"))
    train(config(*keys[:2], f"run.init_from={tmp_path / 'another'}", "trainer.max_steps=7"))
    told = [line["message"] for line in events(run, "config")]
    assert told == [text.format(tmp_path / "another")]
    with pytest.raises(ValueError, match=r"run\.init_from=.*no checkpoint there"):
        Trainer(config("run.name=new", "run.resume=auto", keys[-1]))


def test_the_end_is_saved_before_the_whole_text_is_evaluated(config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(config("run.name=run", "trainer.max_steps=2"))

    def lost(at_end: bool, stop: object) -> float:
        assert at_end
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "evaluate", lost)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    later, run = train(config("run.name=run", "run.resume=auto", "trainer.max_steps=2"))
    assert later.step == 2 and (run / "checkpoints" / "step_00000002").is_dir()
    assert [line["step"] for line in metrics(run, "loss/validation")][-1] == 2


def test_the_last_evaluation_reads_up_to_its_limit(config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(config("trainer.max_steps=1", "eval.at_end=5"))
    said: list[str] = []
    monkeypatch.setattr(trainer.run.sinks, "activity", said.append)
    monkeypatch.delattr("trainer.data.bigram.count")  # computed when the data was prepared
    summary = trainer.train()
    assert math.isfinite(summary.validation_loss) and summary.bigram_loss == trainer.run.data.bigram_loss is not None
    assert said[-1] == "evaluating 5/5"


def test_a_run_starts_from_the_weights_of_another(config: Configs) -> None:
    trainer, run = train(config("+recipe=bf16"))
    other = Trainer(config("+recipe=fp8_jit", f"run.init_from={run}"))
    ours, theirs = other.run.engine.model.state_dict(), trainer.run.engine.model.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert other.step == 0 and int(other.run.engine.guard.committed) == 0
    other.run.close(None)
    for change, message in (
        ("model.hidden_size=32", r"run\.init_from=.*embed\.weight is \[320, 32\].*\[320, 64\]"),
        ("model.num_mtp_layers=0", r"run\.init_from=.*: it has mtp\.0\..*, which this model lacks"),
    ):
        changed = config(f"run.init_from={run}", change)
        with pytest.raises(ValueError, match=message):
            Trainer(changed)
        with pytest.raises(ValueError, match=message):  # so says a dry run
            check_origin(changed)
    same = config("+recipe=fp8_jit", f"run.init_from={run}")
    check_origin(same)


def test_weights_of_another_tokenizer_raise_an_alert_whose_remedy_works(config: Configs, tmp_path: Path) -> None:
    _, run = train(config("trainer.max_steps=1"))
    keys, own = (f"run.init_from={run}", f"data.path={write_corpus(tmp_path / 'other')}"), run / "tokenizer.json"
    for more, alerts in ((), 1), ((f"data.tokenizer={own}",), 0):
        other = Trainer(config(*keys, *more)).run
        other.close(None)
        found = [line["message"] for line in events(other.folder.path) if "tokenizer" in line["message"]]
        assert len(found) == alerts and all(f"set data.tokenizer={own}" in message for message in found)


def test_a_place_that_is_refused_is_refused_before_data_is_prepared(config: Configs, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"run\.resume=auto: run\.name is not set"):
        Trainer(config("run.resume=auto", f"data.cache_dir={cache}"))
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "config.yaml").touch()
    with pytest.raises(ValueError, match=r"run\.name=taken: .* exists"):
        Trainer(config("run.name=taken", f"data.cache_dir={cache}"))
    assert not cache.exists()
