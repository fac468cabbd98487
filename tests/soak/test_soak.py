"""The soak test soaks: a few faults of it, and it sees what is wrong."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit")


@pytest.fixture(scope="module")
def bits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bits", HERE / "bits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_some_faults_lose_nothing(run_python: Callable[..., Any]) -> None:
    done = run_python(HERE, "--first", "14", "--faults", "2")  # a kill and damage, and damage alone
    assert done.returncode == 0, done.stdout + done.stderr
    # when a kill comes depends on the machine's speed: it may leave nothing to damage
    assert re.search(r"\| all \| 2 \| (2 \| 0|1 \| 1) \| 0 \|", done.stdout), done.stdout


def test_the_comparison_finds_one_changed_bit(bits: ModuleType) -> None:
    ours = {"a": [torch.zeros(3)], "b": 1.0}
    assert bits.differs(ours, {"a": [torch.zeros(3)], "b": 1.0}, "x") is None
    assert bits.differs(ours, {"a": [torch.tensor([0.0, -0.0, 0.0])], "b": 1.0}, "x") == "x/a/0"
    assert bits.differs(ours, {"a": [torch.zeros(3)], "b": 2.0}, "x") == "x/b"
    assert bits.differs(ours, {"a": []}, "x") is not None


def test_a_step_that_was_logged_twice_must_be_the_same(bits: ModuleType, tmp_path: Path) -> None:
    def write(*values: float) -> None:
        lines = [json.dumps({"step": 1, "loss/lm": value, "perf/x": i}) + "\n" for i, value in enumerate(values)]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))

    write(1.5, 1.5)
    assert bits.metrics(tmp_path) == {1: {"loss/lm": 1.5}}
    write(1.5, 1.25)
    with pytest.raises(bits.SoakFailure, match="step 1 has loss/lm twice"):
        bits.metrics(tmp_path)
