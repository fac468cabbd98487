"""SIGINT, SIGTERM and SIGHUP before training: they end the process by an exception. In training see `signals`."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP outside training, which would save first."""


def stopping() -> list[signal.Signals]:
    """Return the signals that ask a process to stop: Ctrl-C, a scheduler's, and SIGHUP unless nohup ignores it."""
    hears = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hears else [])]


class Interrupts:
    """Handles the signals of a process. stop_signal: number of the one that asked it to stop before it trained; 0:
    none."""

    def __init__(self) -> None:
        self.stop_signal = 0

    def listen(self) -> dict[signal.Signals, Any]:
        """Make stop signals raise, and record them. Returns the previous handlers."""
        return {number: signal.signal(number, self._interrupt) for number in stopping()}

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Import libraries that a signal must not interrupt; the first one inside is raised at the end. Within torch's
        C++ it would abort the process, and code that tries an import may swallow it and leave half a module."""
        before = {number: signal.signal(number, self._record) for number in stopping()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.stop_signal:
            self._interrupt(self.stop_signal, None)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal:
            self._interrupt(number, frame)
        self.stop_signal = number

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        """Raise, and record the signal: a library on the stack may swallow the exception."""
        self.stop_signal = number
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated
