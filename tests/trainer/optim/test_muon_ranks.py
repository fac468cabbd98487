"""Muon where ranks share weights: each matrix has one owner, and the update is that of one process.

The ranks run this file as a program, over gloo: all cases of a world size one after the other.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import composed
import numpy as np
import pytest
import torch
from ranks import run_cases
from small import SMALL_MODEL
from torch import Tensor

from models.matrices import Division
from trainer.checkpoint import ShardView
from trainer.forecast.muon import busiest, muon_load, muon_size
from trainer.forecast.preflight import check
from trainer.forecast.stages import stage_models
from trainer.launch.world import World
from trainer.optim import muon as muon_module
from trainer.optim.exchange import Packing, rounds
from trainer.optim.muon import Muon
from trainer.optim.orthogonalise import flops
from trainer.optim.owners import Run, assign, layout
from trainer.parallel.mesh import Degrees
from trainer.parallel.shard_views import shard_view
from trainer.step.engine import Engine, build_engine
from trainer.step.train_step import train_step

STEPS = 2
RUN = ["trainer.device=cpu", "precision=fp32", "precision.backend=reference", f"trainer.max_steps={STEPS}"]
RUN += ["trainer.global_batch_size=4", "trainer.microbatch_size=1", "trainer.sequence_length=16", "data=text"]
RUN += ["data.path=.", "optim.warmup_steps=0", "optim=muon_wsd", "optim.muon.iteration=fp32", "optim.lr=1e-2"]
RUN += [*SMALL_MODEL, "model.vocab_size=64", "model.hidden_size=48", "model.num_heads=6"]
RUN += ["optim.qk_clip=1"]  # below any head's log-sum-exp: all are clipped in each step
FSDP, HSDP, DDP = ("parallel=fsdp",), ("parallel=hsdp", "parallel.shard=2"), ("parallel=hsdp", "parallel.shard=1")
BF16 = "optim.muon.iteration=bf16"
CASES: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"fp32": (), "bf16": (BF16,), "skipped": ()},
    2: {
        "fsdp fp32": FSDP,
        "fsdp bf16": (*FSDP, BF16),
        "tensor fp32": ("parallel.tensor=2",),
        "context fp32": ("parallel.context=2",),
        "pipeline fp32": ("parallel.pipeline=2",),
    },
    4: {
        "hsdp fp32": HSDP,
        "ddp fp32": DDP,
        "ep fp32": (*FSDP, "parallel.expert=2"),
        "ep over replicas fp32": (*HSDP, "parallel.expert=4"),
        "rounds fp32": (*HSDP, "parallel.expert=2"),
        "ep tensor fp32": (*FSDP, "parallel.expert=2", "parallel.tensor=2"),
        "pipeline fp32": ("parallel.pipeline=2", "parallel.shard=2"),
        "skipped": ("parallel.pipeline=2", "parallel.shard=2"),
    },
}
SMALL_ROUND = 2000  # numbers: about one matrix an owner


def weights(engine: Engine, world: World) -> dict[str, np.ndarray]:
    """All parameters and momenta, whole."""
    held = {f"weight {name}": p for name, p in engine.model.named_parameters()}
    for name, state in engine.optimizer.state_dict().items():
        held |= {f"{key} {name}": tensor for key, tensor in state.items() if tensor.dim()}
    mine = {}
    for name, tensor in held.items():
        view = shard_view(tensor)
        view = ShardView.whole(view) if isinstance(view, Tensor) else view
        mine[name] = view.data.numpy().copy(), view.offsets, tuple(view.shape)
    wholes = {name: np.full(shape, np.nan, np.float32) for name, (_, _, shape) in mine.items()}
    for theirs in world.gather(mine):
        for name, (part, offset, _) in theirs.items():
            place = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            here = wholes[name][place]
            assert np.isnan(here).all() or np.array_equal(here, part), f"replicas of {name} have the same bits"
            wholes[name][place] = part
    return wholes


def train(name: str, keys: tuple[str, ...], world: World, out: Path) -> dict[str, Any]:
    """What the steps leave, weights as a file beside `out`, and the numbers of experts that were sent."""
    muon_module.AT_ONCE = SMALL_ROUND if name == "rounds fp32" else 1 << 26
    config = composed.config_of([*RUN, *keys])
    engine = build_engine(config, world.device, world=world)
    generator = torch.Generator().manual_seed(0)
    result: dict[str, Any] = {"experts": 0, "messages": 0, "sent": 0, "norms": []}
    send = Packing.send

    def counted(self: Packing, come: Any, *ranks: Any) -> Any:
        result["messages"] += 1
        result["sent"] += self._buffer.nbytes
        result["experts"] += sum(rows.numel for _, rows in self.slots if ".experts." in rows.run.name)
        return send(self, come, *ranks)

    Packing.send = counted  # type: ignore[method-assign]
    before: dict[str, np.ndarray] = {}
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 64, (4, 17), generator=generator)
        spoils = name == "skipped" and step == STEPS
        if spoils:
            before = weights(engine, world)
        if spoils and world.rank == world.size - 1:
            _, block = engine.model.iter_blocks()[-1]
            block.register_forward_pre_hook(lambda _, args: (args[0] * torch.nan, *args[1:]))
        train_step(engine, step, engine.share_of(tokens), 1)
        result["norms"].append([float(norm) for norm in engine.optimizer.norms(torch.tensor(True))])
    Packing.send = send  # type: ignore[method-assign]
    after = weights(engine, world)
    if name == "skipped":
        result["kept"] = all(np.array_equal(before[key], after[key]) for key in after)
    result["experts"] = sum(world.gather(result["experts"]))
    result["sent"] = max(world.gather(result["sent"])), STEPS * muon_load(config, engine.plan, engine.degrees)[1]
    assert isinstance(engine.optimizer, Muon)
    if world.is_first:
        result["weights"] = str(out.with_name(f"{name}.npz"))
        np.savez(result["weights"], **after)  # type: ignore[arg-type]  (its stubs miss that names may be anything)
    return result


@pytest.fixture(scope="module")
def results(ask_ranks: Callable[..., Any]) -> dict[int, dict[str, Any]]:
    """What each world size computed."""
    return ask_ranks(__file__, CASES)


LAYOUTS = [(size, name) for size in (2, 4) for name in CASES[size] if name != "skipped"]


@pytest.mark.parametrize(("size", "name"), LAYOUTS)
def test_every_layout_has_the_weights_of_one_process(results: dict[int, Any], size: int, name: str) -> None:
    """In FP32 up to the order of sums. In BF16 an update's entries, of RMS at most the learning rate, differ by a few
    of its roundings."""
    ours, theirs = results[size][name], results[1][name.split()[-1]]
    mine, wholes = (dict(np.load(run["weights"])) for run in (ours, theirs))
    assert mine.keys() == wholes.keys()
    for key, whole in wholes.items():
        far = np.abs(mine[key].astype(np.float64) - whole)
        if name.endswith("fp32"):
            assert far.max() < 1e-5, key
        elif key.startswith("weight"):
            assert np.sqrt((far**2).mean()) < STEPS * 1e-2 * 10 * 2.0**-8, key
    np.testing.assert_allclose(ours["norms"], theirs["norms"], rtol=1e-5 if name.endswith("fp32") else 2.0**-5)


@pytest.mark.parametrize("size", [1, 4])
def test_a_skipped_step_changes_no_bit_on_any_rank(results: dict[int, Any], size: int) -> None:
    """Though one rank's loss was not a number, and messages carried the result."""
    assert results[size]["skipped"]["kept"]


