"""scripts/kurtosis_lead.py on runs whose signs come at known steps."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


def write(folder: Path, qkv: Callable[[int], float], loss: Callable[[int], float | None]) -> Path:
    folder.mkdir()
    lines = []
    for step in range(50, 5001, 50):
        norm = 9.0 if step == 3500 and loss(5000) != 3 else 1.0
        line = {"step": step, "loss/lm": loss(step), "optim/grad_norm": norm, "recovery/skipped_steps": 0}
        lines.append(line | {f"act/kurtosis_{kind}": qkv(step) for kind in ("qkv", "qkv_sequence")})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "events.jsonl").write_text('{"kind": "alert", "rule": "kurtosis_power", "step": 2600}\n')
    return folder


def lead(run_python: Run, *words: object) -> str:
    done = run_python("scripts/kurtosis_lead.py", *map(str, words), cwd=ROOT)
    return done.stdout + done.stderr


@pytest.mark.parametrize("dead", [9.0, None])
def test_steps_of_warning(tmp_path: Path, run_python: Run, dead: float | None) -> None:
    twin = write(tmp_path / "bf16", lambda step: 4.0, lambda step: 3)
    fp8 = write(tmp_path / "fp8", lambda step: 4.0 if step < 2000 else 9.0, lambda step: 3 if step < 4000 else dead)
    for folder, layers, name in ((twin, 2, "bf16"), (fp8, 3, "fp8_full")):
        (folder / "config.yaml").write_text(f"model: {{num_layers: {layers}}}\nprecision: {{name: {name}}}\n")
    *said, note = lead(run_python, fp8, "--twin", twin).splitlines()
    assert note == "note: the twin is another run: model.num_layers 2 -> 3"
    assert said[:3] == [
        "divergence           step 4000",
        "gradient norm        step 3500: 500 steps before",
        "kurtosis_power       step 2600: 1400 steps before",
    ]
    assert "twin qkv             step 2100: 1900 steps before" in said, "three lines in a row"
    assert (
        "twin qkv_sequence    step 2100: 1900 steps before" in said
        and "twin ffn             not logged in both" in said
    )


def test_a_run_that_lived_had_a_false_alarm(tmp_path: Path, run_python: Run) -> None:
    twin = write(tmp_path / "bf16", lambda step: 4.0, lambda step: 3)
    back = write(tmp_path / "fp8", lambda step: 9.0, lambda step: 3 if step != 4000 else 4)  # back within 500 steps
    said = lead(run_python, back, "--twin", twin)
    assert "divergence           none" in said and "twin qkv             step 150: a false alarm" in said


@pytest.mark.parametrize("every", [1, 4])
def test_skipped_steps_count_in_a_row_only(every: int) -> None:
    divergence = runpy.run_path(str(ROOT / "scripts" / "kurtosis_lead.py"))["divergence"]

    def of(skipped: set[int]) -> int | None:
        steps = range(every, 401, every)
        return divergence({"recovery/skipped_steps": {s: sum(each <= s for each in skipped) for s in steps}})

    assert of(set(range(8, 400, 20))) is None, "FP16's overflows"
    assert of({20, *range(201, 213)}) == 201 and of(set(range(201, 210))) is None


def test_mistakes_are_refused(tmp_path: Path, run_python: Run) -> None:
    twin = write(tmp_path / "bf16", lambda step: 4.0, lambda step: 3)
    assert f"{tmp_path / 'none' / 'metrics.jsonl'}: no such file" in lead(run_python, tmp_path / "none", "--twin", twin)
    assert "give a ratio above 1" in lead(run_python, twin, "--twin", twin, "--ratio", "1")


def test_a_long_run_is_read_in_seconds(tmp_path: Path) -> None:
    line = '{"step": %d, "loss/lm": 3.0, "act/kurtosis_qkv": 4.0}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(line % step for step in range(1, 60_001)))
    (tmp_path / "events.jsonl").touch()
    script = [sys.executable, str(ROOT / "scripts" / "kurtosis_lead.py"), str(tmp_path), "--twin", str(tmp_path)]
    limited = ["bash", "-c", 'ulimit -t 20; exec "$@"', "bash", *script]  # of CPU time: twenty times what it takes
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("divergence           none"), done.stderr
