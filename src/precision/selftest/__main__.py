"""Runs the self-test on a GPU, for `precision.proof`:  python -m precision.selftest [--processes 8]

All imports come first, in one process, which CUDA never starts in. It forks the others, and each takes the next check
until none is left. Writes one line of JSON: `wrong`, op: how its kernels differ, and `unproved`, why some checks were
not run. With --verbose each check has a line before, with its duration.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from precision import kernels
from precision.proof import describe, stopped
from precision.selftest.checks import CHECKS, Check
from precision.selftest.twins import Mismatch


def main() -> int:
    """Run the checks and write the result; return exit code 0, whatever it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1, help="that compile at once (default: 1)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for all of them (default: 300)")
    parser.add_argument("--verbose", action="store_true", help="write a line for each check, too")
    options = parser.parse_args()
    kernels.import_all()
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # as the first call of an operator does
    fork, began = multiprocessing.get_context("fork"), time.monotonic()
    wrong, unproved = {}, ""
    numbers, entry = os.pipe()
    os.write(entry, bytes(range(len(CHECKS))))
    os.close(entry)
    untaken = (CHECKS[number[0]] for number in iter(partial(os.read, numbers, 1), b""))
    with tempfile.TemporaryDirectory() as room:
        files = [Path(room) / str(i) for i in range(options.processes)]
        running = [fork.Process(target=_work, args=(untaken, file)) for file in files]
        for process in running:
            process.start()
        for process, file in zip(running, files, strict=True):
            process.join(max(0.1, began + options.patience - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            text = _text(file)
            if options.verbose:
                print(text, end="")
            failures, missing = read_report(text, process.exitcode or 0, _text(file.with_suffix(".err")))
            wrong |= failures
            unproved = unproved or missing
    if wrong:  # checks that no process is left to run
        for check in untaken:
            if check.is_for(torch.device("cuda", 0)):
                wrong.setdefault(check.op, f"{check.name} was not run: {unproved}")
    print(json.dumps({"wrong": wrong, "unproved": unproved}))
    return 0


def _work(checks: Iterator[Check], file: Path) -> None:
    """Run checks until one leaves the GPU unusable; write to `file` and what goes wrong beside it."""
    sys.stdout = file.open("w")
    os.dup2(os.open(file.with_suffix(".err"), os.O_WRONLY | os.O_CREAT), 2)
    device = torch.device("cuda", 0)
    torch.backends.cuda.matmul.allow_tf32 = False  # the references' own products
    usable = all(run(check, device) for check in checks if check.is_for(device))
    sys.exit(0 if usable else 3)


def run(check: Check, device: torch.device) -> bool:
    """Run one check; return whether the GPU is still usable: a kernel that raises may have left it unusable."""
    head = {"op": check.op, "check": check.name}
    print(json.dumps(head), flush=True)
    began, outcome, usable = time.perf_counter(), {"failure": None}, True
    try:
        check.run(device)
    except Mismatch as mismatch:
        outcome = {"failure": str(mismatch)}
    except Exception as error:  # from Triton's compiler or the driver
        said, usable = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", False
        # the driver's error is not a torch.OutOfMemoryError; in compute mode EXCLUSIVE_PROCESS a GPU is busy for others
        full = isinstance(error, torch.OutOfMemoryError)
        unproved = full or any(words in said for words in ("out of memory", "busy or unavailable"))
        outcome = {"unproved": said} if unproved else {"failure": f"{check.name} raises {said}"}
    print(json.dumps({**head, **outcome, "seconds": round(time.perf_counter() - began, 2)}), flush=True)
    return usable


def read_report(text: str, code: int, errors: str) -> tuple[dict[str, str], str]:
    """Return the failures of a process, op: how its kernels differ; and why it did not finish, or an empty
    string.

    text: one JSON line before each check, with its op, and one after it, with its failure, or with the reason that it
    is unproved (the GPU is full or taken). A check in which the process died has failed. Later checks, and those of a
    process that began none, were not run.
    """
    lines = [json.loads(line) for line in text.splitlines()]
    wrong = {line["op"]: line["failure"] for line in reversed(lines) if line.get("failure")}
    last = lines[-1] if lines else {}
    if code == 0:
        return wrong, ""
    if "unproved" in last:
        return wrong, f"{last['check']} stopped the self-test: {last['unproved']}"
    if "failure" in last or not lines:
        return wrong, stopped(code, errors)
    wrong[last["op"]] = f"{last['check']} ended the process: {describe(code)}"
    return wrong, "the self-test stopped early"


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
