"""The command line of programs: options, and errors in one line.

A `precision.errors.UserError` ends in one line, `octet: error: KEY=VALUE: what is wrong; what to do`. Hydra's own
errors take several, and advise to add a mistyped key to the config: they are reworded here. A file error names the
file: a denied permission has the exit code of a UserError, any other (a full disk) that of a RunError. Everything else
is a bug and keeps its traceback. With several processes, one prints it.

This module does not import torch: `--help` is quick, and Ctrl-C reaches `guarded`.
"""

import argparse
import contextlib
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from precision.errors import RunError, UserError
from trainer.files import FULL, SOURCE
from trainer.launch.interrupts import Terminated
from trainer.launch.liveness.rank_group import RankGroup

OK, FAILED, REFUSED, INTERRUPTED, CUT_OFF, TERMINATED = 0, 1, 2, 130, 141, 143
LONGEST_MESSAGE = 4000


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows its help as written, and raises UserError: one line, as for all other errors."""

    def __init__(self, description: str | None = None, **settings: Any) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as UserError."""
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def guarded(main: Callable[[], None], rank_group: RankGroup | None = None) -> int:
    """Run main() and return its exit code. Expected errors become one line on stderr, bugs keep their traceback.

    rank_group: of the processes that do the same. An error of all is reported by one; an error of one ends all.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as with >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")  # a terminal that cannot show a character shows a substitute
    handlers, is_script = {}, rank_group is None
    if rank_group is None:  # train.py's listens after it has read the environment
        rank_group = RankGroup()
        handlers = rank_group.listen()

    def judge(error: BaseException) -> tuple[str | None, int] | None:
        end = _judge(error, rank_group.stop_signal)
        return None if end.orderly or end.by_signal else (end.message, end.code)

    rank_group.judge = judge
    try:
        _run(main, is_script)
    except SystemExit:  # --help, --cfg job: the others may not have it
        rank_group.leave()
        raise
    except (Exception, KeyboardInterrupt) as error:
        code = _report(error, rank_group)
        if code is None:
            raise
        return code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # its terminal is gone; else Python would exit with 120
                _discard(stream)
    return OK


def _run(main: Callable[[], None], is_script: bool) -> None:
    """Run main(). Raises OSError if its result, such as the help, cannot be written: Python ignores that at exit."""
    with _own_warnings_in_one_line():
        _check_current_folder()
        try:
            main()
        except SystemExit:
            sys.stdout.flush()
            raise
        if is_script:
            sys.stdout.flush()


def _report(error: BaseException, rank_group: RankGroup) -> int | None:
    """Report the error that ended main, once for all processes, and leave them. Returns the exit code; None for a bug,
    which the caller raises again."""
    connected, launch = rank_group.connected, rank_group.launch
    if isinstance(error, BrokenPipeError) and not connected and _has_no_reader(sys.stdout):  # `--help | head`
        return CUT_OFF
    rank_group.decided()
    end = _judge(error, rank_group.stop_signal)
    if connected and end.by_signal:
        rank_group.stopped(end.message or "", end.code)
    if connected and not end.orderly:
        of_all = end.code == REFUSED and not isinstance(error, OSError)  # a file may be denied to one rank alone
        rank_group.failed(error, end.code, end.message, of_all)
    reason = end.message or repr(error)
    launch.write_error_file(reason)
    first = launch.is_first if connected else rank_group.is_reporter(reason, end.code)
    if first and end.message is None:
        if launch.size > 1:
            error.add_note(f"on rank {launch.rank}")
        return None
    if first:
        with contextlib.suppress(OSError):  # its terminal may be closed
            print(f"octet: {end.message}", file=sys.stderr, flush=True)
    rank_group.leave()
    return rank_group.exit(end.code)


def _check_current_folder() -> None:
    """Raise UserError if the current folder was deleted: paths, and MKL, which torch loads, need one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder was deleted; change to one that exists") from None


@contextlib.contextmanager
def _own_warnings_in_one_line() -> Iterator[None]:
    """Print our warnings, which are about the user's input, without the place in the code that Python adds."""
    usual = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], file: str, number: int, line: str | None = None) -> str:
        ours = Path(file).is_relative_to(SOURCE)
        return f"octet: {message}\n" if ours else usual(message, category, file, number, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _has_no_reader(stream: TextIO) -> bool:
    """Return whether a stream's reader is gone. If so, its buffer is discarded instead of raising at exit."""
    state = select.poll()
    state.register(stream.fileno(), 0)  # report errors only
    if not state.poll(0):
        return False
    _discard(stream)
    return True


def _discard(stream: TextIO) -> None:
    """Discard what a stream has not written, and what it will be given."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@dataclass
class _Outcome:
    """How main ended. message: None for a bug. orderly: all processes end like this, each on its own. by_signal: a
    signal ended this process."""

    message: str | None
    code: int
    orderly: bool = False
    by_signal: bool = False


def _judge(error: BaseException, stop_signal: int) -> _Outcome:
    """Classify the error that ended main. stop_signal: number of the signal that asked main to end; 0: none."""
    if isinstance(error, KeyboardInterrupt):
        return _by_signal(signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from trainer.launch.composition_errors import explain

    if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
        return _Outcome(_one_line(f"error: {explain(error, sys.argv[1:])}"), REFUSED)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        fix = "lower trainer.microbatch_size or model.num_layers, or set recompute=full"
        return _Outcome(f"error: out of GPU memory; {fix}", FAILED)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: " in str(error):
        return _Outcome("error: out of memory; lower model.num_layers or trainer.microbatch_size", FAILED)
    if isinstance(error, UserError | RunError | OSError):
        of_user = isinstance(error, UserError | PermissionError)
        code = REFUSED if of_user else getattr(error, "exit_code", FAILED)
        word = "error: " if code < 128 else ""  # a run stopped by a signal has saved, as it should
        text = _of_a_file(error) if isinstance(error, OSError) else str(error)
        return _Outcome(_one_line(f"{word}{text}"), code, orderly=hasattr(error, "exit_code"))
    if stop_signal:  # an interrupt during an import of torch, say, may surface as any error
        return _by_signal(stop_signal)
    return _Outcome(None, FAILED)


def _by_signal(number: int) -> _Outcome:
    if number == signal.SIGINT:
        return _Outcome("interrupted", INTERRUPTED, by_signal=True)
    return _Outcome("terminated", TERMINATED, by_signal=True)


def _of_a_file(error: OSError) -> str:
    """Format a file error: the system's own message names the path last, and no fix."""
    fix = "free space" if error.errno in FULL else "correct the path or its permissions"
    if error.filename is None:
        return f"{error.strerror}; {fix}" if error.errno in FULL else str(error)
    return f"{error.filename}: {error.strerror}; {fix}, or name another place"


def _one_line(text: str) -> str:
    """Return a message, which may quote files, without cursor control, on one line of bounded length."""
    line, half = " ".join(text.split()), LONGEST_MESSAGE // 2
    if len(line) > LONGEST_MESSAGE:
        line = f"{line[:half]} ... {line[-half:]}"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
