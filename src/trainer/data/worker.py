"""A process that packs shards: `python -m trainer.data.worker`, started by `workers`.

It reads pickles from its standard input (a `Packing`, then `Work`, until the input ends) and answers each with one on
its standard output: a `Done`, or an `Excuse`; before that with numbers, which are bytes of text read. When the process
that started it is gone, its input ends and so does it, at once: the file it was writing has a temporary name that no
reader opens.
"""

from __future__ import annotations

import os
import pickle
import sys
from queue import SimpleQueue
from threading import Thread
from typing import Any


def main() -> None:
    """Work until there is none."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    orders: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read, args=(orders,), daemon=True).start()
    from precision.errors import UserError
    from trainer.data.packing import Excuse, Packer

    def answer_with(answer: Any) -> None:
        pickle.dump(answer, answers)
        answers.flush()

    packer = None
    while True:
        order = orders.get()
        try:
            if packer is None:
                packer = Packer(order, answer_with)
                continue
            answer: Any = packer.pack(order)
        except UserError as error:
            answer = Excuse(str(error))
        except OSError as error:
            answer = Excuse(error.strerror or str(error), error.errno or 0)
        answer_with(answer)


def _read(orders: SimpleQueue[Any]) -> None:
    source = sys.stdin.buffer
    while True:
        try:
            orders.put(pickle.load(source))
        except (EOFError, pickle.UnpicklingError):
            os._exit(0)


if __name__ == "__main__":
    main()
