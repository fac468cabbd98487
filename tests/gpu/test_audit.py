"""On a GPU every row of the plan is what happens, in the backend that trains there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_jit", "fp8_block"])
def test_every_row_is_what_happens(recipe: str) -> None:
    command = [sys.executable, "scripts/audit_precision.py", "--device", "cuda", f"+recipe={recipe}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " on cuda: " in done.stdout and "\nsum " in done.stdout and "\nnot seen: " in done.stdout
