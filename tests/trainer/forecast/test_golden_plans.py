"""Precision plans of real models, as text: a change of any row shows in a diff.

To accept a change: PYTHONPATH=tests/support python tests/trainer/forecast/test_golden_plans.py
"""

from pathlib import Path

import pytest
from composed import config_of, model_of

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    *(("deepseek_tiny", precision) for precision in ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_jit", "fp8_block")),
    ("fog_mla_tiny", "fp8_full"),
    ("deepseek_v3", "fp8_block"),
    ("deepseek_v2_lite", "fp8_delayed"),
]


def plan_text(model: str, precision: str) -> str:
    """The resolved plan of a model under a table."""
    config = config_of([f"model={model}", f"precision={precision}"])
    _, plan = model_of(config)
    return plan.to_text()


@pytest.mark.parametrize(("model", "precision"), CASES)
def test_plan_is_the_golden_one(model: str, precision: str) -> None:
    assert plan_text(model, precision) == (GOLDEN / f"{model}.{precision}.txt").read_text()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case in CASES:
        (GOLDEN / f"{case[0]}.{case[1]}.txt").write_text(plan_text(*case))
