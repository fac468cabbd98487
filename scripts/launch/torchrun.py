"""torchrun without its error report: python scripts/launch/torchrun.py --nproc_per_node=8 train.py ...

It takes the same options. When a process ends with an error, torchrun adds forty lines: its own traceback, and a box
that names the process. The process has already reported the error in one line; only that line, and its exit code,
remain here. torchrun's report is printed only if no process could report (all were killed, or one died while it
started).
"""

import logging
import sys
from signal import SIGTERM

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

ENDED_BY_TORCHRUN = -SIGTERM, 128 + SIGTERM
"""Exit codes without information on the cause: torchrun ends the other processes this way."""


def main() -> int:
    """Return the exit code of the process that failed first; 128 + n if signal n ended it, or torchrun itself."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        torchrun()
    except ChildFailedError as failed:
        reported = [failure for failure in failed.failures.values() if isinstance(failure.message, dict)]
        unknown: list[int] = []
        named = " ".join(str(failure.message) for failure in reported)
        for rank, failure in failed.failures.items():
            known = failure in reported or f"process {failure.pid})" in named.replace(") has died,", " ")
            if not known and failure.exitcode not in ENDED_BY_TORCHRUN:
                unknown.append(failure.exitcode)
                how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
                print(f"octet: error: rank {rank} (process {failure.pid}) ended {how}", file=sys.stderr)
        codes = [failure.exitcode for failure in reported or failed.failures.values()]
        codes = [code for code in codes if code not in ENDED_BY_TORCHRUN] or unknown or codes
        return max(code if code > 0 else 128 - code for code in codes)
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
