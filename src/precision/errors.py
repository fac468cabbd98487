"""Errors that are not bugs: the command line prints them in one line, and all others with their traceback. And the
words of messages."""

from collections.abc import Sequence
from typing import NoReturn


class UserError(ValueError):
    """A wrong setting or file of the user. The message names key, value and fix. Exit code 2."""


class RunError(RuntimeError):
    """A failure of the machine or of another program. The message gives the reason and the fix. Exit code 1."""


def refuse(key: str, value: object, why: str, fix: str) -> NoReturn:
    """Raise a UserError for a config value, in the common form."""
    raise UserError(f"{key}={value}: {why}; {fix}")


def counted(count: int, noun: str) -> str:
    """Return `1 step`, `2,000 steps`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(items: Sequence[object], most: int) -> str:
    """Return the first items and the number of the others: `a, b and 3 more`."""
    shown = ", ".join(map(str, items[:most]))
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")
