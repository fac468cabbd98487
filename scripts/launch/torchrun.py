"""torchrun, with the same options, that ends quietly: python scripts/launch/torchrun.py --nproc_per_node=8 train.py ...

When a process ends with an error, torchrun adds forty lines: its own traceback, and a box that names the process.
The process has reported that itself, in one line; that line, and its exit code, are all that is left here. Only where a
process could not say anything (all were killed, or one died while it started) torchrun's knowledge is printed.
"""

import logging
import sys
from signal import SIGTERM

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

ENDED_BY_TORCHRUN = -SIGTERM, 128 + SIGTERM
"""Exit codes that say nothing of what went wrong: torchrun ends the others so."""


def main() -> int:
    """Exit code of the process that failed first, 128 + n for one that signal n ended, or for torchrun itself."""
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
