"""A replayed step of a run: skipped or good, before or after a rewind; the run's folder is only read."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_folders import snapshot
from run_lines import metrics
from torch import Tensor

from precision.errors import UserError
from trainer.files import trim
from trainer.offline.replay import Replay, ReplayTarget, config_of, find, replay
from trainer.offline.saved_model import config_at
from trainer.recovery.nonfinite_probe import TensorReading
from trainer.step.microbatch import EagerMicrobatch, Losses

ROOT = Path(__file__).parents[2]
KEYS = "model.num_mtp_layers=0", "trainer.microbatch_size=2"
FAULT = "debug.inject={step: 4, where: gradient, value: inf}"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small_runs: Any) -> Path:
    """Six steps in FP8 with BF16 moments, the fourth skipped; checkpoints after 3 and 6."""
    folder = tmp_path_factory.mktemp("run")
    small_runs.write(folder)
    keys = ["precision=fp8_delayed", "precision.table.optim.moments=bf16", "trainer.max_steps=6", "checkpoint.every=3"]
    return small_runs.train(folder, "run", *KEYS, *keys, FAULT)


@pytest.fixture(scope="module")
def gone_back(tmp_path_factory: pytest.TempPathFactory, small_runs: Any) -> Path:
    """Steps 5 and 6 were skipped, and the run rewound to step 4; it ends with step 8."""
    bad_data = "debug.inject={step: 1, steps: 99, where: loss, value: nan, windows: [16, 24]}"
    keys = ["precision=fp32", "trainer.max_steps=8", "checkpoint.every=2", "recovery.max_consecutive_skips=1"]
    folder = tmp_path_factory.mktemp("gone_back")
    small_runs.write(folder)
    return small_runs.train(folder, "run", *KEYS, *keys, bad_data)


def again(target: ReplayTarget, *overrides: str, against: str = "bf16", faults: bool = True) -> Replay:
    tree = config_of(target, list(overrides), faults)
    return replay(target, tree, ROOT / "configs" / "precision" / f"{against}.yaml", None)


def logged(run: Path, step: int) -> dict[str, Any]:
    return next(line for line in metrics(run, "loss/total") if line["step"] == step)


def kept(row: TensorReading) -> Tensor:
    assert row.kept is not None
    return row.kept.double()


def largest_change(done: Replay) -> float:
    """How far the errors of the last hidden states can move the loss, to first order: the norm of their gradient times
    that of the errors, in each microbatch about the same."""
    ours, theirs = done.ours.probe.rows, done.theirs.probe.rows
    return done.microbatches * float(
        kept(theirs["norm:grad"]).norm() * (kept(ours["norm"]) - kept(theirs["norm"])).norm()
    )


def test_a_skipped_step_is_replayed(run: Path) -> None:
    before = snapshot(run)
    target = find(run, 4, 10)
    assert (target.checkpoint and target.checkpoint.name, target.first) == ("step_00000003", 3)
    done = again(target)
    assert snapshot(run) == before, "the run's folder is only read"
    for each in (done.ours, done.theirs):  # the fault is in the step, whatever the precision
        assert each.place == "layers.1.attn (backward)"
        first = each.probe.first_bad
        assert first is not None and (first.name, first.not_finite) == ("layers.1.attn:grad", 1)
        assert each.probe.bad_sequences == [0]
    assert done.ours.loss == logged(run, 4)["loss/total"], "the same bits"
    assert target.event is not None and target.event["windows"][0] == done.windows[0] and done.microbatch == 0
    healthy = again(target, faults=False)
    assert healthy.ours.place is None and healthy.ours.probe.first_bad is None
    assert healthy.ours.loss == done.ours.loss


def test_a_committed_step_after_a_skipped_one_is_replayed(run: Path) -> None:
    done, of_bf16 = (again(find(run, 5, 10), against=against) for against in ("fp32", "bf16"))
    line = logged(run, 5)
    assert (done.ours.loss, done.ours.grad_norm) == (line["loss/total"], line["optim/grad_norm"]), "the same bits"
    assert done.ours.place is None and done.theirs.name == "fp32"
    assert 0 < abs(done.ours.loss - done.theirs.loss) < largest_change(done)
    ours, theirs, plain = done.ours.probe.rows, done.theirs.probe.rows, of_bf16.theirs.probe.rows
    for name in ("embed", "layers.0.attn.q", "layers.0.attn", "layers.1.moe", "layers.1", "norm", "layers.0.ffn:grad"):
        x, y, z = (kept(rows[name]) for rows in (ours, theirs, plain))
        assert x.shape == y.shape
        error, rounding = float((x - y).norm() / y.norm()), float((z - y).norm() / y.norm())
        # half a step is at most 2^-8 of a number in BF16 and 2^-3 in E5M2; the embedding is in BF16 in both
        assert error == rounding if name == "embed" else rounding < error < 2**5 * rounding, (name, error, rounding)
    cast = ours["layers.0.attn.q:input"]
    assert cast.saturated is not None and cast.underflown is not None and 0 <= cast.saturated < 0.01
    assert "layers.0.attn.q:input" not in theirs, "nothing is cast"
    gradient = ours["layers.1.moe.experts.down:weight gradient"]
    assert gradient.shape == (4, 64, 32) and gradient.not_finite == 0


def test_within_documents_both_passes_weigh_multi_token_prediction_as_the_step_does(
    tmp_path: Path, small_runs: Any
) -> None:
    """Its targets differ in number between microbatches and steps; here a step has been trained again before."""
    small_runs.write(tmp_path)
    for i in range(200):
        (tmp_path / "text" / f"short{i}.txt").write_text(f"return {i}" * (i % 7 + 1))
    keys = ["precision=fp32", "trainer.max_steps=4", "checkpoint.every=2", "trainer.document_masking=true"]
    run = small_runs.train(tmp_path, "run", *keys, "trainer.microbatch_size=2")
    done = again(find(run, 4, 10), against="fp32")
    ours, theirs = done.ours.probe.rows, done.theirs.probe.rows
    assert all(kept(row).equal(kept(theirs[name])) for name, row in ours.items()), "one precision, the same bits"


def test_recordings_are_forgotten_where_a_phase_begins(
    tmp_path: Path, small_runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are CUDA graphs of one shape and number of microbatches."""
    small_runs.write(tmp_path)
    keys = ["precision=fp32", "trainer.max_steps=4", "trainer.phases=[{until: 2}, {microbatch_size: 4}]"]
    run = small_runs.train(tmp_path, "run", *KEYS, *keys, "checkpoint.every=0")
    shutil.rmtree(run / "checkpoints")  # from the start
    log: list[int | str] = []
    original = EagerMicrobatch.__call__

    def noted(self: EagerMicrobatch, tokens: Tensor, index: int, count: int) -> Losses:
        log.append(count)
        return original(self, tokens, index, count)

    monkeypatch.setattr(EagerMicrobatch, "__call__", noted)
    monkeypatch.setattr(EagerMicrobatch, "forget", lambda self: log.append("forget"))
    again(find(run, 3, 10), against="fp32")
    assert log[:4] == [2, 2, 2, 2] and log[4] == "forget" and set(log[5:]) == {"forget", 1}


