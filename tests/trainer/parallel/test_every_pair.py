"""Every axis of the mesh, alone and with each other one, trains as one process does: 20 steps, in FP32 within 1e-5.

The first ten steps from the seed, the others from the checkpoint that one process wrote after ten. A pair in FP8 is
nearer to one process in FP8 than that is to FP32; a NaN skips the step on all ranks of a pair. The
ranks run this file as a program, over gloo: all cases of a world size one after the other.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import composed
import pytest
import torch
from ranks import gradients, run_cases

from trainer.checkpoint import Checkpointer, checkpoint_name, read
from trainer.launch.world import World
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

STEPS, SAVED, LENGTH, BATCH = 20, 10, 16, 4
RUN = ["trainer.device=cpu", "precision=fp32", "precision.backend=reference", f"trainer.max_steps={STEPS}"]
RUN += [f"trainer.global_batch_size={BATCH}", "trainer.microbatch_size=1", f"trainer.sequence_length={LENGTH}"]
RUN += ["model.vocab_size=64", "model.hidden_size=64", "model.num_layers=4", "model.num_mtp_layers=1"]
RUN += ["model.balance_loss_weight=0.01", "data=text", "data.path=.", "optim.lr=5e-4", "optim.warmup_steps=2"]
LOSSES = ("loss/total", "loss/lm", "loss/mtp", "loss/balance")

AXES: dict[str, tuple[str, ...]] = {
    axis: (f"parallel.{axis}=2",) for axis in ("replicate", "shard", "context", "tensor", "pipeline")
}
AXES["in turn"] = "parallel.pipeline=2", "parallel.stages_per_rank=2"
AXES["zbv"] = *AXES["in turn"], "parallel.schedule=zbv"
STAGES = "pipeline", "in turn", "zbv"
EXPERT = ("parallel.expert=2",)
ALONE = {**AXES, "shard expert": AXES["shard"] + EXPERT}
PAIRS = {f"{a} {b}": AXES[a] + AXES[b] for a, b in combinations(AXES, 2) if not {a, b} <= set(STAGES)}
WITH_EXPERT = {f"{axis} expert": AXES[axis] + EXPERT for axis in ("replicate", "context", "tensor")}
FOUR = {"shard four expert": ("parallel.shard=4", *EXPERT)}
FOUR |= {f"shard {axis} expert": AXES["shard"] + AXES[axis] + EXPERT for axis in STAGES}
EIGHT = {
    "shard context in turn": AXES["shard"] + AXES["context"] + AXES["in turn"],
    "shard tensor pipeline expert": AXES["shard"] + AXES["tensor"] + AXES["pipeline"] + ("parallel.expert=4",),
    "replicate context tensor": AXES["replicate"] + AXES["context"] + AXES["tensor"],
}
CASES: dict[int, dict[str, tuple[str, ...]]] = {1: {"one": ()}, 2: ALONE | WITH_EXPERT, 4: PAIRS | FOUR, 8: EIGHT}
ALIKE = [(size, name) for size in (2, 4, 8) for name in CASES[size]]
FP8, PAIR = ("precision=fp8_delayed",), AXES["context"] + AXES["tensor"]
CASES[1] |= {"fp8": FP8}
CASES[4] |= {"fp8 context tensor": FP8 + PAIR, "fp8 tensor pipeline": FP8 + AXES["tensor"] + AXES["pipeline"]}
CASES[4] |= {"spoilt context tensor": PAIR, "spoilt tensor pipeline": AXES["tensor"] + AXES["pipeline"]}


def train(name: str, keys: tuple[str, ...], world: World, folder: Path) -> dict[str, Any]:
    """What each step says."""
    engine = build_engine(composed.config_of([*RUN, *keys]), world.device, world=world)
    generator = torch.Generator().manual_seed(3)
    lines, first = [], {}
    for step in range(1, STEPS + 1):
        if step == SAVED + 1 and world.is_distributed:
            one = folder / ("fp8" if FP8[0] in keys else "one")
            engine.load_state(read(one / checkpoint_name(SAVED), engine.restorable_tensors())[0])
        tokens = torch.randint(0, 64, (BATCH, LENGTH + 1), generator=generator)
        handles = []
        if name.startswith("spoilt") and step == 3 and world.rank == 1:
            block = engine.model.layers[0 if engine.model.pipeline is None else engine.model.pipeline.stages[0].begin]
            handles.append(block.register_forward_pre_hook(lambda _, args: (args[0] * torch.nan, *args[1:])))
        result = train_step(engine, step, engine.share_of(tokens), 1)
        for handle in handles:
            handle.remove()
        lines.append({key: float(result.metrics[key]) for key in (*LOSSES, "optim/grad_norm")})
        lines[-1] |= {"ok": float(result.verdict.ok), "norm": float(engine.optimizer.norms(torch.tensor(True))[0])}
        first = first or gradients(engine, world)
        if step == SAVED and not world.is_distributed:
            checkpointer = Checkpointer(folder / name, 0, lambda *_, **__: None, world)
            checkpointer.save(step, engine.state(), {})
            checkpointer.close()
    return {"lines": lines, "gradients": first}


@pytest.fixture(scope="module")
def runs(ask_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What each world size computed."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return ask_ranks(__file__, CASES, folder, patience=3600)  # four ranks have thirty cases


@pytest.mark.exhaustive
@pytest.mark.parametrize(("size", "name"), ALIKE)
def test_losses_and_gradients_are_those_of_one_process(runs: dict[int, Any], size: int, name: str) -> None:
    ours, one = runs[size][name], runs[1]["one"]
    for key in LOSSES:
        assert [line[key] for line in ours["lines"]] == pytest.approx([line[key] for line in one["lines"]], abs=1e-5)
    for parameter, (total, norm) in one["gradients"].items():
        assert ours["gradients"][parameter][0] == pytest.approx(total, abs=1e-5 * max(norm, 1)), parameter
        assert ours["gradients"][parameter][1] == pytest.approx(norm, rel=1e-5, abs=1e-8), parameter


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in CASES[4] if name.startswith("fp8")])
def test_a_pair_in_fp8_is_nearer_to_fp8_than_that_is_to_fp32(runs: dict[int, Any], name: str) -> None:
    def far(a: Any, b: Any) -> float:
        return max(abs(x["loss/lm"] - y["loss/lm"]) for x, y in zip(a["lines"], b["lines"], strict=True))

    assert far(runs[4][name], runs[1]["fp8"]) < far(runs[1]["fp8"], runs[1]["one"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in CASES[4] if name.startswith("spoilt")])
def test_a_nan_skips_the_step_on_all_ranks(runs: dict[int, Any], name: str) -> None:
    before, spoilt, after = runs[4][name]["lines"][1:4]
    assert [line["ok"] for line in (before, spoilt, after)] == [1, 0, 1]
    assert before["norm"] == spoilt["norm"] != after["norm"]


if __name__ == "__main__":
    run_cases(CASES, partial(train, folder=Path(sys.argv[2])), Path(sys.argv[1]))
