"""A run that was started with relative paths is used from another folder, and resumed from both."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_run_is_used_from_anywhere(small_runs: Any, run_python: Run, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    small_runs.write(here)
    keys = ["trainer.max_steps=2", "model.num_mtp_layers=0", "precision=fp32", "checkpoint.every=1"]
    start = [ROOT / "train.py", *small_runs.words, *keys, "run.name=mine", "run.resume=auto"]
    places = ["data.path=../here/text", "data.cache_dir=cache"]

    def say(cwd: Path, *words: object) -> str:
        done = run_python(*words, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for _ in range(2):
        say(here, *start, *places)
    run = here / "runs" / "mine"
    data = yaml.safe_load((run / "config.yaml").read_text())["data"]
    assert (data["path"], data["cache_dir"]) == (str(here / "text"), str(here / "cache"))
    assert not list(run.glob("*.before_step_*")), "resumed with the same words, nothing has changed"

    given = Path("..") / "here" / "runs" / "mine"
    logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss/validation"]
    told = say(there, ROOT / "scripts" / "evaluate.py", given)
    assert f"the run logged loss/validation {logged:.4f} at this step" in told and "not the run's" not in told
    assert say(there, ROOT / "scripts" / "sample.py", given, "--tokens", "2", "--prompt", "def")
    assert "step 2: from step_00000001" in say(there, ROOT / "scripts" / "replay_step.py", given, "2")
    assert not any(there.iterdir()), "the cache is where it was"

    more = ["run.dir=../here/runs", "trainer.max_steps=3", "data.cache_dir=own"]  # all else is the run's own
    told = say(there, ROOT / "train.py", "run.name=mine", *more, "logging.console.enabled=true")
    for text in (told, (run / "logs" / "rank0.log").read_text()):
        assert "changed here: trainer.max_steps 2 -> 3, data.cache_dir" in text
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 3 and (there / "own").is_dir() and not (there / "runs").exists(), "what is given now holds"
    data = yaml.safe_load((run / "config.yaml").read_text())["data"]
    assert (data["path"], data["cache_dir"]) == (str(here / "text"), str(there / "own"))
