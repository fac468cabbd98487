"""SIGINT and SIGTERM: finish the step, save, leave."""

import signal
from types import FrameType


class StopSignals:
    """While active, the first SIGINT or SIGTERM is noted in `received`; a second one acts as it always did."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, self._before[number])  # type: ignore[arg-type]
