"""Common code of the contestants of `compare.py`: the work, its tokens, and its timing."""

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

WORK = "RIVALS_WORK"
"""Environment variable: path of the file with a contestant's work."""


@dataclass(frozen=True)
class Work:
    """A shape and the work on it, the same for every contestant.

    model: fields of `models.ModelConfig`. precision: in the contestant's own words. sequences: of a GPU and step, one
    microbatch. result: file for the measurements.
    """

    model: dict[str, Any]
    precision: str
    sequences: int
    length: int
    warm_up: int
    steps: int
    rounds: int
    flops_per_token: float
    result: str

    @classmethod
    def read(cls) -> "Work":
        return cls(**json.loads(Path(os.environ[WORK]).read_text()))

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    def tokens(self, rank: int, world: int) -> torch.Tensor:
        """Return [sequences, length + 1] of one rank, on the host: its rows of a batch that no framework draws."""
        size = world * self.sequences, self.length + 1
        batch = torch.randint(self.model["vocab_size"], size, generator=torch.Generator().manual_seed(7))
        return batch[rank * self.sequences : (rank + 1) * self.sequences]

    def measure(self, step: Callable[[], torch.Tensor], barrier: Callable[[], object], rank: int) -> None:
        """Run and time steps, each of all ranks; rank 0 writes the result. step: a whole training step, returns its
        loss on the device."""
        cuda = torch.cuda.is_available()
        losses = [step() for _ in range(self.warm_up)]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(self.rounds):
            _wait(barrier)
            began = time.perf_counter()
            losses += [step() for _ in range(self.steps)]
            _wait(barrier)  # wait for the slowest rank
            seconds.append((time.perf_counter() - began) / self.steps)
        if rank == 0:
            found = {
                "seconds": statistics.median(seconds),
                "rounds": seconds,
                "peak": torch.cuda.max_memory_allocated() if cuda else float("nan"),
                "losses": [float(losses[0]), float(losses[-1])],
                "torch": torch.__version__,
            }
            Path(self.result).write_text(json.dumps(found))


def _wait(barrier: Callable[[], object]) -> None:
    """Wait for this GPU, and for the other ranks'."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    barrier()
