"""Errors that are not bugs: the command line prints them in one line, all others with their traceback."""


class UserError(ValueError):
    """The user gave something wrong, or a file of theirs is. The message names key, value and fix. Exit code 2."""


class RunError(RuntimeError):
    """The machine or another program failed. The message has the reason and what to do. Exit code 1."""
