"""Where the ranks of a test meet."""

import random
import socket


def free_port() -> int:
    """A free port below those that the kernel gives to connections (from 32,768 on Linux): of the hundreds that other
    tests open, none takes it before rank 0 listens there."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
