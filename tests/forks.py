"""A server of fresh processes that have imported torch already: tests start many programs, and importing is most of
what a short one does.

    stdin    {"words": [...], "folder": "...", "outputs": ["out", "err"], "environment": {...}} in a list, a line a list
    stdout   the exit codes, as a list, when all programs of the line have ended

Each program is a fork that becomes what `python WORDS` would be: its own folder, environment, arguments, outputs and
`__main__`. A file is given by its path, a module as `-m NAME`.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "torch.distributed.run", "torch._dynamo", "numpy", "hydra", "omegaconf", "rich.progress", "tokenizers",
    "trainer.cli", "trainer.trainer", "trainer.parallel.fsdp",
)  # fmt: skip


def become(words: list[str], folder: str, outputs: list[str], environment: dict[str, str]) -> int:
    """Run the program to its end. Returns its exit code."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in zip((1, 2), outputs, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for path in environment.get("PYTHONPATH", "").split(os.pathsep):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, folder)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def die_with_parent() -> None:
    """Where a test is killed, nothing of it stays behind. Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def fork(job: dict[str, Any]) -> int:
    """Start a program. Returns the process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    with contextlib.suppress(BaseException):
        die_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = become(**job)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Serve until stdin ends."""
    die_with_parent()
    sys.path[0] = str(Path(__file__).with_name("support"))
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
    for name in (*IMPORTED, *(["triton_interpreter"] if interpreted else [])):
        importlib.import_module(name)
    del sys.path[0]
    gc.freeze()
    gc.unfreeze = lambda: None  # a run would look at all that torch is, and so have it copied
    for line in sys.stdin:
        started = [fork(job) for job in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
