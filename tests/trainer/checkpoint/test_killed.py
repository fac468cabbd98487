"""A process that ends at any moment, killed or not, leaves whole checkpoints."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import Checkpointer, list_checkpoints, newest_checkpoint, read

KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from trainer.checkpoint import Checkpointer, list_checkpoints, newest_checkpoint, read
from trainer.checkpoint.manifest import verify

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
quiet = lambda kind, step, message, **what: None
weights = [torch.zeros(n) for n in (1 << 20, 1000, 1)]
random.seed(int(sys.argv[3]))
torch.set_num_threads(1)  # other threads would not survive the fork
acknowledged = 0
seconds = None  # that a save takes on this disk
while rounds > 0 or acknowledged < 5:
    assert rounds > -200, "no save is ever done"
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:  # resume from the newest checkpoint, saving as fast as it can, until killed
        checkpointer = Checkpointer(folder, 2, quiet)
        assert not [p for p in folder.glob(".*")] if folder.exists() else True, "leftovers"
        newest = newest_checkpoint(folder, quiet)
        step = 0 if newest is None else read(newest)[0]["step"]
        os.write(send, b"%d\\n" % step)
        while True:
            step += 1
            for weight in weights:
                weight.fill_(step)
            checkpointer.save(step, {"step": step, "weights": weights}, {})
            checkpointer.wait()
            os.write(send, b"%d\\n" % step)
    os.close(send)
    os.read(receive, 100)  # it is about to save
    if seconds is None:
        start = time.perf_counter()
        os.read(receive, 100)
        seconds = time.perf_counter() - start
    time.sleep(random.uniform(0, 3 * seconds))
    rounds -= 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reported = b""
    while piece := os.read(receive, 1 << 16):
        reported += piece
    os.close(receive)
    acknowledged = max([acknowledged, *map(int, reported.split())])
    visible = list_checkpoints(folder)
    for path in visible:  # whatever is visible is whole, and is what its name says
        verify(path)
        state = read(path)[0]
        assert path.name == f"step_{state['step']:08d}"
        assert all((weight == state["step"]).all() for weight in state["weights"])
    newest = state["step"] if visible else 0
    assert newest >= acknowledged, (newest, acknowledged)
print(acknowledged, flush=True)
os._exit(0)
"""


def test_sigkill_at_any_moment_leaves_whole_checkpoints_and_no_leftovers(
    folder: Path, events: Any, run_python: Callable[..., Any]
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    done = run_python("-c", KILLS, folder, 6, seed)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    Checkpointer(folder, 2, events).close()
    assert all(path.name.startswith("step_") for path in folder.iterdir())
    assert 1 <= len(list_checkpoints(folder)) <= 3  # a third one if the kill came before the oldest was deleted


def test_leftovers_of_a_killed_process_are_cleaned_up_and_never_read(folder: Path, events: Any) -> None:
    for name in (".writing_step_00000009", ".deleting_step_00000001"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rank00000.safetensors").write_text("half")
    assert newest_checkpoint(folder, events) is None
    checkpointer = Checkpointer(folder, 2, events)
    assert list(folder.iterdir()) == []
    checkpointer.save(9, {"t": torch.ones(1)}, {})
    checkpointer.close()
    assert [path.name for path in folder.iterdir()] == ["step_00000009"]


def test_a_process_that_ends_normally_finishes_its_last_save(folder: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from trainer.checkpoint import Checkpointer\n"
        "c = Checkpointer(Path(sys.argv[1]), 2, lambda *a, **k: None); c.save(1, {'t': torch.ones(1 << 22)}, {})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""
    assert read(folder / "step_00000001")[0]["t"].sum() == 1 << 22
