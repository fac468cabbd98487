"""A checkpoint's validation loss is what the run logged; BF16 stands beside it; the run's folder is only read."""

import importlib.util
import math
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from composed import tree_of
from run_folders import snapshot
from run_lines import metrics

from precision.errors import UserError
from trainer.data import DataConfig, Source, prepare
from trainer.offline.evaluate import Scores, evaluate, perplexity
from trainer.offline.export import export_run
from trainer.offline.hf_export import ExportFormat
from trainer.offline.saved_model import open_run

ROOT = Path(__file__).parents[2]
EVALUATE = ROOT / "scripts" / "evaluate.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_runs: Any) -> Path:
    """Folder of runs, each in the recipe of its name."""
    folder = tmp_path_factory.mktemp("evaluate")
    small_runs.write(folder, files=12, words=20)
    keys = [
        "model.vocab_size=288",
        "model.num_mtp_layers=0",
        "data.validation_fraction=0.3",
        "trainer.max_steps=6",
        "checkpoint.every=3",
    ]
    for name in ("fp8_delayed", "fp8_block", "fp32"):
        small_runs.train(folder, name, f"precision={name}", "eval.every=3", "eval.batches=2", *keys)
    return folder


def logged(run: Path, step: int) -> float:
    return next(line["loss/validation"] for line in metrics(run, "loss/validation") if line["step"] == step)


def scores(run: Path, step: int, most: int | None) -> Scores:
    saved = open_run(run, step)
    (found,) = evaluate(saved, prepare(saved.config.data, saved.config.model.vocab_size), most)
    return found


def test_the_loss_is_what_the_run_logged(runs: Path) -> None:
    run = runs / "fp8_delayed"
    half, whole = scores(run, 3, 2), scores(run, 6, None)
    assert (half.own, half.windows) == (logged(run, 3), 8), "the same bits"
    assert whole.own == logged(run, 6) and whole.windows > 8, "at its end, a run looks at all text"
    assert whole.bf16 is not None and whole.gap == whole.own - whole.bf16
    saved = open_run(run, 6, precision=tree_of(["precision=bf16"])["precision"])
    (in_bf16,) = evaluate(saved, prepare(saved.config.data, saved.config.model.vocab_size), None)
    assert in_bf16.own == whole.bf16, "the same weights in a model that is BF16 from the start"
    blocks = scores(runs / "fp8_block", 6, None)
    assert blocks.own == logged(runs / "fp8_block", 6)
    assert any(found.gap for found in (half, whole, blocks)), "FP8 shows, though one may be equal"
    plain = scores(runs / "fp32", 6, None)
    assert plain.own == logged(runs / "fp32", 6) and plain.gap is plain.bf16 is None


def test_the_model_is_the_checkpoints_even_if_config_yaml_differs(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "fp32", run)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"] |= {"rope_theta": 7.0, "num_experts_per_token": 1}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert scores(run, 3, 2).own == logged(run, 3)


def test_the_length_of_a_sequence_is_that_of_the_checkpoints_phase(runs: Path) -> None:
    phases = "trainer.phases=[{until: 4}, {sequence_length: 12}]"
    base = open_run(runs / "fp32").shape.length
    assert [open_run(runs / "fp32", step, [phases]).shape.length for step in (3, 6)] == [base, 12]
    assert open_run(runs / "fp32", 6, [phases, "trainer.phases.1.sequence_length=16"]).shape.length == 16
    for wrong in ("trainer.phases.2.sequence_length=16", "trainer.phases.x=16"):
        with pytest.raises(UserError, match=rf"{wrong}: cannot be read .*, entries of lists as data\.mix\.0\.path"):
            open_run(runs / "fp32", 6, [phases, wrong])


def test_keys_change_the_recipe_that_precision_names(runs: Path) -> None:
    precision = tree_of(["precision=fp8_block"])["precision"]
    saved = open_run(runs / "fp32", None, ["precision.table.lm_head=fp8"], precision)
    assert saved.plan.gemms["lm_head"].recipe.is_fp8
    with pytest.raises(UserError, match=r"precision\.tabel=3: there is no such key"):
        open_run(runs / "fp32", None, ["precision.tabel=3"], precision)


def test_evaluate_prints_the_loss_of_each_source(runs: Path, run_python: Run) -> None:
    run = runs / "fp8_delayed"
    before = snapshot(run)
    done = run_python(EVALUATE, run, "--step", "3", "--batches", "2")
    assert done.returncode == 0, done.stderr
    assert snapshot(run) == before
    head, row, said = done.stdout.splitlines()[2], done.stdout.splitlines()[4].split(), done.stdout.splitlines()[-1]
    assert head.split() == ["fp8_delayed", "bf16", "gap"]
    loss = logged(run, 3)
    assert row[:4] == ["text", "8", f"{loss:.4f}", f"{math.exp(loss):.2f}"] and len(row) == 7
    assert float(row[6]) == pytest.approx(float(row[2]) - float(row[4]), abs=2e-4)
    assert said == f"the run logged loss/validation {loss:.4f} at this step"
    done = run_python(EVALUATE, runs / "fp32")
    assert "bf16" not in done.stdout and "step_00000006" in done.stdout and "another one" not in done.stdout


