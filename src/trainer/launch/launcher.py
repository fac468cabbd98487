"""The environment variables of a launcher: torchrun, or any launcher that sets the same ones.

    RANK  LOCAL_RANK  WORLD_SIZE  LOCAL_WORLD_SIZE             this process and the number of processes, and on its node
    MASTER_ADDR  MASTER_PORT                                   address of the job's store
    TORCHELASTIC_RESTART_COUNT  TORCHELASTIC_MAX_RESTARTS      number of restarts by torchrun, and its limit

This module does not import torch, so that a mistake on the command line is found before anything large is loaded.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from precision.errors import UserError

MOST = 999_999


@dataclass(frozen=True)
class Launch:
    """This process among all of the job's; the only one (`size` 1) without a launcher."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    address: str = ""
    """Host of the job's store; empty without a launcher."""
    port: int = 0
    attempt: int = 0
    """Number of times that torchrun has restarted the processes of this job."""
    max_restarts: int = 0
    under_torchrun: bool = False
    agent_store: bool = False
    """Whether torchrun serves the store, so that it outlives rank 0."""
    error_file: str = ""
    """File from which torchrun reads the reason of this process's failure; empty without torchrun."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Read the environment. Raises UserError, one line, for incompatible variables."""
        if "WORLD_SIZE" not in environment:
            return cls()
        number = partial(_number, environment)
        size = number("WORLD_SIZE", 1, MOST)
        alone = 0 if size == 1 else None
        if size > 1 and not environment.get("MASTER_ADDR"):
            raise UserError(f"WORLD_SIZE={size}: MASTER_ADDR is not set; start with torchrun, which sets it")
        local_size = number("LOCAL_WORLD_SIZE", 1, size, "WORLD_SIZE=", default=1)
        return cls(
            rank=number("RANK", 0, size - 1, "WORLD_SIZE-1=", default=alone),
            local_rank=number("LOCAL_RANK", 0, local_size - 1, "LOCAL_WORLD_SIZE-1=", default=alone),
            size=size,
            local_size=local_size,
            address=environment.get("MASTER_ADDR", ""),
            port=number("MASTER_PORT", min(size - 1, 1), 65535, default=alone),
            attempt=number("TORCHELASTIC_RESTART_COUNT", 0, MOST, default=0),
            max_restarts=number("TORCHELASTIC_MAX_RESTARTS", 0, MOST, default=0),
            under_torchrun="TORCHELASTIC_RUN_ID" in environment,
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            error_file=environment.get("TORCHELASTIC_ERROR_FILE", ""),
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def write_error_file(self, message: str) -> None:
        """Write the reason for torchrun's own report of failures, which would otherwise show none."""
        if self.error_file:
            extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
            with contextlib.suppress(OSError):
                Path(self.error_file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _number(
    environment: Mapping[str, str], name: str, least: int, most: int, label: str = "", default: int | None = None
) -> int:
    """Return a variable's value, from `least` to `most`. label: what `most` is, for the message."""
    text = environment.get(name, "" if default is None else str(default))
    if not text and name != "WORLD_SIZE":
        size = environment["WORLD_SIZE"]
        raise UserError(f"{name}: not set, where WORLD_SIZE={size} is; start with torchrun, or unset WORLD_SIZE")
    if not text.isdigit() or not least <= int(text) <= most:
        what = f"must be a number from {least} to {label}{most}"
        raise UserError(f"{name}={text}: {what}; start with torchrun, which sets it")
    return int(text)
