"""Writes `dashboard.html` in the run folder when a run ends, for any reason.

The page must not endanger the run: an error is reported in one line, and the wait for a file system that does not
respond is limited.
"""

import logging
import shlex
import threading
from pathlib import Path

from trainer.files import replace_file, script
from trainer.health.dashboard.page import page, payload
from trainer.health.dashboard.read import Run

NAME = "dashboard.html"
PATIENCE = 30.0
"""Seconds that the end of a run waits for the page."""
SHORT_PATIENCE = 2.5
"""Seconds if other ranks wait for the reason of the job's end."""


def write_at_end(folder: Path, ended: BaseException | str | None, patience: float = PATIENCE) -> None:
    """Write the page of the run in `folder` within `patience` seconds, or warn. ended: what ended the run."""
    what = "" if ended is None else str(ended) or type(ended).__name__
    trouble: list[str] = []

    def work() -> None:
        try:
            run = Run(folder)
            run.poll()
            replace_file(folder / NAME, page(payload([run], what)).encode(errors="replace"))
        except Exception as error:
            trouble.append(f"{type(error).__name__}: {error}")

    worker = threading.Thread(target=work, name="dashboard", daemon=True)
    worker.start()
    worker.join(patience)
    if worker.is_alive():
        trouble.append(f"not done within {patience:g} s")
    if trouble:
        again = f"python {script('scripts/dashboard.py')} {shlex.quote(str(folder))} makes it"
        logging.getLogger(__name__).warning("%s is not written (%s); %s", folder / NAME, trouble[0], again)
