"""What benches begin with: the config of a run, checks of options, and processes that torchrun starts."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from precision.errors import RunError, UserError
from trainer.launch.composition import compose

if TYPE_CHECKING:
    from trainer.config import Config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ERRORS = r"^(?:octet: |(?:\[rank\d\]: *)?[\w.]*(?:Error|Exception): ).*"


def composed(words: Sequence[str]) -> "Config":
    """Return the config that train.py makes of these arguments."""
    from trainer.config import load

    sys.argv[1:] = words
    (job,) = compose(CONFIGS)
    return load(job.tree)


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise UserError unless these options are 1 or more."""
    for name in names:
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: set 1 or more")


def torchrun(count: int, script: Path, words: Sequence[str], result: Path, environment: dict[str, str]) -> Any:
    """Run a script in `count` processes; return the JSON that it writes to `result`. Raises RunError with the last
    error that they print, except the launcher's, which is about the others."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    command = [*launcher, str(script), *words]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode or not result.exists():
        said = [line for line in re.findall(ERRORS, done.stderr, re.MULTILINE) if "ChildFailedError" not in line]
        raise RunError(said[-1] if said else done.stderr[-500:])
    return json.loads(result.read_text())


def own_device() -> torch.device:
    """Return the device of this process, one of torchrun's."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the other processes, and leave them at the end; yield the device of this one."""
    device = own_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()
