"""Stages of a pipeline train as one process does: losses, norms, verdicts, evaluation, checkpoints.

The ranks run this file as a program, over gloo: all cases of a world size one after the other.
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import composed
import pytest
import torch
from ranks import run_cases

from models.stage import divide, divide_among
from precision.errors import UserError
from trainer.checkpoint import Checkpointer, checkpoint_name, read
from trainer.forecast.memory import forecast_memory
from trainer.forecast.preflight import check
from trainer.forecast.stages import blocks_of_stages, idle_share
from trainer.launch.world import World
from trainer.parallel.mesh import Degrees
from trainer.step.engine import build_engine
from trainer.step.evaluation import mean_loss
from trainer.step.train_step import train_step

STEPS, SAVED, LENGTH, BATCH, END = 2, 1, 16, 4, 7
RUN = ["trainer.device=cpu", "precision.backend=reference", f"trainer.max_steps={STEPS}", "optim.warmup_steps=2"]
RUN += [f"trainer.global_batch_size={BATCH}", "trainer.microbatch_size=1", f"trainer.sequence_length={LENGTH}"]
RUN += ["model.vocab_size=64", "model.hidden_size=64", "model.num_layers=5", "model.num_mtp_layers=2"]
RUN += ["model.num_experts=4", "model.balance_loss_weight=0.01", "data=text", "data.path=.", "optim.lr=5e-4"]
RUN += ["optim.qk_clip=1"]  # below any head's log-sum-exp: all are clipped in each step


class Case(NamedTuple):
    """A run. keys: overrides. documents: attention stays within them. spoil: the rank whose blocks see a number in step
    2 that is none. saves: its state after step 1; reads: the run whose state it begins with."""

    keys: tuple[str, ...]
    steps: int = STEPS
    documents: bool = False
    spoil: int | None = None
    saves: bool = False
    reads: str | None = None


FP32, FP8, ONE_DEPTH = "precision=fp32", "precision=fp8_delayed", "model.num_mtp_layers=1"
FOUR, TWO = "parallel.pipeline=4", "parallel.pipeline=2"
IN_TURN = TWO, "parallel.stages_per_rank=2"
EP_FULL = "parallel.expert=2", "recompute=full"
ZBV, SEVEN = (*IN_TURN, "parallel.schedule=zbv"), "model.num_layers=7"
CASES = {
    2: {
        "in turn": Case((FP32, *IN_TURN), saves=True),
        "in turn fp8": Case((FP8, *IN_TURN, "parallel.stages=[2,2,1,0]")),
        "zbv": Case((FP32, *ZBV), saves=True),
        "zbv fp8": Case((FP8, *ZBV, "parallel.stages=[1,2,2,0]", "recompute=selective")),
        "zbv spoilt": Case(("precision=fp16", *ZBV), 3, spoil=1),
    },
    4: {
        "plain": Case((FP32, FOUR), saves=True),
        "spoilt": Case(("precision=fp16", FOUR), 3, spoil=1),
        "plain shard": Case((FP32, TWO, "parallel.shard=2", "parallel.stages=[1,4]", "recompute=full")),
        "plain context": Case((FP32, TWO, "parallel.context=2")),
        "plain tensor": Case((FP32, TWO, "parallel.tensor=2"), saves=True),
        "tensor resumed": Case((FP32, "parallel.tensor=2", "parallel.shard=2"), reads="plain"),
        "documents replicate": Case((FP32, TWO, "parallel.replicate=2", ONE_DEPTH), documents=True),
        "zbv": Case((FP32, FOUR, *ZBV[1:], SEVEN)),
        "plain zbv expert": Case((FP32, *ZBV, "parallel.shard=2", *EP_FULL)),
        "in turn resumed": Case((FP32, *IN_TURN, "parallel.shard=2", *EP_FULL), reads="plain"),
    },
    1: {
        "plain": Case((FP32,)),
        "fp8": Case((FP8,)),
        "documents": Case((FP32, ONE_DEPTH), documents=True),
        "resumed": Case((FP32,), reads="in turn"),
        "seven": Case((FP32, SEVEN)),
        "resumed zbv": Case((FP32,), reads="zbv"),
        "resumed tensor": Case((FP32,), reads="plain tensor"),
    },
}
LOSSES = ("loss/total", "loss/lm", "loss/mtp", "loss/balance")


def train(name: str, case: Case, world: World, folder: Path) -> dict[str, Any]:
    """What each step says; the same on all ranks. torch warns on the user's screen of views that leave a stage."""
    warnings.filterwarnings("error", "FSDP2-wrapped module")
    config = composed.config_of([*RUN, *case.keys])
    engine = build_engine(config, world.device, world=world)
    engine.model.end_of_text = END if case.documents else None
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 64, (BATCH, LENGTH + 1), generator=generator) for _ in range(case.steps + 1)]
    lines, begin = [], 1
    if case.reads is not None:
        state, _ = read(folder / case.reads / checkpoint_name(SAVED), engine.restorable_tensors())
        engine.load_state(state)
        begin = SAVED + 1
    for step in range(begin, case.steps + 1):
        handles = []
        if case.spoil == world.rank and step == 2:
            assert engine.model.pipeline is not None
            block = engine.model.layers[engine.model.pipeline.stages[-1].begin]
            handles.append(block.register_forward_pre_hook(lambda _, args: (args[0] * torch.nan, *args[1:])))
        result = train_step(engine, step, engine.share_of(batches[step]), 1)
        for handle in handles:
            handle.remove()
        line = {key: float(value) for key, value in result.metrics.items()} | {"ok": float(result.verdict.ok)}
        line["norm"] = float(engine.optimizer.norms(torch.tensor(True))[0])
        line["bias"] = float(torch.stack(engine.model.router_bias).double().abs().sum())
        line["scale"] = float(engine.arena.scale.double().sum())
        lines.append(line)
        if case.saves and step == SAVED:
            checkpointer = Checkpointer(folder / name, 0, lambda *_, **__: None, world)
            checkpointer.save(step, engine.state(), {})
            checkpointer.close()
    held_out = mean_loss(engine.model, [batch[:1] for batch in batches[:3]], 1, world)
    found = {"lines": lines, "validation": held_out}
    if engine.pipelined is not None:
        found["idle"] = [share for (share,) in world.gather_numbers([engine.pipelined.clock.idle_share])]
        schedule: Any = engine.pipelined._schedule
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            received = [info for chunks in (stage.args_recv_info, stage.grad_recv_info) for info in chunks.values()]
            buffers = [getattr(info, "buffer", None) for infos in received for info in infos]
            assert all(buffer is None or buffer.is_meta for buffer in buffers), "between steps there are none"
    assert all(str(other) == str(found) for other in world.gather(found)), "the same on every rank"
    return found


