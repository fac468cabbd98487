"""Where the ranks of a test meet."""

import os
import random
import socket


def free_port() -> int:
    """A free port below those that the kernel gives to connections (from 32,768 on Linux): of the hundreds that other
    tests open, none takes it before rank 0 listens there. Each worker of this test run has ports of its own: two that
    drew the same one would be ranks of one job, and wait for ever."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.SystemRandom().randrange(10_000 + worker, 30_000, workers)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
