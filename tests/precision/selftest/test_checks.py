"""Every Triton kernel is launched by a check of the self-test and agrees with its twin; a wrong one is seen."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is missing")
from triton.runtime.interpreter import GridExecutor

from precision import kernels
from precision.kernels import norm, topk_experts
from precision.selftest import operands, others
from precision.selftest.checks import CHECKS, Check
from precision.selftest.twins import Mismatch, near, same

CPU = torch.device("cpu")


def decorated(file: Path) -> list[str]:
    """Kernels of a file that are launched: MODULE.NAME. What others call ends otherwise."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    jitted = [f for f in functions if any(".jit" in ast.unparse(each) for each in f.decorator_list)]
    return [f"{file.stem}.{f.name}" for f in jitted if f.name.endswith("_kernel")]


def test_every_kernel_has_a_check() -> None:
    files = Path(kernels.__path__[0]).glob("*.py")
    assert {name for file in files for name in decorated(file)} == {name for c in CHECKS for name in c.kernels}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_kernels_agree_with_their_twins(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set()
    call = GridExecutor.__call__

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}")
        return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", record)
    check.run(CPU)
    expected = {name for name in check.kernels if not name.startswith("hopper_")}  # which have no interpreter
    assert expected <= launched, "a check launches what it is said to check"


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(*args: Any) -> torch.Tensor:
        return (topk_experts.choose(*args) + 1) % args[0].shape[1]

    monkeypatch.setattr(others, "choose", off_by_one)
    with pytest.raises(Mismatch, match=r"choice of 4 of 10 experts: \d+ of 132 numbers differ, the first at \[0, 0\]"):
        others.choices(CPU)


def test_a_norm_in_bf16_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = norm.rms_norm_backward

    def rounded(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dgain = exact(*args)
        return dx, dgain.bfloat16().float()

    monkeypatch.setattr(norm, "rms_norm_backward", rounded)
    with pytest.raises(Mismatch, match="gradient of a norm's gain"):
        operands.norms(CPU)


def test_nan_and_another_shape_are_no_agreement() -> None:
    x = torch.ones(3)
    for compare in (same, lambda a, b, what: near(a, b, 1.0, what)):
        with pytest.raises(Mismatch, match="shape"):
            compare(x, torch.ones(4), "x")
        with pytest.raises(Mismatch, match="x: "):
            compare(x * torch.nan, x, "x")
