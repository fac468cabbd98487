"""What is left of thousands of steps: their extremes, at their place; coded numbers come back as they were."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.health.dashboard.decimate import buckets_of, curves, gap, grid, moving_mean, short
from trainer.health.dashboard.read import Grid, Run


def test_a_spike_of_one_step_is_kept() -> None:
    steps = np.arange(1, 20_001)
    values = np.ones(20_000)
    values[12_345] = 50.0
    values[777] = -3.0
    (group,) = curves({"a": (steps, values), "b": (steps, values * 2)}, 500)
    mean, least, greatest = group["k"]["a"]
    first = np.cumsum(group["x"])
    assert len(mean) == len(least) == len(group["x"]) == len(group["w"]) <= 500
    at = int(np.argmax(greatest))
    assert greatest[at] == 50.0 and first[at] <= 12_346 <= first[at] + group["w"][at]
    assert least[int(np.argmin(least))] == -3.0
    counts = np.array(group["w"]) + 1
    assert np.sum(np.array(mean) * counts) == pytest.approx(values.sum(), rel=1e-4)
    assert group["k"]["b"][2][at] == 100.0


def test_few_values_are_left_as_they_are() -> None:
    steps = np.array([2, 4, 9])
    groups = curves({"a": (steps, np.array([1.0, 2.5, 1 / 3])), "b": (steps[:1], np.array([7.0]))}, 3)
    assert groups[0] == {"x": [2, 2, 5], "k": {"a": [[1, 2.5, 0.333333]]}}
    assert groups[1] == {"x": [2], "k": {"b": [[7]]}}
    assert curves({"none": (steps[:0], np.zeros(0))}, 3) == []


def test_buckets_are_of_equal_width_in_steps() -> None:
    steps = np.concatenate([np.arange(100), np.arange(900, 1000)])
    starts = buckets_of(steps, 10)
    assert steps[starts].tolist() == [0, 900]  # those between are empty


def decoded(data: dict[str, Any]) -> np.ndarray:
    codes = np.frombuffer(base64.b64decode(data["cells"]), "<u2").astype(np.float64).reshape(-1, data["rows"])
    if data["code"] == "log":
        values = np.where(codes == 1, 0.0, 2.0 ** ((codes - 32768) / 256))
    else:
        values = data["low"] + (codes - 2) / 65533 * (data["high"] - data["low"])
    return np.where(codes == 0, np.nan, values)


def filled(columns: list[list[float]]) -> Grid:
    made = Grid()
    for step, column in enumerate(columns, 1):
        made.add(step, np.array(column, dtype=np.float32))
    return made


def test_cells_come_back() -> None:
    columns = [[1e-30, 448.0, np.nan], [0.0, 3e9, 0.02]]
    back = decoded(grid("fp8/amax", filled(columns), 3, 10))
    np.testing.assert_allclose(back, columns, rtol=2e-3)
    cosines = [[-0.5, 0.999], [1.0, np.nan]]
    back = decoded(grid("shadow/cosine", filled(cosines), 2, 10))
    np.testing.assert_allclose(back, cosines, atol=2e-5)
    assert np.isnan(decoded(grid("fp8/amax", filled([[np.nan]]), 2, 10))).all()


def test_each_row_keeps_the_extremes_of_a_bucket() -> None:
    scales = [[64.0, 64.0] for _ in range(100)]
    scales[42] = [0.5, 64.0]  # falls
    scales[44] = [128.0, 4096.0]  # rises
    data = grid("fp8/scale", filled(scales), 2, 10)
    back = decoded(data)
    assert back.shape == (10, 2) and data["w"] == [9] * 10
    np.testing.assert_allclose(back[4], [0.5, 4096.0])
    np.testing.assert_allclose(np.delete(back, 4, axis=0), 64.0)
    worst = [[0.999], *([[1.0]] * 98), [0.5]]
    assert decoded(grid("shadow/cosine", filled(worst), 1, 2)).min() == 0.5


def test_the_gap_is_that_of_the_steps_both_have(tmp_path: Path) -> None:
    runs = []
    for name, factor, last in (("a", 1.0, 300), ("b", 1.01, 200)):
        (tmp_path / name).mkdir()
        text = "".join(f'{{"step": {step}, "loss/lm": {factor * (2 + 1 / step)}}}\n' for step in range(1, last + 1))
        (tmp_path / name / "metrics.jsonl").write_text(text + f'{{"step": 100, "loss/validation": {factor * 2}}}\n')
        runs.append(Run(tmp_path / name))
        runs[-1].poll()
    found = gap(runs[1], runs[0], "loss/lm", "loss/validation")
    steps, percent = found["gap/validation"]
    assert steps.tolist() == [100] and percent == pytest.approx([1.0])
    steps, percent = found["gap/training"]
    assert steps.tolist() == list(range(1, 100)) and percent == pytest.approx([1.0] * len(steps))


def test_moving_mean() -> None:
    means = moving_mean(np.array([1, 2, 3, 10]), np.array([1.0, 2.0, 6.0, 5.0]), 2)
    assert means.tolist() == [1.0, 1.5, 4.0, 5.0]


def test_numbers_in_few_characters() -> None:
    assert str(short(np.array([1.0, 0.1234567, 1e20, 12345678.0]))) == "[1, 0.123457, 1e+20, 12345700]"
