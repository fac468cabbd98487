"""Thousands of steps in a page of a few megabytes: buckets of steps that keep their extremes, in compact numbers.

A curve of N values becomes at most `buckets` of equal width in steps. A bucket has its mean (the line), its minimum and
maximum (the band around it) and its first and last step: a spike of one step in ten thousand stays visible and its
place is known to a bucket. A curve with fewer values stays as it is.

A grid (rows x steps) is decimated likewise along the steps. For each row, a bucket keeps the most significant value:
the maximum of an error, the minimum of a cosine, the scale farthest from the row's median, up or down. Cells are coded
in 16 bits, 0 where there is nothing, as base64:

    log       code 1: zero; else 32768 + 256 * log2(value), that is 0.3 % apart over the range of FP32
    linear    2 + 65533 * (value - low) / (high - low)
"""

import base64
from typing import Any

import numpy as np

from trainer.health.dashboard.read import Grid, Run, Series

LEAST = "entropy", "cosine"
FARTHEST = ("scale",)
MIDDLE_OF = 200
"""Columns from which a row's median is estimated."""


def buckets_of(steps: np.ndarray, buckets: int) -> np.ndarray:
    """Return the index [buckets] of the first of steps [N], ascending, in each non-empty bucket."""
    if len(steps) <= buckets:
        return np.arange(len(steps))
    span = int(steps[-1] - steps[0]) + 1
    which = (steps - steps[0]) * buckets // span
    return np.flatnonzero(np.diff(which, prepend=-1))


def curves(series: dict[str, tuple[np.ndarray, np.ndarray]], buckets: int) -> list[dict[str, Any]]:
    """Group curves, by key (steps [N], values [N]), by their steps:

    {"x": first steps, each as the difference to the one before, "w": last minus first step, absent if all 0,
    "k": {key: [means]} or, in buckets, {key: [means, least, greatest]}}.
    """
    groups: dict[bytes, dict[str, Any]] = {}
    for key, (steps, values) in series.items():
        if not len(steps):
            continue
        starts = buckets_of(steps, buckets)
        ends = np.append(starts[1:], len(steps)) - 1
        group = groups.get(steps.tobytes())
        if group is None:
            group = groups[steps.tobytes()] = {"x": np.diff(steps[starts], prepend=0).tolist(), "k": {}}
            if len(starts) < len(steps):
                group["w"] = (steps[ends] - steps[starts]).tolist()
        if len(starts) == len(steps):
            group["k"][key] = [short(values)]
            continue
        means = np.add.reduceat(values, starts) / (ends - starts + 1)
        least, greatest = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        group["k"][key] = [short(means), short(least), short(greatest)]
    return list(groups.values())


def short(values: np.ndarray) -> list[float | int]:
    """Round to 6 significant digits; whole numbers become int."""
    return [
        int(value) if value.is_integer() and abs(value) < 1e15 else value for value in map(_rounded, values.tolist())
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def grid(key: str, source: Grid, num_rows: int, buckets: int) -> dict[str, Any]:
    """Encode a grid as {"x", "w" as in `curves`, "code": "log" | "linear", "low", "high", "cells"}.

    cells: columns x rows, one column after the other.
    """
    steps = np.array(source.steps, dtype=np.int64)
    matrix = source.matrix(num_rows)
    starts = buckets_of(steps, buckets)
    ends = np.append(starts[1:], len(steps)) - 1
    if len(starts) < len(steps):
        matrix = _kept(key.partition("/")[2], matrix, starts)
    out = {"x": np.diff(steps[starts], prepend=0).tolist(), "rows": num_rows, **_coded(matrix)}
    if len(starts) < len(steps):
        out["w"] = (steps[ends] - steps[starts]).tolist()
    return out


def _kept(quantity: str, matrix: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Reduce matrix [columns, rows] to [buckets, rows]: see the module docstring. fmin and fmax skip NaN."""
    if quantity in LEAST:
        return np.fmin.reduceat(matrix, starts, axis=0)
    greatest = np.fmax.reduceat(matrix, starts, axis=0)
    if quantity not in FARTHEST:
        return greatest
    least = np.fmin.reduceat(matrix, starts, axis=0).astype(np.float64)
    some = matrix[:: -(-len(matrix) // MIDDLE_OF)]
    middle = np.nan_to_num(np.ma.median(np.ma.masked_invalid(some), axis=0).filled(1.0), nan=1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(middle * middle > least * greatest, least, greatest)  # where middle / least > greatest / middle


def _coded(matrix: np.ndarray) -> dict[str, Any]:
    """Encode cells in 16 bits; linear where a value is negative or a share of one, as a cosine is."""
    there = np.isfinite(matrix)
    known = matrix[there]
    codes = np.zeros(matrix.shape, dtype="<u2")
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    if low < 0 or (known.size and low > 0.01 and high <= 1):  # close to 1 a logarithm would be coarse
        codes[there] = 2 + np.round((known - low) * (65533 / (high - low or 1.0)))
        how = {"code": "linear", "low": low, "high": high}
    else:
        with np.errstate(divide="ignore"):
            logs = 32768 + np.round(256 * np.log2(known.astype(np.float64)))
        codes[there] = np.where(known > 0, np.clip(logs, 2, 65535), 1)
        how = {"code": "log"}
    return how | {"cells": base64.b64encode(codes.tobytes()).decode()}


def gap(run: Run, first: Run, train: str, validation: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the excess of a run's losses over the first run's, in percent, at the steps that both have.

    Training losses are means over a 30th of the run, each over the last steps before it; validation losses are exact.
    """
    out = {}
    for name, key in (("gap/training", train), ("gap/validation", validation)):
        steps, ours, theirs = common(run.series.get(key), first.series.get(key))
        if len(steps) and name == "gap/training":
            window = max(int(steps[-1]) // 30, 1)
            ours, theirs = moving_mean(steps, ours, window), moving_mean(steps, theirs, window)
        with np.errstate(divide="ignore", invalid="ignore"):
            percent = 100 * (ours / theirs - 1)
        known = np.isfinite(percent)
        out[name] = (steps[known], percent[known])
    return out


def common(a: Series | None, b: Series | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps that two series share, and the values of each there."""
    if a is None or b is None:
        nothing = np.zeros(0)
        return nothing.astype(np.int64), nothing, nothing
    (ours, values), (theirs, others) = a.arrays(), b.arrays()
    steps, i, j = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    return steps, values[i], others[j]


def moving_mean(steps: np.ndarray, values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over the last `window` steps at each step. steps [N] -> [N]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    begins = np.searchsorted(steps, steps - window, side="right")
    ends = np.arange(1, len(steps) + 1)
    return (sums[ends] - sums[begins]) / (ends - begins)