def test_an_imported_model_is_evaluated_where_its_folder_is_now(runs: Path, run_python: Run, tmp_path: Path) -> None:
    run, here = runs / "fp32", tmp_path / "imported"
    export_run(run, tmp_path / "hf", ExportFormat.fp32)
    done = run_python(ROOT / "scripts" / "import_hf.py", tmp_path / "hf", here)
    assert done.returncode == 0, done.stderr
    here = here.rename(tmp_path / "moved")
    own = open_run(run).config
    words = [f"data.{key}={getattr(own.data, key)}" for key in ("path", "glob", "cache_dir", "validation_fraction")]
    words += ["data.source=text", "trainer.sequence_length=24", "trainer.microbatch_size=4"]
    for recipe in ("bf16", "fp8_block"):
        precision = tree_of([f"precision={recipe}"])["precision"]
        theirs, ours = open_run(run, precision=precision), open_run(here, None, words, precision)
        found, expected = (evaluate(s, prepare(s.config.data, s.config.model.vocab_size), 2) for s in (ours, theirs))
        assert found == expected, "the same bits"
    done = run_python(EVALUATE, here, *words, "--precision", "fp8_block", "--batches", "2")
    assert (done.returncode, done.stdout.splitlines()[2].split()) == (0, ["fp8_block", "bf16", "gap"]), done.stderr
    assert done.stdout.splitlines()[4].split()[2] == f"{expected[0].own:.4f}"


def test_mistakes_are_one_line(runs: Path, run_python: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("other words " * 200)
    (tmp_path / "b.txt").write_text("and some more " * 200)
    other = [f"data.path={tmp_path}", "data.validation_fraction=0.5"]
    prepare(DataConfig(Source.text, str(tmp_path), "*.txt", validation_fraction=0.5), 260, folder=tmp_path / "bins")
    wanted = {
        "--batches 0: out of range": ["--batches", "0"],
        "bins was prepared with another; prepare that text again, with data.tokenizer=": [
            "data.source=bins",
            f"data.path={tmp_path / 'bins'}",
        ],
        f"set data.tokenizer={runs / 'fp32' / 'tokenizer.json'}": other,
        "no such checkpoint": ["--step", "5"],
        "--precision fp9: there is no such recipe; choose run, bf16, ": ["--precision", "fp9"],
    }
    if importlib.util.find_spec("lm_eval") is None:
        wanted['--lm-eval piqa: it is not installed; run pip install "lm-eval[hf]"'] = ["--lm-eval", "piqa"]
    for says, words in wanted.items():
        done = run_python(EVALUATE, runs / "fp32", *words)
        lines = [line for line in done.stderr.splitlines() if line.startswith("octet:")]
        assert done.returncode == 2 and "Traceback" not in done.stderr and [says in line for line in lines] == [True], (
            done.stderr
        )


def test_sequences_longer_than_the_model_or_the_text_are_refused(runs: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.sequence_length=\d+: the model is meant for at most"):
        open_run(runs / "fp32", None, ["trainer.sequence_length=1000000"])
    saved = open_run(runs / "fp32")
    data = prepare(saved.config.data, saved.config.model.vocab_size)
    saved.config.trainer.sequence_length = data.validation.num_tokens
    with pytest.raises(ValueError, match=r"trainer.sequence_length=\d+: .* has only \d+ tokens"):
        evaluate(saved, data, None)


@pytest.mark.parametrize("choice", ["+recipe=bf16", "recipe=bf16", "precision=bf16", "+optim.lr=1"])
def test_what_is_chosen_by_name_is_the_runs(runs: Path, choice: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(choice)}: the recipe and .* are the run's; change single"):
        open_run(runs / "fp32", None, [choice])


def test_several_sources(runs: Path, tmp_path: Path) -> None:
    """A row each, and one of all together; a source without a whole sequence has none to look at."""
    for name, count in (("a", 10), ("b", 20)):
        (tmp_path / name).mkdir()
        for i in range(8):
            (tmp_path / name / f"{i}.txt").write_text(f"{name}: words, {i} of them. " * count)
    mix = ", ".join(f"{{name: {name}, path: {tmp_path / name}, glob: '**'}}" for name in "ab")
    own = [f"data.tokenizer={runs / 'fp8_block' / 'tokenizer.json'}", "data.path=null", f"data.mix=[{mix}]"]
    saved = open_run(runs / "fp8_block", None, own)
    data = prepare(saved.config.data, saved.config.model.vocab_size)
    together, *each = evaluate(saved, data, None)
    assert [together.source, *(score.source for score in each)] == ["all", "a", "b"]
    assert min(score.own for score in each) < together.own < max(score.own for score in each)
    saved.config.trainer.sequence_length = data.validations[0][1].num_tokens
    _, a, b = evaluate(saved, data, 1)
    assert (a.windows, a.gap, b.windows) == (0, None, 1) and math.isnan(perplexity(a.own)) and b.own > 0
    lines = runpy.run_path(str(EVALUATE))["table"]([together, a, b], "fp8_block")
    assert len(lines) == 5 and "nan" in lines[3]


def test_other_text_in_the_runs_tokens(runs: Path, run_python: Run, tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"other words, {i} of them. " * 40)
    words = [
        f"data.path={tmp_path}",
        f"data.tokenizer={runs / 'fp32' / 'tokenizer.json'}",
        "data.validation_fraction=0.5",
    ]
    done = run_python(EVALUATE, runs / "fp32", *words)
    assert done.returncode == 0, done.stderr
    assert "the held-out text is not the run's" in done.stdout
