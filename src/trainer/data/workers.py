"""Workers: shards packed by several processes at once, each by the next free one.

The order in which they finish does not matter: a shard's number is its place. With one worker, or one shard, this
process does the work itself, and the tokenizer uses all cores for each batch of documents. Otherwise each worker
process takes a shard from reading to writing on one core, and starts when there is a first one for it. Only data that
cannot be read from the middle is read by this process.

Workers are new processes, not forks: the process that starts them may hold a GPU, threads and locks.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from types import ModuleType

from precision.errors import RunError
from trainer.data.packing import PackedShard, Packer, Packing, PackJob

_packer: Packer
"""Of a worker process."""


def pack_all(
    packing: Packing, work: Iterator[PackJob], num_workers: int, on_read: Callable[[int], None]
) -> list[PackedShard]:
    """Pack every shard of `work`, which is read as needed. on_read: called with bytes of text that have been read.

    Raises UserError for faulty data, OSError for the system, RunError for a worker that cannot start or was killed. The
    first of them ends all workers.
    """
    first = list(itertools.islice(work, 2 if num_workers > 1 else 1))
    rest = itertools.chain(first, work)
    if len(first) < 2:
        packer = Packer(packing, on_read)
        return [packer.pack(shard) for shard in rest]
    packed: list[PackedShard] = []
    spawn = multiprocessing.get_context("spawn")
    of_workers, of_this_process = spawn.Pipe(duplex=False)
    with ProcessPoolExecutor(num_workers, spawn, _start, (packing, of_workers)) as pool:
        try:
            busy = {_submit(pool, shard) for shard in itertools.islice(rest, num_workers)}
            while busy:
                ended, busy = wait(busy, return_when=FIRST_COMPLETED)
                for each in ended:
                    packed.append(each.result())
                    on_read(packed[-1].num_bytes)
                busy |= {_submit(pool, shard) for shard in itertools.islice(rest, len(ended))}
        except BaseException as error:
            of_this_process.close()  # ends the workers
            if isinstance(error, BrokenProcessPool):
                raise RunError(
                    "data.workers: a process that prepares a shard was killed (out of memory? set fewer, or a smaller "
                    "data.shard_mb); finished shards are kept; start again to continue"
                ) from None
            raise
    return packed


def _submit(pool: ProcessPoolExecutor, shard: PackJob) -> Future[PackedShard]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a worker inherits it: this process decides
    # a worker runs the main module first: a script that calls `prepare` at its top would wait there for its own lock
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        return pool.submit(_pack, shard)
    except OSError as error:
        why = f"a process cannot be started ({error.strerror})"
        raise RunError(f"data.workers: {why}: set fewer, or raise the limits of processes and files") from error
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(packing: Packing, of_workers: Connection) -> None:
    """Make this process a worker."""
    global _packer
    os.environ["RAYON_NUM_THREADS"] = "1"  # one core each: threads of several processes would compete
    Thread(target=_end_with, args=(of_workers,), daemon=True).start()
    _packer = Packer(packing, lambda _: None)


def _end_with(of_workers: Connection) -> None:
    """End this process when the other end of the pipe is closed: by the first process, or by its death. The file in
    progress has a temporary name that no reader opens."""
    with suppress(EOFError, OSError):
        of_workers.recv()
    os._exit(1)


def _pack(shard: PackJob) -> PackedShard:
    return _packer.pack(shard)
