"""One process at a time trains in a run folder."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from run_folders import save, snapshot


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_two_processes_cannot_train_in_one_folder(runs: Path, opened: Any, resume: str) -> None:
    first = opened(runs)
    save(first.path, 100)
    before = snapshot(first.path)
    name, how = ("a", "auto") if resume == "auto" else (None, str(first.path))
    with pytest.raises(ValueError, match=rf"a is in use by process {os.getpid()} on .*; wait for it, or choose"):
        opened(runs, name, how)
    assert snapshot(first.path) == before
    first.close()
    assert opened(runs, name, how).first_step == 100


def test_a_process_killed_with_sigkill_leaves_no_lock(runs: Path, opened: Any) -> None:
    code = (
        "import sys, time; from pathlib import Path; from trainer.run.run_folder import RunFolder\n"
        "run = RunFolder(Path(sys.argv[1]), 'a', 'never', 'x', {'config.yaml': ''}); print('open', flush=True)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(runs)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    with pytest.raises(ValueError, match=f"in use by process {process.pid}"):
        opened(runs, resume="auto")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert opened(runs, resume="auto").is_new


def test_a_restarted_run_waits_until_the_one_before_is_gone(runs: Path, opened: Any) -> None:
    before = opened(runs)
    threading.Timer(0.5, before.close).start()
    assert opened(runs, resume="auto", patience=20.0).is_new
    with pytest.raises(ValueError, match="in use by process"):
        opened(runs, resume="auto", patience=0.3)
