"""Reading ahead: a thread that makes the next batches while the device computes, and what brings them there.

A step must not wait for a disk, so a batch is read, widened to int64 and on its way to the GPU before it is asked for:

    thread    read windows -> pinned host memory -> copy to the GPU on a stream of its own -> event
    trainer   the stream that computes waits for the event (not the host)

The thread only runs what it is given, in order. It knows no cursor: results that are no longer wanted, after a rewind,
say, are dropped, and no state has to be restored. An error in it is raised where the result is asked for, and only
then. It is a daemon: a disk that never answers does not keep the process from ending.
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
READ_AHEAD = 2  # batches: one on the way while the other waits, so that a slow one is made up for
PATIENCE = 5.0  # seconds that an end waits for what is being read


class Reader:
    """Runs functions one after the other in a thread, which begins with the first one."""

    def __init__(self) -> None:
        self._jobs: Jobs = SimpleQueue()
        self._thread: Thread | None = None
        self._end = weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have it run. What it returns or raises comes out of the future's `result`."""
        future: Future[T] = Future()
        if self._thread is None:
            self._thread = Thread(target=_work, args=(self._jobs,), name="data", daemon=True)
            self._thread.start()
        self._jobs.put((future, function))
        return future

    def close(self) -> None:
        """End the thread, after what it is doing; whatever was not begun should have been cancelled."""
        self._end()
        if self._thread is not None:
            self._thread.join(PATIENCE)


def _work(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, function = job
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:  # whatever it is, it is for the one who asked
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del job, future, function  # the next one may be long in coming


class Delivery:
    """Brings tokens to a device. On a GPU neither the host nor what the GPU computes waits for the copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, tokens: Tensor) -> Callable[[], Tensor]:
        """Begin. The result is to be called by the thread whose stream will use the tokens; it gives them, on the
        device."""
        if self._stream is None:
            return lambda: tokens
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            there = tokens.pin_memory().to(self._device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)

        def receive() -> Tensor:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrived)
            there.record_stream(stream)  # its memory is not used again before what the stream does with it
            return there

        return receive
