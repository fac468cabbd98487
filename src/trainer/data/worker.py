"""A process that packs shards: `python -m trainer.data.worker`, started by `workers`.

It reads pickles from its standard input (a `Packing`, then `PackJob`, until the input ends) and answers each on its
standard output: numbers, the bytes of text read, then a `PackedShard` or a `PackFailure`. If the process that started
it dies, its input ends and it exits at once: the file in progress has a temporary name that no reader opens.
"""

from __future__ import annotations

import os
import pickle
import sys
from queue import SimpleQueue
from threading import Thread
from typing import Any


def main() -> None:
    """Pack shards until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    orders: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read, args=(orders,), daemon=True).start()
    from precision.errors import UserError
    from trainer.data.packing import Packer, PackFailure

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
            answer = PackFailure(str(error))
        except OSError as error:
            answer = PackFailure(error.strerror or str(error), error.errno or 0)
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
