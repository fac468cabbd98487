"""The benches on a GPU, in small: our variants are all measured, as CUDA graphs, with watts where NVML answers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"bf16", "fp8_delayed", "fp8_jit", "fp8_block"}


def bench(folder: Path, name: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """Run a bench; its results by name."""
    paths = os.pathsep.join([str(ROOT / "src"), *(path for path in sys.path if path)])
    command = [sys.executable, str(ROOT / "scripts" / "bench" / f"{name}.py"), *arguments, "--json", "out.json"]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    print(done.stdout)
    return {result["name"]: result for result in json.loads((folder / "out.json").read_text())["results"]}


QUICK = ["--rounds", "1", "--repeat", "2", "--hold", "0.3"]


def test_linear(tmp_path: Path) -> None:
    found = bench(tmp_path, "linear", "--shape", "1000x512x256", *QUICK)
    assert {"torch", "fp8 limit", *OURS} <= found.keys()
    assert all(found[name]["launch"] == "graph" for name in OURS)
    if found["torch"]["watts"] is not None:
        assert 50 < found["torch"]["watts"] < 1500


def test_experts(tmp_path: Path) -> None:
    size = ["--tokens", "1000", "--hidden", "512", "--width", "256", "--experts", "16", "--chosen", "4"]
    found = bench(tmp_path, "experts", *size, "--gradients", "fp32", "bf16", *QUICK)
    assert {"a2", "bf16 limit", "fp8 limit", *OURS} <= found.keys()
    assert all(found[name]["launch"] == "graph" for name in ("a2", *OURS, *(f"{name} dw16" for name in OURS)))
    assert found["fp8_delayed"]["kept"] < found["bf16"]["kept"]


def test_attention(tmp_path: Path) -> None:
    found = bench(tmp_path, "attention", "--shape", "2x4x512x192x128", "--variants", "core", "cudnn", *QUICK)
    assert {"core forward", "core backward", "cudnn forward", "cudnn backward"} == found.keys()


@pytest.mark.parametrize("more", [["--apart"], pytest.param([], marks=pytest.mark.exhaustive)])
def test_step(more: list[str], tmp_path: Path) -> None:
    size = ["trainer.microbatch_size=4", "trainer.global_batch_size=8", "compile.enabled=false"]
    found = bench(tmp_path, "step", "fp8_delayed", "--steps", "3", "--hold", "0.3", "--rounds", "1", *size, *more)
    assert list(found) == ["fp8_delayed", "bf16"]
    assert all(result["limit"] > 0 and result["sustained"] > 0 for result in found.values())