@pytest.mark.parametrize(("size", "name"), LAYOUTS)
def test_a_step_has_two_messages_and_experts_without_replicas_none(
    results: dict[int, Any], size: int, name: str
) -> None:
    result, replicas = results[size][name], name.split()[0] in ("hsdp", "ddp", "rounds", "tensor")
    assert (result["experts"] > 0) is replicas
    alone = (size, name) == (2, "pipeline fp32")  # in its stage
    assert result["messages"] > 2 * STEPS if name == "rounds fp32" else result["messages"] == 2 * STEPS * (not alone)


DIVISIONS = {
    "q": ((24 * 12, 32), Division((24,))),
    "kv_b": ((32 * 12, 16), Division((16, 16))),
    "kv_a": ((40, 96), Division((32, 8))),
    "o": ((96, 64), Division((96,))),
    "proj": ((96, 192), Division((96,), columns=2)),
    "gate_up": ((160, 96), Division((80, 80))),
    "experts": ((12, 64, 96), Division((32, 32))),
}
DEGREES = [Degrees(*each) for each in ((1, 1, 1), (1, 4, 1), (1, 5, 1), (2, 4, 2), (3, 1, 3), (2, 2, 4), (1, 8, 4))]
DEGREES += [Degrees(*each) for each in ((2, 5, 1, 1, 1, 4), (1, 3, 1, 2, 1, 2), (1, 3, 4, 1, 1, 4))]


