"""Workers: shards packed by several processes at once, each by the next free one.

The order in which they finish does not matter: a shard's number is its place. With one worker, or one shard, this
process does the work itself, and the tokenizer uses all cores for each batch of documents. Otherwise each worker
process takes a shard from reading to writing on one core, and starts when there is a first one for it. Only data that
cannot be read from the middle is read by this process.

Workers are new processes, not forks: the process that starts them may hold a GPU, threads and locks.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Lock

from precision.errors import RunError, UserError
from trainer.data.packing import PackedShard, Packer, PackFailure, Packing, PackJob


def pack_all(packing: Packing, work: Iterator[PackJob], num_workers: int, on_read: Callable[[int], None]) -> None:
    """Pack every shard of `work`, which is read as needed. on_read: called with bytes of text that have been read.

    Raises UserError for faulty data, OSError for the system, RunError for a worker that was killed. The first of them
    ends all workers.
    """
    first = list(itertools.islice(work, 2 if num_workers > 1 else 1))
    rest = itertools.chain(first, work)
    if len(first) < 2:
        packer = Packer(packing, on_read)
        for shard in rest:
            packer.pack(shard)
        return

    def counted(num_bytes: int) -> None:
        with reading:
            on_read(num_bytes)

    reading = Lock()
    stopped = False
    workers: list[_Worker] = []

    def keep_busy() -> None:
        worker = None
        while True:
            with reading:
                shard = None if stopped else next(rest, None)
                if shard is None:
                    return
                if worker is None:
                    worker = _Worker(packing)
                    workers.append(worker)
            worker.pack(shard, counted)

    pool = ThreadPoolExecutor(num_workers)
    try:
        jobs = [pool.submit(keep_busy) for _ in range(num_workers)]
        ended, _ = wait(jobs, return_when=FIRST_EXCEPTION)
        for job in ended:
            job.result()
    finally:
        with reading:  # no worker starts after this
            stopped = True
        for worker in workers:
            worker.end()
        pool.shutdown()


class _Worker:
    """A worker process."""

    def __init__(self, packing: Packing) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        # one core each: threads of several processes would compete
        environment = os.environ | {"PYTHONPATH": paths, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "trainer.data.worker"]
        # a session of its own: Ctrl-C goes only to the first process, which decides
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        except OSError as error:
            why = f"a process cannot be started ({error.strerror})"
            raise RunError(f"data.workers: {why}: set fewer, or raise the limits of processes and files") from error
        self._send(packing)

    def _send(self, what: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(what, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def pack(self, shard: PackJob, on_read: Callable[[int], None]) -> PackedShard:
        assert self._process.stdout is not None
        try:
            self._send(shard)
            while isinstance(answer := pickle.load(self._process.stdout), int):
                on_read(answer)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
            raise RunError(
                f"data.workers: a process that prepares shard {shard.number} {how} (out of memory? set fewer, or a "
                "smaller data.shard_mb); finished shards are kept; start again to continue"
            ) from None
        if isinstance(answer, PackFailure):
            if answer.errno is None:
                raise UserError(answer.message)
            raise OSError(answer.errno, answer.message)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                assert pipe is not None
                pipe.close()
            except OSError:  # something was still in transit
                pass
