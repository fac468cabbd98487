"""The self-test proves the kernels on the GPU that runs the tests."""

from pathlib import Path

import pytest

from precision import proof
from precision.hardware import detect


def test_kernels_are_right_here_and_are_found_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = detect("cuda")
    assert gpu is not None
    monkeypatch.setattr(proof, "_latest", None)
    found = proof.prove(gpu, tmp_path)
    print(found.line, f"in {found.seconds} s")
    assert found.is_proved, found.line
    monkeypatch.setattr(proof, "_run", lambda here: pytest.fail("a second run"))
    assert proof.prove(gpu, tmp_path) == found
