"""Checkpoints on GPUs: what a save costs training, and 2, 1 and 2 GPUs that are one run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_lines import metrics
from small import SMALL

from trainer.checkpoint import Checkpointer, ShardView, read

ROOT = Path(__file__).parents[3]
DEVICE = os.environ.get("FSDP_TEST_DEVICE", "cuda")
RUN = [key for key in SMALL if not key.startswith(("trainer.device", "trainer.microbatch"))]
RUN += [f"trainer.device={DEVICE}", "trainer.microbatch_size=2", "compile.enabled=false", "precision=fp32"]
RUN += ["optim.decay_fraction=0", "checkpoint.every=1", "run.name=a", "run.resume=auto"]


def test_training_waits_for_less_than_a_twentieth_of_a_save(tmp_path: Path) -> None:
    """4 GiB, as a rank would have them."""
    costs: list[dict[str, Any]] = []

    def note(kind: str, step: int, message: str, **what: Any) -> None:
        costs.append(what)

    weight = torch.ones(1 << 15, 1 << 15, device=DEVICE)
    checkpointer = Checkpointer(tmp_path, 1, note)
    state = {"weight": ShardView(weight, weight.shape, (0, 0)), "step": torch.ones((), device=DEVICE)}
    checkpointer.reserve(state)
    for step in (1, 2):
        checkpointer.save(step, state, {})
        weight.add_(1)
        checkpointer.wait()
    checkpointer.close()
    shares = [cost["held_seconds"] / cost["seconds"] for cost in costs]
    print(f"held / save: {', '.join(f'{share:.2%}' for share in shares)}; {costs}")
    assert max(shares) < 0.05
    saved, _ = read(tmp_path / "step_00000002")
    assert saved["weight"].min() == saved["weight"].max() == 2


def train(folder: Path, corpus: Path, size: int, steps: int, *more: str) -> list[float]:
    """Losses of the run so far."""
    places = [f"data.path={corpus}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder}"]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"]
    command = [*(ranks if size > 1 else [sys.executable]), str(ROOT / "train.py"), *RUN, *places, *more]
    subprocess.run([*command, f"trainer.max_steps={steps}"], check=True, timeout=600)
    return [line["loss/total"] for line in metrics(folder / "a", "loss/total")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", [("parallel=fsdp",), ("parallel=fsdp", "parallel.expert=2")], ids=["fsdp", "expert"])
def test_2_1_and_2_gpus_are_one_run(tmp_path: Path, layout: tuple[str, ...]) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(12):
        words = " ".join(f"def f{i * j % 17}(x): return x + {j}\n" for j in range(60))
        (corpus / f"file{i}.txt").write_text(words)
    whole = train(tmp_path / "whole", corpus, 1, 6)
    train(tmp_path / "parts", corpus, 2, 2, *layout)
    train(tmp_path / "parts", corpus, 1, 4, "parallel.expert=1")  # a resumed run keeps its own degrees
    parts = train(tmp_path / "parts", corpus, 2, 6, *layout)
    assert len(parts) == 6 and parts == pytest.approx(whole, rel=1e-4)
