"""scripts/compare_runs.py on runs that really trained: the table, the pictures, and what it refuses."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from composed import config_of
from run_lines import metrics

from trainer.trainer import Trainer

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
SMALL = [
    *("model.vocab_size=320", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.kv_lora_rank=16", "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=16"),
    *("model.intermediate_size=48", "model.moe_intermediate_size=16", "model.num_experts=4"),
    *("trainer.global_batch_size=2", "trainer.microbatch_size=2", "trainer.sequence_length=24"),
    *("trainer.device=cpu", "trainer.max_steps=6", "eval.every=3", "eval.batches=1", "eval.at_end=4"),
    *("logging.every=1", "logging.console.enabled=false", "checkpoint.every=0", "health.every=0"),
    *("data=text", "data.glob='*.txt'", "data.validation_fraction=0.4"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of four runs: bf16, bf16 with seed 2, fp8_delayed, and bf16 with other data."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("corpus", "other"):
        (folder / name).mkdir()
        for i in range(10):
            text = " ".join(f"{name}{i * j % 17}(x): return x + {j}\n" for j in range(60))
            (folder / name / f"file{i}.txt").write_text(text)
    wanted = {
        "bf16": ["+recipe=bf16"],
        "bf16_seed2": ["+recipe=bf16", "trainer.seed=2"],
        "fp8": ["+recipe=fp8_delayed"],
        "elsewhere": ["+recipe=bf16", f"data.path={folder / 'other'}"],
    }
    for name, overrides in wanted.items():
        places = [f"data.path={folder / 'corpus'}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder}"]
        Trainer(config_of([*SMALL, *places, f"run.name={name}", *overrides])).train()
    return folder


@pytest.fixture
def compare(run_python: Run) -> Run:
    """compare(folder of runs, *arguments)"""
    return lambda runs, *arguments: run_python(ROOT / "scripts" / "compare_runs.py", *arguments, cwd=runs)


def last_validation(run: Path) -> float:
    return metrics(run, "loss/validation")[-1]["loss/validation"]


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_the_table_and_the_pictures(runs: Path, tmp_path: Path, compare: Run) -> None:
    out = tmp_path / "out"
    done = compare(runs, "bf16", "bf16_seed2", "fp8", "--out", str(out))
    assert done.returncode == 0, done.stderr
    base, seed2, fp8 = (last_validation(runs / name) for name in ("bf16", "bf16_seed2", "fp8"))
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert f"{base:.4f}" in rows["bf16"] and "%" not in rows["bf16"]
    assert f"{100 * (fp8 / base - 1):+.2f} %" in rows["fp8_delayed"]
    assert f"{fp8:.4f}" in rows["fp8_delayed"] and rows["fp8_delayed"].endswith(" 0")
    assert f"differ in the seed alone, by {abs(100 * (seed2 / base - 1)):.2f} %" in done.stdout
    assert is_png(out / "loss.png") and is_png(out / "difference.png")


def test_markdown_of_a_run_that_has_not_finished(runs: Path, tmp_path: Path, compare: Run) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(runs / "fp8", unfinished)
    metrics = unfinished / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines() if json.loads(line)["step"] <= 4]
    metrics.write_text("\n".join(kept) + '\n{"step": 5, "loss/l')  # a line that is being written
    done = compare(runs, "bf16", str(unfinished), "--markdown", "--no-plots", "--last", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("| run | steps |") and lines[1].startswith("| --- | --- |")
    assert "| fp8_delayed | 4 of 6 |" in lines[3]
    assert "Validation losses are of different steps: bf16 6, fp8_delayed 3." in done.stdout
    assert not (runs / "compare").exists()


def metered(runs: Path, folder: Path, name: str, joules: list[float], **more: float) -> Path:
    """A copy of a run, as if its GPUs had been metered."""
    shutil.copytree(runs / name, folder / name)
    metrics = folder / name / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [line for line in lines if "loss/lm" in line]
    for line, value in zip(trained[-len(joules) :], joules, strict=True):
        line |= {"gpu/power_watts": 1400.0, "gpu/joules_per_token": value} | {f"gpu/{k}": v for k, v in more.items()}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / name


def test_energy_of_runs_that_were_metered(runs: Path, tmp_path: Path, compare: Run) -> None:
    base = metered(runs, tmp_path, "bf16", [90.0, 0.25, 0.2, 0.3])  # the first line holds compilation
    fp8 = metered(runs, tmp_path, "fp8", [80.0, 0.2, 0.2, 0.2], throttled_thermal=0.2, throttled_hardware=0.1)
    done = compare(runs, str(base), str(fp8), "bf16_seed2", "--markdown", "--no-plots")
    assert done.returncode == 0, done.stderr
    head, _, first, second, third = (line.strip("| ").split(" | ") for line in done.stdout.splitlines()[:5])
    assert head[-4:] == ["watts", "tokens/joule", "joules/token", "energy"]
    assert first[-3:] == ["1,400", "4", "0.25"]  # and no difference to itself
    assert second[-4:] == ["1,400", "5", "0.2", "-20.0 %"]
    assert len(third) < len(first)  # not metered: empty
    assert "fp8_delayed: heat or hardware slowed a GPU for 20% of the time" in done.stdout
    plain = compare(runs, "bf16", "fp8", "--markdown", "--no-plots")
    assert "joule" not in plain.stdout and "slowed" not in plain.stdout


def rewritten(run: Path, out: Path, change: Callable[[dict], dict]) -> None:
    """A copy of a run with other lines of metrics."""
    shutil.copytree(run, out)
    lines = [change(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_without_a_length_is_compared(runs: Path, tmp_path: Path, compare: Run) -> None:
    shutil.copytree(runs / "fp8", tmp_path / "fp8")
    config = tmp_path / "fp8" / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: 6", "max_steps: null"))
    done = compare(runs, "bf16", str(tmp_path / "fp8"), "--markdown", "--no-plots")
    assert done.returncode == 0, done.stderr
    assert "| fp8_delayed | 6 |" in done.stdout


def test_values_of_0_have_no_difference_in_percent(runs: Path, tmp_path: Path, compare: Run) -> None:
    def zero(line: dict) -> dict:
        return {key: 0.0 if key.startswith("loss/") else value for key, value in line.items()}

    rewritten(runs / "bf16", tmp_path / "zero", zero)
    done = compare(runs, str(tmp_path / "zero"), "fp8", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "%" not in done.stdout and is_png(tmp_path / "out" / "difference.png")


def test_losses_that_are_not_finite_are_left_out(runs: Path, tmp_path: Path, compare: Run) -> None:
    def diverged(line: dict) -> dict:
        return {key: None if key == "loss/lm" else value for key, value in line.items()}

    def late(line: dict) -> dict:
        return line if line["step"] == 1 else diverged(line) | {"step": 100 * line["step"]}

    rewritten(runs / "bf16", tmp_path / "never", diverged)
    done = compare(runs, "fp8", str(tmp_path / "never"))
    message = f"octet: error: {tmp_path / 'never'}: no loss/lm in metrics.jsonl is finite; leave the run out\n"
    assert (done.returncode, done.stderr) == (2, message)
    for name in ("late", "later"):
        rewritten(runs / "bf16", tmp_path / name, late)
    done = compare(tmp_path, "late", "later")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bf16", "nowhere"], "nowhere: no such folder; give the folder of a run that has begun, as runs/NAME"),
        (["corpus"], "corpus: no config.yaml in it; give the folder of a run that has begun, as runs/NAME"),
        (["bf16", "elsewhere"], "other data; compare runs that share it"),
        (["fp8", "bf16_seed2"], "another data order, and no run beside it differs in the seed alone"),
        (["bf16", "fp8", "./bf16/"], "bf16 fp8 bf16: a run is named twice; name each once"),
        (["bf16"], "bf16: one run has nothing to be compared to; name two or more, or see its curves with python "),
        (["bf16", "fp8", "--last", "0"], "--last 0: a number of steps; give 1 or more"),
    ],
)
def test_what_cannot_be_compared_is_one_line(runs: Path, arguments: list[str], message: str, compare: Run) -> None:
    done = compare(runs, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("octet: error: ") and message in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_another_model_is_refused(runs: Path, tmp_path: Path, compare: Run) -> None:
    other = tmp_path / "wider"
    shutil.copytree(runs / "bf16", other)
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("hidden_size: 32", "hidden_size: 64"))
    done = compare(runs, "bf16", str(other))
    assert done.returncode == 2
    assert "model.hidden_size=64, but bf16 has 32: another model" in done.stderr


def test_names_with_dollars_and_damaged_numbers_leave_the_pictures_whole(
    runs: Path, tmp_path: Path, compare: Run
) -> None:
    for name in ("a$\\frac$", "b$\\frac$"):  # matplotlib reads formulas between dollars
        rewritten(runs / "bf16", tmp_path / name, lambda line: line)
        with (tmp_path / name / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "loss/lm": Infinity, "loss/validation": NaN}\n')
    done = compare(tmp_path, "a$\\frac$", "b$\\frac$")
    assert done.returncode == 0 and "nan" not in done.stdout, done.stderr
    assert is_png(tmp_path / "compare" / "loss.png") and is_png(tmp_path / "compare" / "difference.png")


def test_a_long_run_is_compared_in_seconds(runs: Path, tmp_path: Path) -> None:
    long = tmp_path / "long"
    rewritten(runs / "bf16", long, lambda line: line)
    lines = (json.dumps({"step": step, "loss/lm": 3.0, "optim/lr": 0.1}) for step in range(1, 50_001))
    (long / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    script = [sys.executable, str(ROOT / "scripts" / "compare_runs.py"), "bf16", str(long), "--no-plots"]
    limited = ["bash", "-c", 'ulimit -t 30; exec "$@"', "bash", *script]  # of CPU time: twenty times what it takes
    done = subprocess.run(limited, cwd=runs, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "50,000 of 6" in done.stdout, done.stderr


def test_data_that_a_rewind_left_out_is_mentioned(runs: Path, tmp_path: Path, compare: Run) -> None:
    rewritten(runs / "bf16", tmp_path / "back", lambda line: line | {"recovery/rewinds": 2})
    done = compare(runs, "bf16", str(tmp_path / "back"), "--no-plots")
    assert done.returncode == 0, done.stderr
    assert "(back) rewound 2 times and left data out: from there on its steps saw other tokens." in done.stdout
    assert done.stdout.count("rewound") == 1


def test_steps_that_a_rewind_took_back_count_no_more(runs: Path, tmp_path: Path, compare: Run) -> None:
    back = tmp_path / "back"
    rewritten(runs / "bf16", back, lambda line: line)
    first = next(line for line in metrics(back, "loss/lm") if line["step"] == 3)
    with (back / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(first | {"loss/lm": 1.2345}) + "\n")
    done = compare(runs, "bf16", str(back), "--markdown", "--no-plots", "--last", "1")
    assert done.returncode == 0, done.stderr
    assert "| 3 of 6 |  |  | 1.2345 |" in done.stdout.splitlines()[3]  # its validation loss, too, is taken back


def test_phases_with_other_batches_are_another_order_of_the_data(runs: Path, tmp_path: Path, compare: Run) -> None:
    """Those that move the learning rate alone are not."""
    for phase, code in (("{until: 3, sequence_length: 16}", 2), ("{until: 3, lr: 1e-4}", 0)):
        other = tmp_path / f"phases{code}"
        shutil.copytree(runs / "bf16", other)
        config = (other / "config.yaml").read_text()
        (other / "config.yaml").write_text(config.replace("phases: []", f"phases: [{phase}]"))
        done = compare(runs, "bf16", str(other), "--no-plots")
        assert done.returncode == code, done.stderr
        assert ("another data order" in done.stderr) == (code == 2)


def test_the_same_data_in_another_place_is_the_same(runs: Path, tmp_path: Path, compare: Run) -> None:
    """A run of another machine; where the text is called otherwise, or gave another tokenizer, it is other data."""
    other = tmp_path / "moved"
    shutil.copytree(runs / "bf16", other)
    config = (other / "config.yaml").read_text()
    assert f"path: {runs / 'corpus'}" in config
    (other / "config.yaml").write_text(config.replace(f"path: {runs / 'corpus'}", "path: /far/away/corpus"))
    done = compare(runs, "bf16", str(other), "--no-plots")
    assert done.returncode == 0, done.stderr
    (other / "tokenizer.json").write_text("{}")
    done = compare(runs, "bf16", str(other), "--no-plots")
    assert "data.path=/far/away/corpus" in done.stderr and "other data" in done.stderr


def test_other_weights_and_settings_changed_half_way_are_reported(runs: Path, tmp_path: Path, compare: Run) -> None:
    other = tmp_path / "other"
    shutil.copytree(runs / "fp8", other)
    config = (other / "config.yaml").read_text()
    assert "init_from: null" in config and "max_steps: 6" in config and "every: 3" in config
    before = config.replace("init_from: null", "init_from: /runs/base").replace("max_steps: 6", "max_steps: 4")
    (other / "config.before_step_00000004.yaml").write_text(before)
    done = compare(runs, "bf16", str(other), "--no-plots")
    assert done.returncode == 0, done.stderr
    weights = "They did not begin with the same weights: bf16 with its own, fp8_delayed with those of /runs/base."
    assert weights in done.stdout
    assert "fp8_delayed: from step 4 on with other settings: trainer.max_steps 4 -> 6." in done.stdout
    (other / "config.before_step_00000005.yaml").write_text("")  # as a resume puts a damaged one aside
    assert compare(runs, "bf16", str(other), "--no-plots").stdout == done.stdout
    (other / "config.yaml").write_text("")
    assert "other/config.yaml: is damaged (not YAML)" in compare(runs, "bf16", str(other), "--no-plots").stderr
    assert not {"weights", "settings"} & set(compare(runs, "bf16", "fp8", "--no-plots").stdout.split())


def test_without_matplotlib_the_error_names_the_install_command(runs: Path) -> None:
    code = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest);"
        f"sys.argv = ['compare_runs.py', 'bf16', 'fp8']; sys.path.insert(0, {str(ROOT / 'src')!r});"
        f"runpy.run_path({str(ROOT / 'scripts' / 'compare_runs.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=runs, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "matplotlib is missing: pip install 'octet[plots]', or --no-plots" in done.stderr
