"""Results of the kernels' self-test on this GPU, with this torch, Triton and source.

    prove(gpu)      at the start of a run: return the cached result, or run the self-test now, about 20 seconds
    cached_proof(gpu)     return the cached result, if there is one
    refused         op: why it runs without kernels here

Where the casts are wrong, `cuda` serves nothing. Where only the GEMMs of linears or only those of experts are wrong, it
serves the others (`resolve`). Every other op falls back to its reference.

Results are cached in the user's cache folder under those four names, so the test runs once for each combination. Ranks
of a node wait for the first one. The test runs in separate processes (`precision.selftest`): a kernel that accesses
memory out of bounds leaves the GPU unusable for the process that launched it, and many kernels compile at once.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from precision.hardware import Gpu

CASTS, GEMMS, EXPERTS, ATTENTION = "casts", "linears", "experts", "attention within documents"
LOSS, OPTIMIZER, ROUTER, STATISTICS = "cross entropy", "AdamW", "choice of experts", "statistics"
MUON, PEERS, ROTARY, FP8_ATTENTION = "Muon", "tokens over shared memory", "rotary embedding", "attention in FP8"
PACKAGE = Path(__file__).parent
PROCESSES = 16  # compile at once
PATIENCE = 300.0  # seconds for all of them; minutes pass only where something hangs

refused: dict[str, str] = {}


@dataclass(frozen=True)
class Combination:
    """The versions for which a result is valid. source: a digest of the kernels and their checks."""

    gpu: str
    torch: str
    triton: str
    source: str

    @classmethod
    def here(cls, gpu: Gpu) -> "Combination":
        """Return the combination of this GPU and this process."""
        return cls(gpu.name, torch.__version__, _triton_version(), _source_digest())

    def __str__(self) -> str:
        return f"torch {self.torch}, Triton {self.triton} on {self.gpu}"


@dataclass(frozen=True)
class Proof:
    """Result of the self-test. wrong: op: how its kernels differ. unproved: why some were not checked; empty if all
    were. seconds: its duration."""

    combination: Combination
    wrong: dict[str, str] = field(default_factory=dict)
    unproved: str = ""
    seconds: float = 0.0

    @property
    def is_proved(self) -> bool:
        return not self.wrong and not self.unproved

    @property
    def record(self) -> dict[str, Any]:
        """The result as plain values, for the environment of a run."""
        return {"proved": self.is_proved, **asdict(self)}

    @property
    def line(self) -> str:
        """The result as one line, behind `kernels: `."""
        if self.wrong:
            ops = ", ".join(self.wrong)
            return f"wrong with {self.combination}, so not used for {ops} ({next(iter(self.wrong.values()))})"
        if self.unproved:
            return f"not proved with {self.combination} ({self.unproved})"
        return f"proved with {self.combination}"


def prove(gpu: Gpu, folder: Path | None = None, say: Callable[[str], object] | None = None) -> Proof:
    """Return the self-test's result, cached or new, and apply it. Waits for another process that runs the test. say:
    called with a line before a new test."""
    here = Combination.here(gpu)
    file = _file(here, folder)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=PATIENCE + 60):
            if (proof := _read(file, here)) is None:
                if say is not None:
                    say(f"checking the kernels, once with {here}: about 20 seconds")
                proof = _run(here)
                if not proof.unproved:  # an incomplete result is tried again at the next start, as on a full disk
                    with suppress(OSError):
                        file.write_text(json.dumps(asdict(proof), indent=1) + "\n")
    except OSError as error:  # FileLock's timeout is one
        proof = Proof(here, unproved=f"the self-test was not run: {error}")
    return _apply(proof)


def cached_proof(gpu: Gpu, folder: Path | None = None) -> Proof | None:
    """Return the cached result, if there is one, and apply it."""
    here = Combination.here(gpu)
    proof = _read(_file(here, folder), here)
    return None if proof is None else _apply(proof)


def latest() -> Proof | None:
    """Return the result in effect; None if nothing has been proved or recalled, as on a CPU."""
    return _latest


_latest: Proof | None = None


def _apply(proof: Proof) -> Proof:
    global _latest
    _latest = proof
    refused.clear()
    refused.update({op: f"{why} with {proof.combination}" for op, why in proof.wrong.items()})
    return proof


def _file(here: Combination, folder: Path | None) -> Path:
    name = hashlib.sha256(json.dumps(asdict(here)).encode()).hexdigest()[:16]
    return (folder or _cache_folder()) / f"{re.sub(r'[^a-z0-9]+', '_', here.gpu.lower())}_{name}.json"


def _cache_folder() -> Path:
    """Return the user's cache folder; without a writable home, a folder of the user's in the temporary directory."""
    home = os.environ.get("HOME", "")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or (Path(home) / ".cache" if home else ""))
    present = [path for path in (cache, *cache.parents) if os.path.exists(path)]  # Path.exists may raise
    if cache.is_absolute() and os.access(present[0], os.W_OK | os.X_OK):
        return cache / "octet" / "proofs"
    return Path(tempfile.gettempdir()) / f"octet-{os.getuid()}" / "proofs"


def _read(file: Path, here: Combination) -> Proof | None:
    try:
        kept = json.loads(file.read_text())
        proof = Proof(Combination(**kept.pop("combination")), **kept)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # missing, or not in the format written
        return None
    return proof if proof.combination == here else None


def _run(here: Combination) -> Proof:
    """Run the self-test in processes of its own."""
    began, count = time.monotonic(), max(1, min(PROCESSES, os.cpu_count() or 1))
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "precision.selftest", f"--processes={count}", f"--patience={PATIENCE}"]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if ended.returncode:
        result: dict[str, Any] = {"unproved": stopped(ended.returncode, ended.stderr)}
    else:
        result = json.loads(ended.stdout.splitlines()[-1])
    return Proof(here, **result, seconds=round(time.monotonic() - began, 1))


def stopped(code: int, errors: str) -> str:
    """Return why a process of the self-test proved nothing, by its exit code and its standard error."""
    said = " ".join(errors.split())[-200:]
    return f"the self-test stopped early: {describe(code)}{': ' + said if said else ''}"


def describe(code: int) -> str:
    """Return how a process ended."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown" if find_spec("triton") else "none"


def _source_digest() -> str:
    """Return a digest of the kernels, their checks, and the casts and scales that both use."""
    files = [*(PACKAGE / "kernels").glob("*.py"), *(PACKAGE / "selftest").glob("*.py")]
    files += [PACKAGE / "formats.py", PACKAGE / "scaling.py"]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
