"""`logs/rankN.log`: everything that rank N printed, with its time.

While it is open, Python's logging and the warnings of every library go there as well. Those from WARNING up also appear
on the screen, in one line each, without breaking the progress bar.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from trainer.files import open_own, refuse_link

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGES = ("trainer", "models", "precision")


class LogFile:
    """Handlers on the root logger, and on torch's, until `close()`. `show(text)` displays a warning on the screen."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        refuse_link(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _File(path, show)
        file.setFormatter(logging.Formatter(_FORMAT))
        root, torch = logging.getLogger(), logging.getLogger("torch")
        self._attached = [(root, file), (root, _ScreenHandler(show))]
        if not torch.propagate:  # torch prints its warnings itself; copy them to the file
            self._attached.append((torch, file))
        for logger, handler in self._attached:
            logger.addHandler(handler)
        for package in _PACKAGES:
            logging.getLogger(package).setLevel(logging.INFO)
        logging.captureWarnings(True)

    def write(self, text: str, error: BaseException | None = None) -> None:
        """Write a line only to the file, with the traceback of `error` if given."""
        logging.getLogger("trainer").info(text, exc_info=error)

    def close(self) -> None:
        logging.captureWarnings(False)
        for logger, handler in self._attached:
            logger.removeHandler(handler)
            with suppress(OSError):  # a full disk has been reported; what ends the run comes first
                handler.close()


class _File(logging.FileHandler):
    """A file handler that stays quiet when its disk is full."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        super().__init__(path)
        self._show = show
        self._failed = False

    def _open(self) -> TextIO:
        return os.fdopen(open_own(Path(self.baseFilename)), "a", encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        """Report once that the file cannot be written, instead of a traceback for every line."""
        if not self._failed:
            self._failed = True
            self._show(f"{self.baseFilename} cannot be written; lines are being lost")


class _ScreenHandler(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage().partition("\n")[0])
