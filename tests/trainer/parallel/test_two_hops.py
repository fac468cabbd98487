"""Runs whose tokens travel to experts on several nodes in two hops are those of plain all-to-all.

Four ranks run this file as a program, over gloo, as two nodes of two.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import composed
import pytest
import torch
from ranks import joined
from torch import distributed as dist

from models import transport
from models.two_hops import TwoHopDispatcher
from precision.errors import UserError
from trainer.launch.world import World
from trainer.parallel.collectives import all_max
from trainer.parallel.shard_views import local
from trainer.step.engine import Engine, build_engine
from trainer.step.train_step import train_step

RUN = ["trainer.device=cpu", "precision.backend=reference", "trainer.max_steps=9", "optim.warmup_steps=2", "data=text"]
RUN += ["trainer.global_batch_size=4", "trainer.microbatch_size=1", "trainer.sequence_length=32", "data.path=."]
RUN += ["model.vocab_size=512", "model.hidden_size=64", "model.num_layers=2", "parallel=fsdp", "parallel.expert=4"]
CASES = {"fp32": ["precision=fp32", "recompute=full"]}
CASES |= {"fp8_delayed": ["precision=fp8_delayed"], "fp8_block": ["precision=fp8_block"]}
WAYS = "all_to_all", "two_hops"
STEPS = 2
OPERAND = "layers.1.moe.experts.down:input"
Made = dict[str, Any]


def train(engine: Engine, world: World) -> Made:
    """Losses of some steps, and the first step's amax of the experts' activations in the first layer that has experts.
    Tokens of rank 0 have an outlier, which gives the ranks different amaxes of their own."""
    generator, losses, amax = torch.Generator().manual_seed(3), [], 0.0
    if world.is_first:
        with torch.no_grad():
            local(engine.model.embed.weight)[0] = torch.eye(64)[0]
    for step in range(1, STEPS + 1):
        tokens = torch.randint(1, 512, (4, 33), generator=generator)
        tokens[0, ::4] = 0
        result = train_step(engine, step, engine.share_of(tokens), 1)
        assert bool(result.verdict.ok)
        losses.append(float(result.metrics["loss/total"]))
        if step == 1 and OPERAND in engine.arena.names:
            amax = float(engine.arena.amax[engine.arena.names.index(OPERAND)])
    assert len(set(map(str, world.gather(losses)))) == 1, "the same on every rank"
    return {"losses": losses, "amax": amax}


def check_shared_memory(world: World) -> None:
    """Where the GPUs of one group of experts are on two nodes, no group shares memory."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
        patch.setattr(transport, "has_atomics", lambda *_: True)
        for nodes, shares in (("0011", True), ("0012", False)):
            patch.setattr(transport.socket, "gethostname", lambda nodes=nodes: nodes[world.rank])
            found = transport.shares_memory(groups[world.rank // 2], torch.device("cuda", world.rank))  # type: ignore
            assert found is shares, f"rank {world.rank} of nodes {nodes}"


def main(out: Path) -> None:
    with joined() as world:
        check_shared_memory(world)
        all_max([torch.zeros(())], world)

        def build(*keys: str) -> Engine:
            return build_engine(composed.config_of([*RUN, *keys]), world.device, world=world)

        for nodes, size, ranks in (("0000", 4, "4"), ("0001", 4, "3, 1"), ("0122", 2, "2")):
            os.environ["GROUP_RANK"] = nodes[world.rank]
            with pytest.raises(UserError, match=rf"two_hops: parallel.expert={size} ranks .* \(here {ranks}\); set "):
                build("parallel.dispatch=two_hops", f"parallel.expert={size}")
        os.environ["GROUP_RANK"] = "0011"[world.rank]
        made = {}
        for name, keys in CASES.items():
            for way in WAYS:
                engine = build(*keys, f"parallel.dispatch={way}")
                hops = [m.dispatcher for m in engine.model.modules() if hasattr(m, "dispatcher")]
                assert hops and all(isinstance(each, TwoHopDispatcher) == (way == "two_hops") for each in hops)
                made[f"{name} {way}"] = train(engine, world)
        if world.is_first:
            out.write_text(json.dumps(made))


@pytest.fixture(scope="module")
def runs(ask_ranks: Callable[..., dict[int, dict[str, Made]]]) -> dict[str, Made]:
    return ask_ranks(__file__, [4])[4]


@pytest.mark.parametrize("name", CASES)
def test_a_run_in_two_hops_is_the_same_run(name: str, runs: dict[str, Made]) -> None:
    """In FP8, up to the rounding of a node's sums to BF16, of 2^-9."""
    theirs, ours = (runs[f"{name} {way}"]["losses"] for way in WAYS)
    assert ours == pytest.approx(theirs, rel=1e-6 if CASES[name][0] == "precision=fp32" else 2**-9)


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_block"])
def test_experts_are_given_the_same_numbers_under_one_scale_of_all_ranks(name: str, runs: dict[str, Made]) -> None:
    """In the first layer with experts nothing has been summed yet: two factors of BF16, of 2^-8 each, and their
    product."""
    theirs, ours = (runs[f"{name} {way}"]["amax"] for way in WAYS)
    assert 0 < ours == pytest.approx(theirs, rel=3 * 2**-8)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
