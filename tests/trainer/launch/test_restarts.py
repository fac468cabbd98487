"""Restarts by torchrun on several nodes."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

TORCHRUN = Path(__file__).parents[3] / "scripts" / "launch" / "torchrun.py"
RANK = """
import os, pathlib, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path(f"rank{rank}.{attempt}").touch()
if attempt == "0":
    sys.exit(1) if rank == "1" else time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="as all tests with torchrun")
def test_nodes_count_a_restart_alike(tmp_path: Path, programs: Any):
    """Also a node whose own processes have not failed: ranks of different attempts never meet."""
    (tmp_path / "rank.py").write_text(RANK)
    meeting = "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{20000 + os.getpid() % 10000}"
    words = TORCHRUN, "--nnodes=2", "--nproc_per_node=1", "--max_restarts=1", *meeting, tmp_path / "rank.py"
    nodes = [programs.start(*words, cwd=tmp_path) for _ in range(2)]
    assert [(node.communicate(timeout=60)[0], node.returncode) for node in nodes] == [("", 0)] * 2
    assert sorted(path.name for path in tmp_path.glob("rank?.?")) == ["rank0.0", "rank0.1", "rank1.0", "rank1.1"]
