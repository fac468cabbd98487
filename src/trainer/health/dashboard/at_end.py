"""`dashboard.html` in the run folder, written when a run ends, however it ends.

A page about the run is never worth the run: whatever goes wrong here is told in one line, and a file system that does
not answer is waited for a while and no longer.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from trainer.health.dashboard.page import page, payload, write
from trainer.health.dashboard.read import Run

NAME = "dashboard.html"
PATIENCE = 30.0
"""Seconds that the end of a run waits for its page."""


def write_at_end(folder: Path, error: BaseException | None, warn: Callable[[str], None]) -> None:
    """Write the page of the run in `folder`. error: what ended it. warn: told in one line if there will be no page."""
    ended = "" if error is None else str(error) or type(error).__name__
    trouble: list[BaseException] = []

    def work() -> None:
        try:
            run = Run(folder)
            run.poll()
            write(folder / NAME, page(payload([run], ended)))
        except Exception as problem:
            trouble.append(problem)

    worker = threading.Thread(target=work, name="dashboard", daemon=True)
    worker.start()
    worker.join(PATIENCE)
    if worker.is_alive() or trouble:
        why = f"{type(trouble[0]).__name__}: {trouble[0]}" if trouble else f"not done after {PATIENCE:.0f} s"
        warn(f"{NAME} is not written ({why}); python scripts/dashboard.py {folder} makes it")
