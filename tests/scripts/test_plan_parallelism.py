"""scripts/plan_parallelism.py prints layouts that a run takes, and the command of the fastest."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from composed import config_of

from trainer.config.paths import kept_tree
from trainer.digests import stamped

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
FREED_KEY = "parallel.reshard_after_forward=true"


@pytest.fixture
def plan_parallelism(run_python: Run) -> Run:
    """plan_parallelism(*arguments)"""
    return lambda *arguments: run_python(ROOT / "scripts" / "plan_parallelism.py", *arguments)


def test_the_script_prints_a_table_and_the_command(plan_parallelism: Run) -> None:
    done = plan_parallelism(
        "--gpus", "16", "--sequences", "4", "model=moonlight_16b", "+recipe=fp8_delayed", "optim.lr=3e-4", FREED_KEY,
        "dry_run=true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table, *_, command = done.stdout.strip().split("\n\n")  # between them, of layouts with stages, their blocks
    head, *rows = table.splitlines()
    assert head.split()[:3] == ["replicate", "shard", "expert"] and 1 < len(rows) <= 6
    assert command.startswith(
        "torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py"
    )
    assert f" optim.lr=3e-4 {FREED_KEY} " in command and "trainer.global_batch_size=64" in command
    assert "dry_run" not in command


def test_of_several_machines_the_fastest_layout_of_each(plan_parallelism: Run) -> None:
    """With the degrees that are given; a slower network is no faster."""
    words = "--gpus", "8,16", "--network", "12.5,45", "model=moonlight_16b", "--sequences", "4"
    head, *rows = plan_parallelism(*words, "parallel.expert=8", "parallel.replicate=1").stdout.splitlines()
    columns = head.replace("node GB/s", "node").replace("network GB/s", "network").replace("compute ms", "ms").split()
    read = [dict(zip(columns, row.split(), strict=True)) for row in rows]
    assert [(row["GPUs"], row["network"]) for row in read] == [("8", "12.5"), ("8", "45"), ("16", "12.5"), ("16", "45")]
    assert all(row["expert"] == "8" and row["replicate"] == "1" for row in read)
    speeds = [float(row["tokens/s/GPU"].replace(",", "")) for row in read]
    assert speeds[0] == speeds[1] and speeds[2] < speeds[3]


def test_of_several_batches_the_fastest_is_chosen(plan_parallelism: Run) -> None:
    """Messages cost what they cost, however many tokens a step has: the largest that fits."""
    words = "--gpus", "4", "--rows", "1", "model=moonlight_16b", "parallel.pipeline=1", "parallel.expert=1"
    few, more = (plan_parallelism(*words, "--sequences", counts).stdout for counts in ("4", "4,10,40"))
    assert "trainer.global_batch_size=16" in few and "trainer.global_batch_size=40" in more
    speeds = [float(text.splitlines()[1].split()[-1].replace(",", "")) for text in (few, more)]
    assert speeds[0] < speeds[1]


def test_the_layout_can_train_every_phase(plan_parallelism: Run) -> None:
    """Eight sequences go to at most 8 groups of the 16 GPUs, in microbatches of what a group has in each phase."""
    phases = "trainer.phases=[{until: 50}, {global_batch_size: 64, sequence_length: 768}]"
    words = "model=deepseek_tiny", "trainer.global_batch_size=8", "trainer.max_steps=100", phases
    done = plan_parallelism("--gpus", "16", "--rows", "99", *words)
    head, *rows = done.stdout.split("\n\n")[0].splitlines()
    names = head.replace("compute ms", "ms").split()
    read = [dict(zip(names, row.split(), strict=True)) for row in rows]
    assert read and all(int(row["replicate"]) * int(row["shard"]) <= 8 for row in read)
    assert all(row["microbatch"] == "1" for row in read if row["replicate"] == "1" and row["shard"] == "8")


def test_a_batch_that_is_given_is_kept(plan_parallelism: Run) -> None:
    """Also one that the GPUs do not divide: some of them share sequences, or are stages."""
    done = plan_parallelism("--gpus", "8", "model=moonlight_16b", "trainer.global_batch_size=12")
    assert "trainer.global_batch_size=12" in done.stdout.splitlines()[-1], done.stderr


def test_a_run_is_planned_with_its_own_settings(tmp_path: Path, plan_parallelism: Run) -> None:
    """Its batch and sequences stay, also where they are the defaults; its stages do not."""
    run = tmp_path / "mine"
    run.mkdir()
    degrees = "parallel.tensor=2", "parallel.pipeline=2", "parallel.stages=[1,4]"
    tree = kept_tree(config_of(["model.num_layers=5", *degrees]))
    (run / "config.yaml").write_text(stamped(yaml.safe_dump(tree)))
    done = plan_parallelism("--gpus", "8", "--rows", "1", f"run.resume={run}")
    sizes, start = tree["trainer"], f"torchrun --nproc_per_node=8 train.py run.resume={run} parallel."
    command = done.stdout.splitlines()[-1]
    assert command.startswith(start) and "sequence_length" not in command and "parallel.tensor=1" in command, (
        done.stderr
    )
    assert f"trainer.global_batch_size={sizes['global_batch_size']}" in command and "parallel.stages=null" in command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "8", "--sequences", "8,ten"], "--sequences: 8,ten: want a number above 0, or several: 6,8,10"),
        (["--gpus", "8", "--tflops", "-5"], "--tflops=-5: set a number above 0"),
        (["--gpus", "8", "trainer.sequence_length=0"], "trainer.sequence_length=0: out of range; set 1 or more"),
        (
            ["--gpus", "8", "--memory", "60", "model=deepseek_v3", "model.num_layers=10"],
            "--gpus=8: no layout fits into 60 GiB a GPU; take more GPUs (64 would do)",
        ),
        (["--gpus", "8", "--memory", "0.01"], "; take GPUs with more (no number of these is enough)\n"),  # nor tokens
        (
            ["--gpus", "1", "--memory", "0.5", "trainer.sequence_length=65536", "model.max_position_embeddings=65536"],
            "would do), or a shorter trainer.sequence_length",
        ),
        (
            ["--gpus", "8", "model.num_heads=9", "model.num_layers=3", "trainer.global_batch_size=7"],
            "--gpus=8: no layout can train this; leave out trainer.global_batch_size=7",
        ),
        (["--gpus", "8", "cuda_graph=true"], "no layout can train this; cuda_graph=true: the ranks' messages are not"),
        (
            ["--gpus", "16", "parallel.expert=8", "parallel.dispatch=two_hops"],
            "no layout can train this; leave out some of parallel.expert=8 parallel.dispatch=two_hops",
        ),
        (["--gpus", "8", "parallel.fp8_all_gather=true"], "parallel.fp8_all_gather=true: no weight computes in FP8"),
        (["--gpus", "8", "health.shadow_every=9"], "health.shadow_every=9: nothing computes in FP8"),
        (["--gpus", "8", "trainer.phases=[{microbatch_size:1}]"], "a phase sets microbatch_size, and the planner"),
        (["--gpus", "8", "--sequences", "8", "trainer.phases=[{global_batch_size:32}]"], "--sequences: a phase of"),
        (["--gpus", "8", "gpu=a100"], "gpu=a100: a step was measured on an H200 only; measure it with"),
        (["--gpus", "12"], "as many on each node, and --per-node=8; set 8 or 16, or --per-node=6"),
        (["--gpus", "0"], "--gpus: 0: want a number above 0"),
        (["--gpus", "8,100000000"], "--gpus: 100000000: want at most 1048576"),
        (["--gpus", "8", "parallel=fsdp"], "parallel=fsdp: the planner chooses the degrees"),
        (["--gpus", "8", "--tflops", "inf"], "--tflops=inf: set a number above 0"),
        (["--gpus", "8", "model.layers=3"], "model.layers=3"),
    ],
)
def test_mistakes_of_the_planner_are_one_line(arguments: list[str], says: str, plan_parallelism: Run) -> None:
    done = plan_parallelism(*arguments)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
