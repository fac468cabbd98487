"""Errors that are not bugs: the command line prints them in one line, all others with their traceback."""

from typing import NoReturn


class UserError(ValueError):
    """The user gave something wrong, or a file of theirs is. The message names key, value and fix. Exit code 2."""


class RunError(RuntimeError):
    """The machine or another program failed. The message has the reason and what to do. Exit code 1."""


def refuse(key: str, value: object, why: str, fix: str) -> NoReturn:
    """UserError for a config value, in the form of all of them."""
    raise UserError(f"{key}={value}: {why}; {fix}")