def test_from_the_start_and_with_other_keys(run: Path) -> None:
    keys = "precision.scaling.margin=1", "trainer.microbatch_size=4", "health.shadow_every=2"
    done = again(find(run, 2, 10), *keys, against="fp32")
    assert done.target.checkpoint is None and done.microbatches == 1
    for loss in (done.ours.loss, logged(run, 2)["loss/total"]):
        assert 0 < abs(loss - done.theirs.loss) < largest_change(done)


def test_another_text_is_not_replayed(run: Path, tmp_path: Path) -> None:
    """From the start, too, where no checkpoint is read."""
    for n in range(12):
        (tmp_path / f"{n}.txt").write_text(" ".join(f"other words {n * j * 7919 % 65521}" for j in range(400)))
    with pytest.raises(UserError, match=r"^data: .*train\.bin is not the text of the run; set it back"):
        again(find(run, 2, 10), f"data.path={tmp_path}", "data.validation_fraction=0.3")


def test_a_step_stands_for_other_data_after_a_rewind(gone_back: Path) -> None:
    """Step 6 was skipped, and later trained with what comes after the data that is left out."""
    first = find(gone_back, 6, 10)
    assert first.rewinds == [] and first.checkpoint is not None and first.checkpoint.name == "step_00000004"
    assert first.logged is None, "that line was removed by the rewind"
    done = again(first)
    assert done.ours.place == "loss (forward)" and done.windows.tolist() == [20, 21]
    second = find(gone_back, 7, 10)
    assert len(second.rewinds) == 1 and second.checkpoint is not None and second.checkpoint.name == "step_00000006"
    done = again(second, against="fp32")
    assert done.ours.place is None and done.ours.loss == logged(gone_back, 7)["loss/total"] == done.theirs.loss
    assert done.windows.tolist() == [32, 33], "24 to 31 were read by steps 5 and 6"


