"""A trace in a page of text: the sums by hand of a small one, and a real one of a run."""

import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def summarise(run_python: Run) -> Run:
    """summarise(*arguments)"""
    return lambda *arguments: run_python(ROOT / "scripts" / "summarise_trace.py", *arguments)


def event(cat: str, name: str, begin: float, milliseconds: float, **more: Any) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": 1e3 * begin, "dur": 1e3 * milliseconds, **more}


def test_messages_beside_arithmetic_and_alone(summarise: Run, tmp_path: Path) -> None:
    events = [
        event("user_annotation", "step 7", 0, 50, tid=1),
        event("user_annotation", "step 8", 50, 50, tid=1),
        event("kernel", "gemm", 10, 20, args={"stream": 7}),
        event("kernel", "gemm", 40, 10, args={"stream": 7}),
        event("kernel", "ncclDevKernel_AllGather", 20, 24, args={"stream": 9}),  # 10 ms alone
        event("gpu_memcpy", "Memcpy HtoD", 70, 4, args={"stream": 7}),
        event("cpu_op", "aten::mm", 0, 10, tid=1),
        event("cuda_runtime", "cudaLaunchKernel", 2, 4, tid=1),
        {"cat": "cpu_op", "name": "a mark, which takes no time", "ts": 1},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    done = summarise(path)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ms  ") for line in done.stdout.splitlines()]
    said = {line[1]: float(line[0]) for line in lines if len(line) == 2 and line[0].strip()}
    assert said == {
        "from the first kernel to the last": 32.0, "at work": 22.0, "arithmetic": 17.0, "messages": 12.0,
        "messages alone": 5.0, "idle": 10.0,
    }  # fmt: skip
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["15.00", "1", "7", "gemm"] in rows and ["3.00", "0.5", "aten::mm"] in rows
    assert rows.index(["15.00", "1", "7", "gemm"]) < rows.index(["12.00", "0.5", "9", "ncclDevKernel_AllGather"])


def test_a_trace_of_a_cpu_run_is_summarised(summarise: Run, small_runs: Any, tmp_path: Path) -> None:
    small_runs.write(tmp_path)
    one = "model.num_layers=1", "model.num_mtp_layers=0"  # a trace holds every operation
    run = small_runs.train(tmp_path, "run", "trainer.max_steps=2", "profile.steps=[1,2]", "profile.memory=false", *one)
    done = summarise(run, "--rows", "5")
    assert done.returncode == 0, done.stderr
    first, blank, head, *rows = done.stdout.splitlines()
    assert first == f"{run / 'profile' / 'trace_step1-2.json.gz'}: 2 steps" and not blank
    assert head.split() == ["ms", "calls", "host"] and len(rows) == 5
    assert "aten::mm" in summarise(run, "--rows", "1000").stdout


def test_of_many_ranks_the_first_trace_is_read(summarise: Run, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    for age, name in enumerate(("step2-3_rank1", "step5-6_rank10", "step5-6_rank0", "step2-3_rank0")):
        path = folder / f"trace_{name}.json.gz"
        path.write_bytes(gzip.compress(b'{"traceEvents": []}'))
        os.utime(path, (1000 - age, 1000 - age))
    assert summarise(tmp_path).stdout.startswith(f"{folder / 'trace_step5-6_rank0.json.gz'}: 0 steps")
    for path in folder.glob("*_rank0.*"):
        path.unlink()  # another node's
    assert summarise(tmp_path).stdout.startswith(f"{folder / 'trace_step2-3_rank1.json.gz'}: 0 steps")


def test_a_step_that_is_there_twice_counts_twice(summarise: Run, tmp_path: Path) -> None:
    """As after a rewind; what is no event of a trace counts for nothing."""
    step = {"name": "step 7", "cat": "user_annotation", "ts": 1, "dur": 2}
    events = [step, step | {"ts": 9}, "durx", {"dur": 1, "cat": "user_annotation"}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert summarise(tmp_path / "trace.json").stdout.startswith(f"{tmp_path / 'trace.json'}: 2 steps")


def test_what_is_no_trace_is_one_line(summarise: Run, tmp_path: Path) -> None:
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' * 99)[:40])
    (tmp_path / "spoilt.json.gz").write_bytes(gzip.compress(b"{}")[:10] + b"\xff" * 20)
    (tmp_path / "other.json").write_text("[1]")
    for path, says in (
        (tmp_path, "no trace there; train with profile.steps=[10,12]"),
        (tmp_path / "cut.json.gz", "no trace of torch's profiler"),
        (tmp_path / "spoilt.json.gz", "no trace of torch's profiler (Error -3"),
        (tmp_path / "other.json", "no trace of torch's profiler"),
    ):
        done = summarise(path)
        assert done.returncode == 2 and f"error: {path}: {says}" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert "--rows 0: set 1 or more" in summarise(tmp_path, "--rows", "0").stderr
