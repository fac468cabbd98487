"""train.py on two GPUs that share a model over NCCL, and what ends it: a rank that is killed or frozen, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small import SMALL

ROOT = Path(__file__).parents[3]
DEVICE = os.environ.get("FSDP_TEST_DEVICE", "cuda")
RUN = [key for key in SMALL if not key.startswith(("trainer.device", "trainer.microbatch", "trainer.max_steps"))]
RUN += [f"trainer.device={DEVICE}", "trainer.microbatch_size=2", "trainer.max_steps=1000000", "compile.enabled=false"]
RUN += ["parallel=fsdp", "run.name=a", "run.dir=runs", "logging.every=1"]
FAULTS = {
    "killed": (signal.SIGKILL, 1, "was killed by SIGKILL (out of memory? see dmesg), in step "),
    "frozen": (signal.SIGSTOP, 1, "has been unresponsive for"),
    "interrupted": (signal.SIGINT, 130, "stopped by SIGINT after step "),
}


@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_on_two_gpus_is_reported_within_a_minute(fault: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    launcher = [sys.executable, str(ROOT / "scripts" / "launch" / "torchrun.py"), "--standalone", "--nproc_per_node=2"]
    command = [*launcher, str(ROOT / "train.py"), *RUN, "data=text", "data.path=text", "data.glob=*.txt"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as launched:
        try:
            ranks = _ranks(launched, tmp_path / "runs" / "a" / "metrics.jsonl")
            number, code, says = FAULTS[fault]
            began = time.monotonic()
            if number == signal.SIGINT:  # what a terminal does: the whole group gets it
                os.killpg(launched.pid, number)
            else:
                os.kill(ranks[1], number)
            _, err = launched.communicate(timeout=120)
            took = time.monotonic() - began
        finally:
            if launched.poll() is None:
                os.killpg(launched.pid, signal.SIGKILL)
    ours = [line for line in err.splitlines() if line.startswith("octet: ")]
    print(f"{fault}: ended after {took:.1f} s:", *ours, sep="\n")
    assert launched.returncode == code, err
    assert took < 60
    assert any(says in line and (number == signal.SIGINT or "rank 1 (" in line) for line in ours), err
    assert "Traceback" not in err
    if number == signal.SIGINT:
        assert list((tmp_path / "runs" / "a" / "checkpoints").glob("step_*"))


def _ranks(launched: subprocess.Popen[str], metrics: Path) -> dict[int, int]:
    """Processes by rank, as soon as some steps are done."""
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert launched.poll() is None, launched.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert json.loads(metrics.read_text().splitlines()[0])
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1] if entry.name.isdigit() else ""
            if parent == str(launched.pid):
                environment = (entry / "environ").read_text().split("\0")
                found |= {int(word[5:]): int(entry.name) for word in environment if word.startswith("RANK=")}
        except OSError:
            continue
    return found
