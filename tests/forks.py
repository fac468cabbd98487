"""A server of fresh processes that have imported torch already: tests start many programs, and importing is most of
what a short one does.

    stdin                                               stdout
    {"start": {"words": [...], "folder": "...",         its process id
               "outputs": ["out", "err"],
               "environment": {...}}}
    {"codes": [PID, ...]}                               the exit code of each, null while it runs; reported once

Each program is a fork that becomes what `python WORDS` would be: its own folder, environment, arguments, outputs,
signals and `__main__`. A file is given by its path, a module as `-m NAME`, code as `-c CODE`. What such a program
starts with Python, as torchrun does its ranks, is a fork of it in turn.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# Python 3.12 warns where other threads run; here they are a program's own, which does what fork and exec would
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

IMPORTED = (
    "torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "torch.distributed.run", "torch._dynamo", "numpy", "hydra", "omegaconf", "rich.progress", "tokenizers",
    "trainer.launch.composition", "trainer.launch.agreement", "trainer.trainer", "trainer.run.own_settings",
    "trainer.parallel.fsdp", "trainer.parallel.dispatch", "trainer.step.sharded_microbatch",
    "trainer.step.pipelined_step", "torch.profiler._cupti_monitor", "pytest", "composed",
)  # fmt: skip


class Fresh:
    """What a process has that imported all this and did nothing else."""

    path: list[str]
    levels: dict[str, int]


def read_configs() -> None:
    """Have forks find the files of configs/, and Hydra's own, read; see `yaml_once`."""
    configs = Path(__file__).parents[1] / "configs"
    for path in configs.rglob("*.yaml"):
        importlib.import_module("omegaconf").OmegaConf.load(path)
    sys.argv[1:] = ["+recipe=fp8_delayed"]
    importlib.import_module("trainer.launch.composition").compose(configs)
    texts = "a=b", "+a=b_c", "a.b=1", "a.b=-1e-5", "a.b=true", "a.b=null", "a.b=/a-b/c.d_1", "a.b=[1,2]", "a.b={c:d}"
    for text in texts:  # Hydra's parser is slow at the first text of a kind
        importlib.import_module("composed").parse(text)


def become(words: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run the program to its end. Returns its exit code."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()  # what a signal ends says where
    sys.path[:] = Fresh.path
    for name, level in Fresh.levels.items():
        logging.getLogger(name).setLevel(level)
    for path in environment.get("PYTHONPATH", "").split(os.pathsep):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    if words[0] == "-u":
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
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


def live(prepare: Callable[[], None], words: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """What a fork does: it forgets the process that it was, becomes the program, and ends."""
    code = 1
    with contextlib.suppress(BaseException):
        gc.freeze()  # what the parent had is not to be closed or joined here
        atexit._clear()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        prepare()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        code = become(words, folder, environment)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class Popen(subprocess.Popen):
    """Python's programs as forks, others as they are."""

    _names = [*inspect.signature(subprocess.Popen._execute_child).parameters][2:]  # type: ignore[attr-defined]

    def _execute_child(self, args: Any, *others: Any) -> None:
        given = dict(zip(self._names, others, strict=True))
        words = [args] if isinstance(args, str) else [os.fspath(word) for word in args]
        runs = words[0] == sys.executable and not given["pass_fds"] and not given["preexec_fn"]
        if not runs:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return

        def prepare() -> None:
            for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
                if given[name] != -1:
                    os.dup2(given[name], number)
            if given["start_new_session"]:
                os.setsid()

        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            live(prepare, words[1:], given["cwd"] or os.getcwd(), dict(given["env"] or os.environ))
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]


def die_with_parent() -> None:
    """Where a test is killed, nothing of it stays behind. Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def start(words: list[str], folder: str, outputs: list[str], environment: dict[str, str]) -> int:
    """Start a program. Returns the process id."""

    def prepare() -> None:
        die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in zip((1, 2), outputs, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)

    return os.fork() or live(prepare, words, folder, environment)


def code_of(process: int) -> int | None:
    """Its exit code, -n where signal n ended it; None while it runs."""
    ended, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    """Serve until stdin ends."""
    die_with_parent()
    sys.path[0] = str(Path(__file__).with_name("support"))
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
    subprocess.Popen = Popen  # type: ignore[misc]  # before torchrun's modules take it by name
    for name in ("yaml_once", *IMPORTED, *(["triton_interpreter"] if interpreted else [])):
        importlib.import_module(name)
    environment = importlib.import_module("trainer.run.environment")
    for read_once in (environment.packages, environment.git_state):  # no GPU is asked: forks could not use one
        read_once()
    read_configs()
    del sys.path[0]
    Fresh.path = [*sys.path]
    loggers = logging.root.manager.loggerDict
    Fresh.levels = {name: logger.level for name, logger in loggers.items() if isinstance(logger, logging.Logger)}
    gc.freeze()
    gc.unfreeze = lambda: None  # a run would look at all that torch is, and so have it copied
    for line in sys.stdin:
        asked = json.loads(line)
        said = start(**asked["start"]) if "start" in asked else [code_of(process) for process in asked["codes"]]
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
