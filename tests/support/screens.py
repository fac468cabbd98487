"""A console whose output tests read, and the `logging` section of a run that writes to it."""

import io
import re
import time

from rich.console import Console

from trainer.config import ConsoleConfig, LoggingConfig, TensorboardConfig, WandbConfig, WandbMode


def settings(*, console: bool = True, tensorboard: bool = False, mode: WandbMode | None = None) -> LoggingConfig:
    """Of a run. mode: of W&B; None: without it."""
    return LoggingConfig(
        every=10,
        console=ConsoleConfig(console),
        tensorboard=TensorboardConfig(tensorboard),
        wandb=WandbConfig(mode is not None, "octet-tests", None, mode or WandbMode.auto),
    )


class Screen:
    """A console whose output can be read."""

    def __init__(self, terminal: bool = False, width: int = 100) -> None:
        self.console = Console(
            file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, legacy_windows=False, _environ={}
        )

    @property
    def raw(self) -> str:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue()

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)

    def shows(self, pattern: str, since: int = 0) -> None:
        """Wait until it does; rich redraws four times a second."""
        deadline = time.monotonic() + 60
        while not re.search(pattern, self.text[since:]):
            assert time.monotonic() < deadline, self.text[since:]
            time.sleep(0.02)