def test_what_a_discarded_course_reported_is_not_about_the_step(run: Path, tmp_path: Path) -> None:
    """The run resumed from step 3, and trained step 4 again."""
    copy = tmp_path / "resumed"
    shutil.copytree(run, copy)
    assert find(copy, 4, 10).event is not None
    with (copy / "events.jsonl").open("a") as events:
        events.write('{"step": 3, "kind": "resume", "message": "resumed from step_00000003"}\n')
    assert find(copy, 4, 10).event is None
    shutil.rmtree(copy / "checkpoints" / "step_00000006")
    trim(copy / "metrics.jsonl", 3)
    with pytest.raises(UserError, match=r"^step 6: .* has steps 1 to 3 so far"):
        find(copy, 6, 10)


def test_replay_prints_where_the_step_went_bad(run: Path, run_python: Run) -> None:
    done = run_python(str(ROOT / "scripts" / "replay_step.py"), str(run), "4", "--only", "layers.1.*")
    assert done.returncode == 0, done.stderr
    assert "step 4: from step_00000003, 0 steps trained again" in done.stdout
    assert "the run reported: step 4 is not finite, first at layers.1.attn (backward)" in done.stdout
    assert "not finite in 1 of 2 sequences: window 12" in done.stdout and "return x" in done.stdout
    table = done.stdout.splitlines()
    table = table[next(i for i, line in enumerate(table) if "of range" in line) + 1 :]
    assert [line.split()[1] for line in table if line.startswith("!!")] == ["layers.1.attn:grad"]
    names = [line[4:].split("  ")[0] for line in table]
    order = ["layers.1.attn.q:input", "layers.1.attn.q:weight", "layers.1.attn.q", "layers.1.attn", "layers.1.moe"]
    order += ["layers.1.moe:grad", "layers.1.attn:grad", "layers.1.attn.q:grad"]
    assert [name for name in names if name in order] == order
    (row,) = [line for line in table if line.split()[0] == "layers.1.attn.o"]
    assert 0.1 < float(row.split()[-2]) < 20 and row.endswith(" %"), "the difference between FP8 and BF16"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing", "4"], "missing: no such folder; give the folder of a run"),
        (["RUN", "7"], "step 7: RUN has steps 1 to 6 so far; give one of them"),
        (["RUN", "0"], "step 0: RUN has steps 1 to 6 so far"),
        (["RUN", "3", "--most", "1"], "step 3: RUN has no checkpoint before it, so 2 steps must be trained again"),
        (["RUN", "4", "--microbatch", "2"], "--microbatch 2: the step has 2; give 0 to 1"),
        (["RUN", "4", "model.layers=3"], "model.layers=3: there is no such key; did you mean model.num_layers?"),
        (["RUN", "4", "model.hidden_size=32"], "the checkpoint is of another model"),
        (["RUN", "4", "margin"], "margin: not a KEY=VALUE"),
        (["RUN", "4", "--only", "nope*"], "--only nope*: no tensor is called so; some are embed, layers.0.a"),
    ],
)
def test_mistakes_are_one_line(run: Path, run_python: Run, words: list[str], says: str) -> None:
    words = [str(run) if word == "RUN" else word for word in words]
    done = run_python(str(ROOT / "scripts" / "replay_step.py"), *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert says.replace("RUN", str(run)) in done.stderr


def test_a_replay_uses_the_config_of_that_step(run: Path, tmp_path: Path) -> None:
    """A run that continued with another config keeps the one before."""
    tree = yaml.safe_load((run / "config.yaml").read_text())
    for name, lr in (("config.before_step_00000003.yaml", 1.0), ("config.before_step_00000005.yaml", 2.0)):
        (tmp_path / name).write_text(yaml.safe_dump({**tree, "optim": {**tree["optim"], "lr": lr}}))
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    (tmp_path / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    rates = [config_at(tmp_path, step)["optim"]["lr"] for step in (3, 4, 5, 6)]
    assert rates == [1.0, 2.0, 2.0, tree["optim"]["lr"]]
    assert config_of(find(tmp_path, 3, 10), [], True)["optim"]["lr"] == 1.0
    with pytest.raises(UserError, match=r"step 3, after which its settings changed \(optim.lr 1.0 -> 2.0\)"):
        find(tmp_path, 4, 10)  # from the start of the run: no checkpoint of step 3 is left
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    assert config_of(find(tmp_path, 4, 10), [], True)["optim"]["lr"] == 2.0


def test_a_replay_uses_the_backends_of_that_step(run: Path, tmp_path: Path) -> None:
    """Those of a later config are not read."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "backends.json").rename(tmp_path / "run" / "backends.before_step_00000005.json")
    (tmp_path / "run" / "backends.json").write_text("of later steps, damaged")
    assert again(find(tmp_path / "run", 4, 10)).ours
    with pytest.raises(UserError, match=r"backends\.json"):
        again(find(tmp_path / "run", 6, 10))
