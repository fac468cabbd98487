"""Observations at a row of the plan, in the plan's words."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from precision.formats import BY_NAME

NAME_OF = {fmt.dtype: fmt.name for fmt in BY_NAME.values()} | {torch.uint8: "e4m3"}  # FP8 rows are gathered as bytes
FP32_ERROR = 2.0**-16
"""Relative error below which arithmetic was in FP32: half-way, in digits, between the roundings of FP32 and of BF16."""
NOTHING = "nothing"


@dataclass(frozen=True)
class Finding:
    """One row of the plan: its statement and the observation, in the same words."""

    name: str
    planned: str
    seen: str

    @property
    def agrees(self) -> bool:
        """Whether plan and observation agree."""
        return self.planned == self.seen


class Observations:
    """Observations by row (and part of a row)."""

    def __init__(self) -> None:
        self._words: dict[str, set[str]] = defaultdict(set)

    def note(self, row: str, what: str | torch.dtype) -> None:
        self._words[row].add(NAME_OF.get(what, str(what)) if isinstance(what, torch.dtype) else what)

    def note_error(self, row: str, ours: Tensor, exact: Tensor, slack: float = 0.0) -> None:
        """Infer the arithmetic of a result from its distance to float64, and add it. slack: what its inputs err."""
        allowed = FP32_ERROR * exact.norm().clamp_min(1e-300) + slack
        self.note(row, "fp32" if bool((ours.double() - exact).norm() <= allowed) else "less than fp32")

    def at(self, row: str) -> str:
        """Return all observations at a row."""
        return "+".join(sorted(self._words.get(row, ()))) or NOTHING

    def rows(self) -> list[str]:
        return list(self._words)
