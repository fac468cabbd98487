"""A rank that does not come to an operation between GPUs: the others name it, though their hosts wait for a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
from trainer.launch.liveness import heartbeat
from trainer.launch.command_line import guarded
from trainer.launch.liveness.rank_group import RankGroup
from trainer.launch.world import init
from trainer.launch.signals import StopSignals

heartbeat.PULSE_SECONDS, heartbeat.PATIENCE = 0.5, 2.0
rank_group = RankGroup()

def run():
    rank_group.join(os.environ)
    world = init(torch.device("cuda"), rank_group, 8)
    with StopSignals(world) as stop:
        for step in range(1, 6):
            rank_group.step = step
            if step == 3 and world.rank == 1:
                time.sleep(1000)
            x = torch.ones(16, 64, device=world.device)
            dist.all_reduce(x)
            print(float(x.sum()))
            stop.agree()
    rank_group.leave()

sys.exit(guarded(run, rank_group))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_operation_that_gpus_wait_in_is_named(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, str(ROOT / "scripts" / "launch" / "torchrun.py"), "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launcher, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    print(done.stderr)
    assert done.returncode == 1
    assert "the other ranks timed out waiting for rank 1" in done.stderr
    assert "they waited in nccl all_reduce of [16, 64]" in done.stderr