def places(run: Run) -> list[tuple[int, int, int]]:
    """Group, row and column of its matrices."""
    return [(group, run.box.row, run.box.column) for group in range(run.begin, run.end)]


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_every_matrix_has_one_owner_that_holds_some_of_it(degrees: Degrees) -> None:
    cuts = {"q": 0, "kv_b": 0, "o": 1}
    layouts = {n: layout(shape, division, degrees, cuts.get(n)) for n, (shape, division) in DIVISIONS.items()}
    runs, work = assign(layouts, 5, degrees.world)
    for name, each in layouts.items():
        found = sorted(place for run in runs if run.name == name for place in places(run))
        groups = each.parts[-1].end // each.division.period
        assert found == sorted((g, box.row, box.column) for g in range(groups) for box in each.boxes)
    for run in runs:
        each = layouts[run.name]
        top = run.begin * each.division.period + run.box.row
        parts = each.parts[run.first : run.last]
        assert (parts[0].begin <= top < parts[0].end and run.count == 1) or len(parts) == 1
        assert parts[-1].begin < (run.end - 1) * each.division.period + run.box.row + run.box.rows <= parts[-1].end
        assert any(run.owner in part.ranks for part in parts)
        assert "experts" not in run.name or len(parts) == 1
    each = [flops(run.box.rows, run.box.columns, 5) for run in runs]
    assert work.sum() == sum(run.count * cost for run, cost in zip(runs, each, strict=True))


def test_owners_share_the_work_evenly() -> None:
    """No rank has more than the mean and one matrix, where every rank holds a part of each."""
    layouts = {
        f"o{i}": layout((64 + 32 * (i % 3), 64), Division((64 + 32 * (i % 3),)), Degrees(2, 4)) for i in range(30)
    }
    _, work = assign(layouts, 5, 8)
    assert work.max() - work.mean() <= flops(128, 64, 5)


@pytest.mark.parametrize(("rows", "messages"), [(4 * 24, False), (4 * 24 * 3 // 2, True)])
def test_whole_heads_on_a_rank_need_no_message(rows: int, messages: bool) -> None:
    heads = {"q": layout((rows, 32), Division((24,)), Degrees(1, 4))}
    runs, _ = assign(heads, 5, 4)
    for rank in range(4):
        alone, shared = rounds(runs, heads, rank, 1 << 20)
        assert bool(shared) is messages and len(alone) == 1


@pytest.mark.parametrize(("size", "name"), LAYOUTS)
def test_the_forecast_knows_the_bytes_that_are_sent(results: dict[int, dict[str, Any]], size: int, name: str) -> None:
    sent, forecast = results[size][name]["sent"]
    assert sent == forecast


def test_the_busiest_owner_is_in_the_stage_with_most_work() -> None:
    config = composed.config_of([*RUN, "model.num_layers=3", "model.vocab_size=512"])
    plan, degrees = check(config), Degrees(pipeline=2)
    first, last = (muon_size(own, rows).flops for own, rows, _ in stage_models(config, plan, degrees))
    assert first != last
    assert busiest(config, plan, degrees) == pytest.approx(2 * max(first, last) / (first + last))


if __name__ == "__main__":
    run_cases(CASES, partial(train, out=Path(sys.argv[1])), Path(sys.argv[1]))
