"""Reading ahead: a thread that prepares the next batches while the device computes, and their delivery.

A step must not wait for a disk, so a batch is read, widened to int64 and on its way to the GPU before it is requested:

    thread    read windows -> pinned host memory -> copy to the GPU on a stream of its own -> event
    trainer   the computing stream waits for the event (not the host)

The thread only runs what it is given, in order. It knows no cursor: results that are no longer wanted, after a rewind,
say, are dropped, and there is no state to restore. Its errors are raised when the result is requested, and only then.
It is a daemon: a disk that never answers does not keep the process from ending.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
READ_AHEAD = 2  # batches: one in transit while the other waits, so that one slow read does not stall
PATIENCE = 5.0  # seconds that the end of a run waits for a read in progress


class ReadThread:
    """Runs functions one after the other in a thread, which starts with the first one."""

    def __init__(self) -> None:
        self._jobs: Jobs = SimpleQueue()
        self._thread: Thread | None = None
        self._end = weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function. The future's `result` returns or raises what it does."""
        future: Future[T] = Future()
        if self._thread is None:
            self._thread = Thread(target=_work, args=(self._jobs,), name="data", daemon=True)
            self._thread.start()
        self._jobs.put((future, function))
        return future

    def close(self) -> None:
        """Stop the thread after its current function. The caller has cancelled the functions that have not begun."""
        self._end()
        if self._thread is not None:
            self._thread.join(PATIENCE)


def _work(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, function = job
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:  # any error belongs to the caller of `result`
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del job, future, function  # the next one may take long to come


class DeviceCopy:
    """Brings tokens to a device. On a GPU neither the host nor the computation waits for the copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, tokens: Tensor) -> Callable[[], Tensor]:
        """Start the copy. Call the result, in the thread that uses the tokens, to get them on the device."""
        if self._stream is None:
            return lambda: tokens
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            there = tokens.pin_memory().to(self._device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)

        def receive() -> Tensor:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrived)
            there.record_stream(stream)  # its memory is not reused before the stream has used it
            return there

        return receive
