"""The length of a run and what changes along it, as a config writes them.

A *span* of a run is written in one of three ways:

    2000                    steps
    10B  500M  1.5T         tokens: K, M, B and T are thousands, millions, billions, trillions
    0.02  2%                a share of the whole run

A *length* is tokens (`14.8T`, `1e9`) or epochs of the training text (`3 epochs`).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple

LARGEST = 2**53  # limit of whole numbers: up to it they are exact as 64-bit integer and float
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = r"(\d+(?:\.\d+)?(?:e\+?\d+)?)"
_TOKENS = re.compile(_NUMBER + r"\s*([KMBT])(?:\s*tokens)?", re.IGNORECASE)
_PERCENT = re.compile(_NUMBER + r"\s*%")
_EPOCHS = re.compile(_NUMBER + r"\s*epochs?")


class Unit(Enum):
    """Unit of a span or a length."""

    steps = "steps"
    tokens = "tokens"
    share = "share"
    epochs = "epochs"


class Amount(NamedTuple):
    """A span or a length: whole numbers of steps and tokens, a share from 0 to 1, any number of epochs."""

    number: float
    unit: Unit


@dataclass(frozen=True)
class Notation:
    """A value that can be written in several ways. what: the ways, for a message; read: returns its amount, or None."""

    what: str
    read: Callable[[Any], Amount | None]


def span(value: int | float | str) -> Amount | None:
    """Parse a span; None if it is not one."""
    if isinstance(value, str):
        if found := _TOKENS.fullmatch(value.strip()):
            tokens = float(found[1]) * UNITS[found[2].upper()]
            return Amount(round(tokens), Unit.tokens) if tokens < LARGEST else None
        found = _PERCENT.fullmatch(value.strip())
        share = None if found is None else float(found[1]) / 100
        return Amount(share, Unit.share) if share is not None and share <= 1 else None
    if isinstance(value, bool) or not 0 <= value < LARGEST:
        return None
    if float(value).is_integer():
        return Amount(int(value), Unit.steps)
    return Amount(value, Unit.share) if value < 1 else None


def length(value: int | float | str) -> Amount | None:
    """Parse a length; None if it is not one."""
    if isinstance(value, str):
        if found := _EPOCHS.fullmatch(value.strip()):
            return Amount(float(found[1]), Unit.epochs) if 0 < float(found[1]) < LARGEST else None
        found = span(value)
        return found if found is not None and found.unit is Unit.tokens and found.number >= 1 else None
    if isinstance(value, bool) or not 1 <= value < LARGEST or not float(value).is_integer():
        return None
    return Amount(int(value), Unit.tokens)


def is_share(value: int | float | str) -> bool:
    """Return whether a span is a share of the run."""
    amount = span(value)
    return amount is not None and amount.unit is Unit.share


Span = Annotated[
    int | float | str, Notation("steps (2000), tokens (10B) or a share of the run (0.02), none of them negative", span)
]
Length = Annotated[int | float | str, Notation("tokens (10B, 1e9) or epochs of the text ('3 epochs')", length)]


class Shape(Enum):
    """How a value reaches a phase's target: at the phase's start, or by its end on a line or half a cosine."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class PhaseConfig:
    """A part of the run, and what changes at its start; null: as before. docs/schedules.md."""

    until: Span | None = None
    """Its end, counted from the start of the run: steps, tokens, or a share of the run; null, only in the last phase:
    the end of the run."""
    global_batch_size: int | None = None
    """Sequences in one step; with batch_ramp, from the phase's end on."""
    batch_ramp: bool = False
    """The batch grows during the phase, in equal parts, by its previous size; false: at once."""
    microbatch_size: int | None = None
    """Sequences in one forward and backward pass."""
    sequence_length: int | None = None
    """Tokens in one sequence. Another length reads the text from its start, in another order."""
    lr: float | None = None
    """Learning rate, with optim.schedule=phases; the warm-up multiplies it."""
    lr_shape: Shape = Shape.constant
    """constant: lr holds from the phase's start on; linear, cosine: it is reached at the phase's end."""
    lr_until: Span | None = None
    """With lr_shape linear or cosine: the end of the move to lr, in a later phase; null: at this one's end."""
    mtp_loss_weight: float | None = None
    """As model.mtp_loss_weight."""
    router_bias_update_rate: float | None = None
    """As model.router_bias_update_rate."""
