"""Which layout: the arithmetic by hand, what does not fit left out, and the script that prints the command."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from composed import config_of

from models import DeepSeek
from precision import Plan
from trainer.config import Config, Switch
from trainer.forecast.cost import DRAG, SPARE, TRAVEL, Machine, cost, fewest, layouts, ranked
from trainer.parallel.mesh import Degrees

ROOT = Path(__file__).parents[3]
Run = Callable[..., subprocess.CompletedProcess[str]]
H200S = Machine(gpus=8, per_node=8, memory=139 * 2**30, flops=500e12, node_link=350e9, network=45e9)
EXPERTS, OTHERS = 26 * 64 * 3 * 2048 * 1408, 15960108544 - 26 * 64 * 3 * 2048 * 1408


@pytest.fixture
def moonlight() -> tuple[Config, Plan]:
    batch = ["trainer.sequence_length=4096", "trainer.microbatch_size=2", "trainer.global_batch_size=64"]
    config = config_of(["model=moonlight_16b", "+recipe=fp8_delayed", *batch])
    plan = Plan(config.precision, config.model.num_layers)
    with torch.device("meta"):
        DeepSeek(config.model, plan)
    return config, plan


def test_one_gpu_sends_nothing(moonlight: tuple[Config, Plan]) -> None:
    alone = cost(*moonlight, Degrees(), replace(H200S, gpus=1))
    assert alone.hidden == alone.waiting == 0
    assert alone.step == alone.compute == pytest.approx(64 * 4096 * 17.174074368e9 / 500e12)


def with_(config: Config, **parallel: Switch) -> Config:
    return replace(config, parallel=replace(config.parallel, **parallel))


FREED_KEY = "parallel.reshard_after_forward=true"
FREED = {"reshard_after_forward": Switch.true, "reduce_each_microbatch": Switch.false}


def test_sharding_gathers_twice_and_reduces_once(moonlight: tuple[Config, Plan]) -> None:
    """Four microbatches of BF16 there and back, FP32 gradients at the end."""
    config, plan = moonlight
    found = cost(with_(config, **FREED), plan, Degrees(shard=8), H200S)
    assert (found.microbatches, found.tokens) == (4, 8 * 4096)
    assert found.hidden == pytest.approx(7 / 8 * (OTHERS + EXPERTS) * (2 * 2 * 4 + 4) / 350e9)


def test_what_stays_is_gathered_once_where_there_is_room(moonlight: tuple[Config, Plan]) -> None:
    roomy, less = (replace(H200S, memory=size * 2**30) for size in (1000, 139))
    assert cost(*moonlight, Degrees(shard=8), roomy).hidden == pytest.approx(7 / 8 * (OTHERS + EXPERTS) * 6 / 350e9)
    found = cost(*moonlight, Degrees(shard=8), less)  # whole gradients in FP32 are not there, the weights are
    assert found.hidden == pytest.approx(7 / 8 * (OTHERS + EXPERTS) * (2 + 4 * 4) / 350e9)


def test_what_computes_in_fp8_may_be_gathered_in_half_the_bytes(moonlight: tuple[Config, Plan]) -> None:
    plan = moonlight[1]
    config = with_(moonlight[0], **FREED)
    in_fp8 = with_(config, fp8_all_gather=Switch.true)
    rows = [row for row in plan.gemms.values() if row.recipe.is_fp8]
    halved = sum(row.in_features * row.out_features * row.groups for row in rows)
    assert 0.9 < halved / (OTHERS + EXPERTS) < 1
    plain, less = (cost(c, plan, Degrees(shard=8), H200S) for c in (config, in_fp8))
    assert plain.hidden - less.hidden == pytest.approx(7 / 8 * halved * 2 * 4 / 350e9)
    assert less.memory < plain.memory + halved / 8, "the parts that are sent stay for the step"


def test_experts_that_stay_are_not_gathered_but_tokens_travel(moonlight: tuple[Config, Plan]) -> None:
    config, plan = moonlight
    found = cost(with_(config, **FREED), plan, Degrees(shard=8, expert=8), H200S)
    assert found.hidden == pytest.approx(7 / 8 * OTHERS * 20 / 350e9)
    sent = 7 * (1 - (7 / 8) ** 6) * 8 * 4096 * 2048 * 26 * 2 * (1 + 2)
    assert found.waiting == pytest.approx(TRAVEL * sent / 350e9)
    assert found.step == pytest.approx(found.compute + DRAG * found.hidden + found.waiting)


def test_a_group_that_leaves_the_node_uses_the_network(moonlight: tuple[Config, Plan]) -> None:
    near = cost(*moonlight, Degrees(replicate=2, shard=4), H200S)
    far = cost(*moonlight, Degrees(replicate=2, shard=4), replace(H200S, per_node=4))
    added = 8 / 2 * (OTHERS + EXPERTS) / 4
    assert far.hidden - near.hidden == pytest.approx(added / 45e9 - added / 350e9)


def test_a_group_with_ranks_on_two_nodes_uses_the_network() -> None:
    machine = replace(H200S, gpus=24)
    assert machine.seconds(350e9, 4) == machine.seconds(350e9, 4, 2) == 1
    assert machine.seconds(45e9, 6) == machine.seconds(45e9, 3, 2) == machine.seconds(45e9, 12) == 1
    assert replace(H200S, gpus=6).seconds(350e9, 6) == 1, "all in one node"


def test_the_fewest_gpus_that_do_are_found(moonlight: tuple[Config, Plan]) -> None:
    small = replace(H200S, gpus=1, memory=24 * 2**30)
    enough = fewest(*moonlight, small)
    assert enough is not None and enough > 8
    one = replace(moonlight[0].trainer, microbatch_size=1, global_batch_size=1)
    for gpus, some in ((enough // 2, False), (enough, True)):
        found = layouts(replace(moonlight[0], trainer=one), moonlight[1], replace(small, gpus=gpus), 1)
        assert any(found) is some
    assert fewest(*moonlight, replace(small, memory=2**20)) is None


def test_layouts_fit_and_come_fastest_first(moonlight: tuple[Config, Plan]) -> None:
    found = ranked(layouts(*moonlight, H200S, 8))
    speeds = [round(one.tokens_per_second, -2) for one in found]
    assert speeds == sorted(speeds, reverse=True) and len({one.degrees for one in found}) > 4
    assert all(one.memory <= SPARE * H200S.memory and one.degrees.world == 8 for one in found)
    assert all(one.microbatch * one.microbatches == 8 * one.degrees.context for one in found)
    assert not list(layouts(*moonlight, replace(H200S, gpus=1), 8))


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
    head, *rows, blank, command = done.stdout.splitlines()
    assert head.split()[:3] == ["replicate", "shard", "expert"] and 1 < len(rows) <= 6 and not blank
    assert command.startswith(
        "torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py"
    )
    assert f" optim.lr=3e-4 {FREED_KEY} " in command and "trainer.global_batch_size=64" in command
    assert "dry_run" not in command


def test_of_several_batches_the_fastest_is_chosen(plan_parallelism: Run) -> None:
    """Messages cost what they cost, however many tokens a step has: the largest that fits."""
    words = "--gpus", "4", "--rows", "1", "model=moonlight_16b", "trainer.sequence_length=4096", "--sequences"
    few, more = (plan_parallelism(*words, counts).stdout for counts in ("4", "4,10,40"))
    assert "trainer.global_batch_size=16" in few and "trainer.global_batch_size=40" in more
    speeds = [float(text.splitlines()[1].split()[-1].replace(",", "")) for text in (few, more)]
    assert speeds[0] < speeds[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "8", "--sequences", "8,ten"], "--sequences: 8,ten: want a number above 0, or several: 6,8,10"),
        (["--gpus", "8", "--tflops", "-5"], "--tflops=-5: set more than 0"),
        (["--gpus", "8", "trainer.sequence_length=0"], "trainer.sequence_length=0: out of range; set 1 or more"),
        (["--gpus", "8", "model=deepseek_v3"], "--gpus=8: no layout fits into 139.8 GiB a GPU; take more GPUs"),
        (["--gpus", "8", "--memory", "60", "model=deepseek_v3"], "take more GPUs (512 would do)"),
        (
            ["--gpus", "8", "gpu=a100"],
            "gpu=a100: a step was measured on an H200 only; measure it with",
        ),
        (["--gpus", "12"], "as many on each node, and --per-node=8; set 8 or 16, or --per-node=6"),
        (["--gpus", "0"], "--gpus=0: set more than 0"),
        (
            ["--gpus", "8", "parallel.shard=4"],
            "parallel.shard=4: the degrees are what is worked out here",
        ),
        (["--gpus", "8", "--tflops", "nan"], "--tflops=nan: set more than 0"),
        (["--gpus", "8", "model.layers=3"], "model.layers=3"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments: list[str], says: str, plan_parallelism: Run) -> None:
    done = plan_parallelism(*arguments)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
