"""Records a run's environment in the run folder: versions, machine, commit."""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from precision import proof


def environment() -> dict[str, Any]:
    """Return versions, machine, and the commit of this source if it is in a repository."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "kernels": (found := proof.latest()) and found.record,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "git": git_state(),
        "packages": packages(),
    }


@cache
def packages() -> dict[str, str]:
    """Return versions by name. Of a package installed twice, the one that an import finds; broken installations without
    a name are skipped."""
    found = [(each["Name"], each["Version"]) for one in distributions() if (each := one.metadata) and "Name" in each]
    return dict(sorted(dict(reversed(found)).items(), key=lambda item: item[0].lower()))


@cache
def git_state() -> dict[str, Any] | None:
    """Return the commit of this file's repository, and whether tracked files differ from it; None if there is none.

    Read once: what the process runs is what it imported."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None
