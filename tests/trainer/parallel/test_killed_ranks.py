"""Ranks of a tensor group or a pipeline that are killed and started again compute the numbers of ranks that were not.

The ranks run this file as a program, over gloo.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import config_of
from ports import free_port
from ranks import joined
from run_lines import metrics

from trainer.trainer import Trainer

RUN = ["+recipe=fp8_delayed", "trainer.max_steps=4", "checkpoint.every=1", "run.resume=auto", "optim.lr=5e-4"]
LAST = 3  # the step in which ranks are killed: the checkpoint of step 1 at least is complete, for step 2 has been saved
COMPARED = ("step", "loss/", "optim/", "moe/", "fp8/", "act/")


def main(last: int, *overrides: str) -> None:
    """A rank that kills itself before its `last` update; 0: it does not."""
    with joined() as world:
        trainer = Trainer(config_of(overrides), list(overrides), world)
        optimizer, left = trainer.run.engine.optimizer, last
        update = optimizer.step

        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]
        trainer.train()


def start(programs: Any, last: int, overrides: list[str]) -> list[int]:
    """Exit codes of two ranks."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [programs.start(__file__, last, *overrides, environment=place | {"RANK": str(i)}) for i in range(2)]
    errors = [rank.communicate()[1] for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    assert last or codes == [0, 0], "\n".join(error[-3000:] for error in errors)
    return codes


def numbers(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key.startswith(COMPARED)} for line in metrics(run)]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are killed")
@pytest.mark.parametrize("axis", [["parallel.tensor=2"], ["parallel.pipeline=2", "optim=muon_wsd"]], ids=" ".join)
def test_killed_ranks_resume_to_the_numbers_of_those_that_were_not(
    axis: list[str], overrides: Callable[..., list[str]], tmp_path: Path, programs: Any
) -> None:
    start(programs, 0, overrides(*RUN, *axis, "run.name=whole"))
    killed = overrides(*RUN, *axis, "run.name=killed")
    codes = start(programs, LAST, killed)
    assert -signal.SIGKILL in codes and 0 not in codes
    start(programs, 0, killed)
    run = tmp_path / "runs" / "killed"
    assert '"resume"' in (run / "events.jsonl").read_text()
    ours, theirs = numbers(run), numbers(tmp_path / "runs" / "whole")
    assert ours == theirs and [line["step"] for line in ours if "loss/total" in line] == [1, 2, 3, 4]


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
