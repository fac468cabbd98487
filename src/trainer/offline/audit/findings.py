"""What was seen at a row of the plan, in the words of the plan."""

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
    """One row of the plan: what it states and what was observed, in the same words."""

    name: str
    planned: str
    seen: str

    @property
    def agrees(self) -> bool:
        """Whether the plan is what happened."""
        return self.planned == self.seen


class Seen:
    """What was seen, by row (and part of a row)."""

    def __init__(self) -> None:
        self._words: dict[str, set[str]] = defaultdict(set)

    def note(self, row: str, what: str | torch.dtype) -> None:
        """Add an observation."""
        self._words[row].add(NAME_OF.get(what, str(what)) if isinstance(what, torch.dtype) else what)

    def note_error(self, row: str, ours: Tensor, exact: Tensor) -> None:
        """Add what a result's distance from float64 shows about the arithmetic that made it."""
        error = (ours.double() - exact).norm() / exact.norm().clamp_min(1e-300)
        self.note(row, "fp32" if bool(error <= FP32_ERROR) else "less than fp32")

    def at(self, row: str) -> str:
        """All that was seen at a row."""
        return "+".join(sorted(self._words.get(row, ()))) or NOTHING

    def rows(self) -> list[str]:
        """Rows at which something was seen."""
        return list(self._words)
