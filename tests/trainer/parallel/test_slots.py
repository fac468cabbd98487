"""Runs whose tokens travel to experts in fixed slots are those without, bit for bit; too few slots cost a step, on all
ranks, and are more after it.

The ranks run this file as a program, over gloo.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import composed
import pytest
import torch
from ranks import joined

from models.slots import OBSERVED
from precision.errors import UserError
from trainer.launch.world import World
from trainer.parallel.collectives import all_max
from trainer.step.engine import build_engine
from trainer.step.guard import Reason
from trainer.step.train_step import train_step

RUN = ["trainer.device=cpu", "precision.backend=reference", "trainer.max_steps=9", "optim.warmup_steps=2", "data=text"]
RUN += ["trainer.global_batch_size=4", "trainer.microbatch_size=1", "trainer.sequence_length=32", "data.path=."]
RUN += ["model.vocab_size=512", "model.hidden_size=64", "model.num_layers=2", "parallel=fsdp", "parallel.expert=2"]
SLOTS = "parallel.dispatch=slots", "parallel.dispatch_capacity=3"
CASES = {"fp32": ["precision=fp32", "recompute=full"], "delayed": ["precision=fp8_delayed"]}
RUNS: dict[int, dict[str, list[str]]] = {2: {**CASES, **{f"{k} slots": [*v, *SLOTS] for k, v in CASES.items()}}}
RUNS[2]["crowded"] = RUNS[2]["observed"] = ["precision=fp8_delayed", *SLOTS]
RUNS[2]["crowded fp16"] = ["precision=fp16", *SLOTS]
STEPS, CROWDED = 3, 2


def train(name: str, keys: list[str], world: World) -> list[dict[str, Any]]:
    """What each step was."""
    config = composed.config_of([*RUN, *keys])
    engine, lines = build_engine(config, world.device, world=world), []
    generator = torch.Generator().manual_seed(3)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 512, (4, 33), generator=generator)
        slots = engine.model.slots
        if slots is not None:
            if step == 1:
                assert slots.observing == OBSERVED, "a run begins without slots"
            elif name != "observed":
                slots.observing = 0
            if step == CROWDED and name in ("crowded", "crowded fp16", "observed"):
                slots.capacity = 0.3
        result = train_step(engine, step, engine.share_of(tokens), config.trainer.microbatch_size)
        line: dict[str, Any] = {k: float(v) for k, v in result.metrics.items() if k != "moe/slot_fill"}
        line["ok"], line["place"] = bool(result.verdict.ok), engine.guard.places[int(result.verdict.place)]
        line["scale"] = float(engine.arena.scale.double().sum())
        line["weights"] = float(engine.optimizer.norms(torch.tensor(True))[0])
        if slots is not None:
            assert result.verdict.fill is not None
            slots.fit(float(result.verdict.fill))
            reason: Reason | None = engine.guard.crowded(result.verdict, slots.capacity)
            line |= {"fill": float(result.verdict.fill), "reason": reason and reason.line, "room": slots.capacity}
            line["observing"] = slots.observing
        assert len({str(other) for other in world.gather(line)}) == 1, "the same on every rank"
        lines.append(line)
    return lines


def check_resume(world: World) -> None:
    """A checkpoint keeps the room and whether slots are in use, for the same least room."""
    config = composed.config_of([*RUN, *SLOTS])
    engine, again = (build_engine(config, world.device, world=world) for _ in range(2))
    saved, resumed = engine.model.slots, again.model.slots
    assert saved is not None and resumed is not None
    saved.fit(2.0)
    saved.fit(0.5)
    state = json.loads(json.dumps(engine.state()["slots"]))
    again.load_state(again.state() | {"slots": state})
    assert (resumed.capacity, resumed.observing) == (saved.capacity, saved.observing) != (3.0, OBSERVED)
    other = build_engine(composed.config_of([*RUN, *SLOTS[:1]]), world.device, world=world).model.slots
    assert other is not None
    other.load_state_dict(state)
    assert (other.capacity, other.observing) == (1.25, OBSERVED)


def main(out: Path) -> None:
    with joined() as world:
        all_max([torch.zeros(())], world)
        made = {name: train(name, keys, world) for name, keys in RUNS[world.size].items()}
        with pytest.raises(UserError, match=r"parallel.dispatch=symmetric: .*; set parallel.dispatch=slots"):
            build_engine(composed.config_of([*RUN, "parallel.dispatch=symmetric"]), world.device, world=world)
        auto = build_engine(composed.config_of([*RUN, "parallel.dispatch=auto"]), world.device, world=world)
        assert auto.model.slots is None, "CPUs do not write into each other's memory"
        check_resume(world)
        if world.is_first:
            out.write_text(json.dumps(made))


@pytest.fixture(scope="module")
def runs(ask_ranks: Callable[..., Any]) -> dict[str, list[dict[str, Any]]]:
    return ask_ranks(__file__, RUNS)[2]


@pytest.mark.parametrize("name", CASES)
def test_a_run_in_slots_is_the_same_run(name: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    assert all(line["ok"] for line in runs[name])
    for ours, theirs in zip(runs[f"{name} slots"], runs[name], strict=True):
        assert {key: ours[key] for key in theirs} == theirs and 0 <= ours["fill"] <= 1 and ours["reason"] is None


def test_a_run_observes_how_much_room_it_needs_and_skips_nothing_meanwhile(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    lines = runs["observed"]
    assert all(line["ok"] and line["reason"] is None for line in lines)
    assert lines[1]["fill"] > 1 and lines[1]["room"] > 0.3 * lines[1]["fill"]
    assert [line["observing"] for line in lines][:2] == [OBSERVED - 1, OBSERVED]
    same = {key: [line[key] for line in lines] for key in ("weights", "scale")}
    assert same == {key: [line[key] for line in runs["delayed"]] for key in same}


def test_a_step_with_too_few_slots_changes_nothing_and_the_next_has_more(runs: dict[str, list[dict[str, Any]]]) -> None:
    lines = runs["crowded"]
    assert [line["ok"] for line in lines] == [True, False, True]
    before, skipped, after = lines
    assert skipped["fill"] > 1 and skipped["place"] == "experts' slots (capacity)"
    assert [skipped[key] for key in ("scale", "weights")] == [before[key] for key in ("scale", "weights")]
    assert skipped["reason"].startswith("step 2 was skipped: a rank's experts were sent ")
    assert f"parallel.dispatch_capacity={skipped['room']:.3g}" in skipped["reason"]
    assert after["fill"] <= 1 and after["weights"] != skipped["weights"] and skipped["room"] > 0.3


def test_a_step_with_too_few_slots_does_not_lower_the_loss_scale(runs: dict[str, list[dict[str, Any]]]) -> None:
    lines = runs["crowded fp16"]
    assert [line["ok"] for line in lines] == [True, False, True] and lines[1]["fill"] > 1
    assert len({line["optim/loss_scale"] for line in lines}) == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
