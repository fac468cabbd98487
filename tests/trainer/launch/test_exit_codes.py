"""How a program ends: errors of the user and of a run in one line with their exit code; bugs keep their traceback."""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from precision.errors import UserError
from trainer.launch.command_line import guarded
from trainer.launch.interrupts import Terminated
from trainer.launch.liveness.rank_group import RankGroup
from trainer.step.guard import TrainingStopped

ROOT = Path(__file__).parents[3]


def refuse() -> None:
    raise UserError("optim.lr=9: too\n  large; lower it")


def fail() -> None:
    raise TrainingStopped("3 steps in a row were not finite")


def interrupt() -> None:
    raise KeyboardInterrupt


def stop() -> None:
    raise TrainingStopped("stopped by SIGTERM after step 3, saved", exit_code=143)


def run_out_of_disk() -> None:
    raise OSError(28, "No space left on device", "runs/x")


def run_out_of_disk_in_a_library() -> None:
    raise OSError(28, "No space left on device")


def lack_permission() -> None:
    raise PermissionError(13, "Permission denied", "runs/x")


def run_out_of_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def write_below_a_file() -> None:
    Path("/dev/null/x").write_text("")


@pytest.mark.parametrize(
    ("main", "code", "says"),
    [
        (refuse, 2, "octet: error: optim.lr=9: too large; lower it\n"),
        (fail, 1, "octet: error: 3 steps in a row were not finite\n"),
        (interrupt, 130, "octet: interrupted\n"),
        (stop, 143, "octet: stopped by SIGTERM after step 3, saved\n"),
        (run_out_of_disk, 1, "octet: error: runs/x: No space left on device; free space, or name another place\n"),
        (run_out_of_disk_in_a_library, 1, "octet: error: No space left on device; free space\n"),
        (run_out_of_memory, 1, "octet: error: out of memory; lower model.num_layers or trainer.microbatch_size\n"),
        (
            lack_permission,
            2,
            "octet: error: runs/x: Permission denied; correct the path or its permissions, or name another place\n",
        ),
        (
            write_below_a_file,
            1,
            "octet: error: /dev/null/x: Not a directory; correct the path or its permissions, or name another place\n",
        ),
    ],
)
def test_user_and_run_errors_are_one_line(
    main: Callable[[], None], code: int, says: str, capsys: pytest.CaptureFixture[str]
):
    assert guarded(main) == code
    assert capsys.readouterr().err == says


def ask_for_help() -> None:
    print("help")
    raise SystemExit(0)


@pytest.mark.parametrize("main", [lambda: print("a result"), lambda: print("a result", flush=True), ask_for_help])
def test_a_result_that_the_disk_has_no_room_for_is_an_error_and_one_that_no_one_reads_is_none(
    main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though Python, which buffers it, would learn that at exit."""
    reader, unread = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for file, code, says in ((full, 1, "octet: error: No space left on device; free space\n"), (unread, 141, "")):
        monkeypatch.setattr(sys, "stdout", os.fdopen(file, "w"))
        assert guarded(main) == code
        assert capsys.readouterr().err == says
        sys.stdout.close()


def test_output_that_the_caller_has_closed_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert guarded(lambda: print(sys.stdout.write("text"), sys.stderr.fileno())) == 0


def test_a_signal_waits_for_the_end_of_an_import_and_a_second_one_does_not() -> None:
    """Within an import torch's C++ aborts, and a library that tries one swallows the exception."""
    rank_group, seen = RankGroup(), []

    def load(*numbers: signal.Signals) -> None:
        with rank_group.importing():
            for number in numbers:
                signal.raise_signal(number)
            seen.append(numbers)

    before = rank_group.listen()
    try:
        with pytest.raises(Terminated):
            load(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            load(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [(signal.SIGTERM,)]


def test_an_error_caused_by_an_interrupt_is_no_bug(capsys: pytest.CaptureFixture[str]):
    """Within an import of a library, say. Without a signal it is one."""
    rank_group = RankGroup()

    def main() -> None:
        [][0]

    rank_group.stop_signal = signal.SIGINT
    assert guarded(main, rank_group) == 130
    assert capsys.readouterr().err == "octet: interrupted\n"
    rank_group.stop_signal = 0
    with pytest.raises(IndexError):
        guarded(main, rank_group)


def test_a_warning_of_ours_is_one_line_without_a_place_in_the_code(capsys: pytest.CaptureFixture[str]):
    own, theirs = str(ROOT / "src" / "trainer" / "build.py"), str(ROOT / "elsewhere.py")

    def main() -> None:
        for file in (own, theirs):
            warnings.warn_explicit("model.vocab_size=9: too many", UserWarning, file, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *about: sys.stderr.write(warnings.formatwarning(*about[:4]))
        assert guarded(main) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "octet: model.vocab_size=9: too many" and "elsewhere.py:3: UserWarning" in said[1]


def bug_in_a_raise_statement() -> None:
    raise ValueError("heads: 3 and 4")  # no UserError: nothing that the user gave


def bug_within_a_raise_statement() -> None:
    raise UserError(str({}["x"]))


@pytest.mark.parametrize(
    ("bug", "error"),
    [
        (lambda: int("x"), ValueError),  # not raised by us: a mistake in an expression
        (bug_in_a_raise_statement, ValueError),
        (bug_within_a_raise_statement, KeyError),
        (lambda: {}["x"], KeyError),
        (lambda: os.path.commonpath([]), ValueError),  # raised by a library
        (lambda: subprocess.run([], check=True), (IndexError, ValueError)),
    ],
)
def test_a_bug_keeps_its_traceback(bug: Callable[[], object], error: type[Exception]):
    def main() -> None:
        bug()

    with pytest.raises(error):
        guarded(main)
