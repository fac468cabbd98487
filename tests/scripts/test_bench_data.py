"""scripts/bench/data.py measures preparing and the tokenizer alone."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "data.py"


@pytest.mark.parametrize("kind", ["parquet"])
def test_the_data_bench_prints_both_rates(
    run_python: Callable[..., subprocess.CompletedProcess[str]], kind: str
) -> None:
    done = run_python(SCRIPT, "--mb", "1", "--vocab-size", "300", "--workers", "1", "--format", kind)
    assert done.returncode == 0, done.stderr
    assert re.search(r"prepare, 1 processes: [\d.]+ MB/s; encode_batch_fast alone: [\d.]+ MB/s .*ratio \d", done.stdout)
