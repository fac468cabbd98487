"""torchrun without its error report: python scripts/launch/torchrun.py --nproc_per_node=8 train.py ...

It takes the same options. When a process ends with an error, torchrun adds forty lines: its own traceback, and a box
that names the process. The process has already reported the error in one line; only that line, and its exit code,
remain here. torchrun's report is printed only if no process could report (all were killed, or one died while it
started).

All nodes count restarts alike (`Agent`).
"""

import logging
import sys
from signal import SIGTERM
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api
from torch.distributed.run import main as torchrun

ENDED_BY_TORCHRUN = -SIGTERM, 128 + SIGTERM
"""Exit codes without information on the cause: torchrun ends the other processes this way."""


class Agent(LocalElasticAgent):
    """torchrun's part on a node. torch's own counts a restart only where a process has failed, not where others still
    ran: ranks with different numbers of the attempt never meet."""

    _attempt = -1

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start this node's processes, once all nodes know the number of the attempt."""
        store = worker_group.store
        assert store is not None
        store.set(f"octet/attempt/{worker_group.group_rank}", str(self._attempt + 1))
        keys = [f"octet/attempt/{node}" for node in range(worker_group.group_world_size or 1)]
        self._attempt = max(map(int, store.multi_get(keys)))
        self._remaining_restarts = worker_group.spec.max_restarts - self._attempt
        return super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]


def main() -> int:
    """Return the exit code of the process that failed first; 128 + n if signal n ended it, or torchrun itself."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    api.LocalElasticAgent = Agent  # pyright: ignore[reportPrivateImportUsage]
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
