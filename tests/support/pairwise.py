"""Products of options, cut to the cases that meet each pair of values once. The rest is marked `exhaustive`.

`make test` runs the pairs, `make test-all` the whole product.
"""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of the axes' values, as `pytest.param`s. Those that add no new pair are marked `exhaustive`."""
    cases = list(product(*(range(len(axis)) for axis in axes)))
    missing = {pair for case in cases for pair in _pairs(case)}
    kept = set()
    while missing:
        best = max(cases, key=lambda case: len(missing.intersection(_pairs(case))))
        kept.add(best)
        missing.difference_update(_pairs(best))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, case, strict=True)),
            marks=[] if case in kept else [pytest.mark.exhaustive],
        )
        for case in cases
    ]


def _pairs(case: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """(axis, value) pairs of a case; of one axis, its values."""
    entries = list(enumerate(case))
    return list(combinations(entries, 2)) if len(entries) > 1 else [(entry,) for entry in entries]