@pytest.fixture(scope="module")
def runs(ask_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What each world size computed."""
    return ask_ranks(__file__, CASES, str(tmp_path_factory.mktemp("checkpoints")))


def gap(ours: Any, theirs: Any, key: str) -> float:
    return max(abs(a[key] - b[key]) for a, b in zip(ours["lines"], theirs["lines"], strict=True))


ALONE = [
    (4, "plain", "plain"),
    (2, "in turn", "plain"),
    (2, "in turn fp8", "fp8"),
    (2, "zbv", "plain"),
    (2, "zbv fp8", "fp8"),
    (4, "zbv", "seven"),
]


@pytest.mark.parametrize(("size", "name", "one"), ALONE)
def test_stages_alone_change_no_bit(runs: dict[int, Any], size: int, name: str, one: str) -> None:
    """Each number is made of the same ones in the same order; the balance losses of stages are added at the end."""
    ours, theirs = runs[size][name], runs[1][one]
    for key in ("loss/lm", "loss/mtp", "optim/grad_norm", "norm", "bias", "scale"):
        assert gap(ours, theirs, key) == 0, key
    assert gap(ours, theirs, "loss/total") < 1e-5 and gap(ours, theirs, "loss/balance") < 1e-6
    assert ours["validation"] == pytest.approx(theirs["validation"], abs=1e-6)


BESIDE = ("plain shard", "plain context", "plain tensor", "documents replicate", "plain zbv expert")


@pytest.mark.parametrize(("name", "one"), [(name, name.split()[0]) for name in BESIDE])
def test_with_ranks_in_a_stage_the_curve_is_that_of_one_process(runs: dict[int, Any], name: str, one: str) -> None:
    ours, theirs = runs[4][name], runs[1][one]
    assert all(gap(ours, theirs, key) < 1e-5 for key in LOSSES)
    assert gap(ours, theirs, "optim/grad_norm") < 1e-3 and gap(ours, theirs, "norm") < 1e-3
    assert gap(ours, theirs, "bias") == 0
    assert abs(ours["validation"] - theirs["validation"]) < 1e-5


@pytest.mark.parametrize(("size", "name"), [(4, "spoilt"), (2, "zbv spoilt")])
def test_a_nan_in_a_stage_skips_the_step_on_all_ranks(runs: dict[int, Any], size: int, name: str) -> None:
    lines = runs[size][name]["lines"]
    assert [line["ok"] for line in lines] == [1, 0, 1]
    assert all(lines[1][key] == lines[0][key] for key in ("norm", "bias"))
    assert lines[2]["norm"] != lines[1]["norm"]


@pytest.mark.parametrize(("name", "saved"), [("resumed", "in turn"), ("resumed zbv", "zbv")])
def test_one_process_resumes_what_stages_saved(runs: dict[int, Any], name: str, saved: str) -> None:
    ours, theirs = runs[1][name]["lines"], runs[2][saved]["lines"][SAVED:]
    for key in ("loss/lm", "loss/mtp", "optim/grad_norm", "norm", "bias"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], key


@pytest.mark.parametrize(
    ("size", "name", "saved"),
    [(1, "resumed tensor", "plain tensor"), (4, "tensor resumed", "plain"), (4, "in turn resumed", "plain")],
)
def test_runs_of_other_layouts_resume_each_other(runs: dict[int, Any], size: int, name: str, saved: str) -> None:
    ours, theirs = runs[size][name]["lines"], runs[4][saved]["lines"][SAVED:]
    for key in (*LOSSES, "optim/grad_norm", "norm"):
        assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=1e-5), key


def test_every_rank_measures_how_long_it_waits(runs: dict[int, Any]) -> None:
    """Microbatches of a stage are one behind the other, and in between it waits, for messages at least."""
    for name in ("plain", "zbv"):
        assert len(runs[4][name]["idle"]) == 4 and all(0 < share < 1 for share in runs[4][name]["idle"])


def test_blocks_are_divided_so_that_the_slowest_stage_has_least() -> None:
    assert divide([1.0] * 8, 0.0, 4) == [2, 2, 2, 2]
    assert divide([1.0] * 8, 2.0, 2) == [5, 3]
    assert divide([3.0, 1.0, 1.0, 1.0], 0.0, 2) == [1, 3]
    assert divide([1.0] * 3, 50.0, 3) == [1, 1, 1], "each has a block"
    assert divide_among((0, 1, 0, 1), [1.0] * 8, 0.0) == [2, 2, 2, 2]
    assert divide_among((0, 1, 2, 3) * 2, [1.0] * 13, 3.0) == [2, 2, 2, 1, 2, 2, 2, 0], "but the last one"
    assert divide_among((0, 1, 1, 0), [1.0] * 7, 1.0) == [2, 2, 2, 1], "the first rank has the last one"


def test_the_bubble_is_no_smaller_than_that_of_equal_stages() -> None:
    """(p - 1) / (m + p - 1) of arXiv 2104.04473; more microbatches make it smaller."""
    shares = []
    for microbatches in (4, 12, 240):
        keys = ("model.vocab_size=512", "precision=bf16", f"trainer.global_batch_size={microbatches}")
        config = composed.config_of([*RUN, *keys])
        plan = check(config)
        assert sum(blocks_of_stages(config, plan, 4)) == config.model.num_layers
        shares.append(idle_share(config, plan, Degrees(pipeline=4)))
        assert 3 / (microbatches + 3) <= shares[-1] < 1
    assert shares == sorted(shares, reverse=True)


def test_memory_is_that_of_the_stage_that_holds_most() -> None:
    """Its own blocks' states; of the first of two stages, activations of two microbatches."""
    keys = "model.num_mtp_layers=0", "model.vocab_size=512"
    config = composed.config_of([*RUN, *keys, "precision=bf16", "parallel.stages=[4,1]"])
    plan = check(config)
    whole, half = (forecast_memory(config, plan, degrees) for degrees in (Degrees(shard=2), Degrees(pipeline=2)))
    assert whole["parameters"] < half["parameters"] < 2 * whole["parameters"]
    assert whole["activations"] < half["activations"] < 2 * whole["activations"]
    blocks = forecast_memory(config, plan, Degrees())["parameters"] - half["parameters"]
    assert blocks > 4 * config.model.vocab_size * config.model.hidden_size, "the head is the other's, and a block"


REFUSED = [
    (["parallel.pipeline=6"], 6, "parallel.pipeline=6: there are model.num_layers=5 blocks; set 3"),
    (["parallel.pipeline=3"], 4, "parallel.pipeline=3: it does not divide the 4 processes; set 2"),
    ([TWO], 4, "with parallel.replicate=1 and parallel.pipeline=2 it needs 2 ranks"),
    ([TWO, "parallel.stages=[3,3]"], 2, "set one number a stage with this sum, or null"),
    ([TWO, "parallel.schedule=zbv"], 2, "a rank has two stages; set parallel.stages_per_rank=2, or parallel.schedule="),
    (
        [*ZBV, "parallel.reduce_each_microbatch=true"],
        2,
        "set parallel.reduce_each_microbatch=auto, or parallel.schedule=",
    ),
    ([*ZBV, "compile.enabled=true"], 2, "set compile.enabled=auto, or parallel.schedule=interleaved"),
    ([TWO, "parallel.stages_per_rank=4"], 2, "parallel.stages_per_rank=4: .* set at most 3"),
    ([*IN_TURN, "trainer.global_batch_size=5"], 2, "a rank's 5 microbatches form 2 rounds; set 4, or another"),
    ([TWO, "trainer.global_batch_size=1"], 2, "trainer.global_batch_size=1: .* set 2 or a multiple of it"),
    (
        [TWO, "trainer.phases=[{until:1},{microbatch_size:4}]"],
        2,
        "trainer.global_batch_size=4: .* set 8 or a multiple of it",
    ),
    ([TWO, "trainer.document_masking=true"], 2, "model.num_mtp_layers=2: .* set 1"),
]


@pytest.mark.parametrize(("keys", "world", "message"), REFUSED)
def test_incompatible_pipeline_settings_are_refused(keys: list[str], world: int, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        # the vocabulary is checked before the stages
        check(composed.config_of([*RUN, "model.vocab_size=320", *keys]), world)


if __name__ == "__main__":
    run_cases(CASES, partial(train, folder=Path(sys.argv[2])), Path(sys.argv[1]))
