"""Experts spread over processes compute what one process computes on the whole batch: values, gradients, amaxes; and in
fixed slots the same bits as without.

The processes run this file as a program, each on its sequences of the batch, all cases one after the other.
"""

import os
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor

from models import DeepSeek, ModelConfig
from models.block import MoEBlock
from models.config import Activation
from models.dispatch import largest
from models.slots import OBSERVED, SPARE, Slots, room
from models.transport import EqualSplits
from models.two_hops import Hops
from precision import Plan, PrecisionConfig, ScalingArena, begin_step, bind

PRECISIONS = Path(__file__).parents[2] / "configs" / "precision"
SIZES = {"vocab_size": 96, "hidden_size": 144, "num_layers": 3, "num_heads": 3, "kv_lora_rank": 16}
SIZES |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "intermediate_size": 64}
SIZES |= {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_token": 2, "routed_scaling_factor": 2.5}
SEQUENCES, LENGTH = 4, 12
SIZE = 4  # processes
CURRENT = "scaling.method=current", "scaling.granularity=tensor"


class Case(NamedTuple):
    """What to compute. only: the experts that tokens may choose. history: whether scales are known."""

    recipe: str
    keys: tuple[str, ...] = ()
    only: tuple[int, ...] = ()
    history: bool = True
    activation: Activation = Activation.swiglu


CASES = {
    "fp32": Case("fp32"),
    "starved": Case("fp32", only=(0, 3, 4, 6)),
    "one_process": Case("fp32", only=(2, 3)),
    "bf16": Case("bf16"),
    "delayed": Case("fp8_delayed"),
    "delayed_one_process": Case("fp8_delayed", only=(2, 3)),
    "no_history": Case("fp8_delayed", history=False),
    "current": Case("fp8_delayed", CURRENT),
    "row": Case("fp8_jit"),
    "block": Case("fp8_block"),
    "block_one_process": Case("fp8_block", only=(2, 3)),
    "ungated_one_process": Case("bf16", only=(2, 3), activation=Activation.xielu),
    "tokens_in_bf16": Case("fp8_delayed", ("table.moe.dispatch=bf16",)),
}
OF_TWO = "one_process", "delayed", "block_one_process"  # which two processes compute, too


@cache
def precision_of(recipe: str, keys: tuple[str, ...]) -> PrecisionConfig:
    base = OmegaConf.structured(PrecisionConfig), OmegaConf.load(PRECISIONS / f"{recipe}.yaml")
    return OmegaConf.to_object(OmegaConf.merge(*base, OmegaConf.from_dotlist([*keys])))  # type: ignore[return-value]


def build(
    case: Case, group: dist.ProcessGroup | None = None, by: Slots | Hops | None = None
) -> tuple[DeepSeek, ScalingArena]:
    """A model with random weights, its experts spread over the group."""
    config = ModelConfig(**SIZES, activation=case.activation)  # type: ignore[arg-type]
    plan = Plan(precision_of(case.recipe, ("backend=reference", *case.keys)), config.num_layers)
    with torch.device("meta"):
        model = DeepSeek(config, plan)
    model.to_empty(device="cpu")
    model.init_weights(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
        for bias in model.router_bias:
            bias.normal_(0.0, 0.1, generator=generator)
            if case.only:
                bias[[e for e in range(8) if e not in case.only]] = -10.0
    for _, block in model.iter_blocks():
        if group is not None and isinstance(block, MoEBlock):
            block.moe.spread(group, by)
    return model, bind(model, plan, "cpu")


def one_layer(
    case: Case, amax: Tensor | None, rank: int = 0, size: int = 1, group=None, by: Slots | Hops | None = None
) -> dict[str, Tensor]:
    """A norm and the layer of experts behind it on this process's share of the batch. amax: of a step before."""
    model, arena = build(case, group, by)
    block = model.get_submodule("layers.1")
    assert isinstance(block, MoEBlock)
    if amax is not None:
        arena.amax.copy_(amax)
        arena.commit(torch.tensor(True))
    begin_step(model, arena)
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float32 if case.recipe == "fp32" else torch.bfloat16
    h, upstream = (torch.randn(2, SEQUENCES * LENGTH, 144, generator=generator)).to(dtype).unbind()
    h, upstream = (x.chunk(size)[rank].clone() for x in (h, upstream))
    h.requires_grad_()
    assert block.ffn_norm is not None
    y, loss, load = block.moe(block.ffn_norm(h, block.moe.feed), SEQUENCES // size)
    (loss / size).backward(retain_graph=True)
    y.backward(upstream)
    assert h.grad is not None
    made = {"y": y.detach(), "loss": loss.detach() / size, "load": load, "amax": arena.amax, "dh": h.grad}
    return made | {f"grad.{n}": p.grad for n, p in block.named_parameters() if p.grad is not None}


def whole_model(case: Case, rank: int = 0, size: int = 1, group=None) -> dict[str, Tensor]:
    """Loss and gradients of a model with MTP, as their mean over processes has to be."""
    model, arena = build(case, group)
    begin_step(model, arena)
    tokens = torch.randint(96, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    losses = model(tokens.chunk(size)[rank])
    (losses.total / size).backward()
    made = {"loss": losses.total.detach() / size, "load": losses.load, "amax": arena.amax}
    return made | {f"grad.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}


def main(folder: Path) -> None:
    """One process: all cases, results into a file."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    try:
        group = dist.group.WORLD
        assert group is not None
        amaxes = torch.load(folder / "amaxes.pt")
        cases = {name: case for name, case in CASES.items() if size == SIZE or name in OF_TWO}
        made = {name: one_layer(case, amaxes[name], rank, size, group) for name, case in cases.items()}
        for name, case in cases.items():
            slots = Slots(EqualSplits(group), 4.0, torch.zeros(()))
            again = one_layer(case, amaxes[name], rank, size, group, slots)
            made[f"{name} in slots"] = again | {"fill": slots.fill}
        if size == SIZE:  # as two nodes of two processes
            axes = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
            hops = Hops(axes["nodes"].get_group(), axes["node"].get_group(), group)
            for name, case in cases.items():
                made[f"{name} in hops"] = one_layer(case, amaxes[name], rank, size, group, hops)
        slots = Slots(EqualSplits(group), 0.3, torch.zeros(()))  # of two processes too few slots, of four too few rows
        crowd = one_layer(CASES["one_process"], None, rank, size, group, slots)
        made["crowd"] = {"fill": slots.fill, **{key: value for key, value in crowd.items() if key in ("y", "dh")}}
        made["model"] = whole_model(CASES["fp32"], rank, size, group)
        numbers = torch.tensor([rank / 8, 1 / (rank + 1), torch.nan if rank == 1 else 2.0])
        made["largest"] = {"of": torch.stack([largest(x, group) for x in numbers])}
        torch.save(made, folder / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def single() -> dict[str, dict[str, Tensor]]:
    """What one process computes."""
    made = {}
    for name, case in CASES.items():
        before = one_layer(case, None)["amax"] if case.history else None
        made[name] = one_layer(case, before) | {"amax_before": before}
    return made | {"model": whole_model(CASES["fp32"])}


def on_ranks(size: int, single: dict, start_ranks, tmp_path_factory) -> list[dict[str, dict[str, Tensor]]]:
    """What each of `size` processes computes."""
    folder = tmp_path_factory.mktemp("processes")
    torch.save({name: single[name]["amax_before"] for name in CASES}, folder / "amaxes.pt")
    start_ranks(__file__, size, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def many(single: dict, start_ranks, tmp_path_factory) -> list[dict[str, dict[str, Tensor]]]:
    return on_ranks(SIZE, single, start_ranks, tmp_path_factory)


@pytest.fixture(scope="module")
def two(single: dict, start_ranks, tmp_path_factory) -> list[dict[str, dict[str, Tensor]]]:
    return on_ranks(2, single, start_ranks, tmp_path_factory)


def together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of all processes as those of one."""

    def join(key: str, tensors: list[Tensor]) -> Tensor:
        if key in ("y", "dh") or ".experts." in key:
            return torch.cat(tensors)
        return torch.stack(tensors).amax(0) if key == "amax" else torch.stack(tensors).sum(0)

    return {key: join(key, [part[key] for part in parts]) for key in parts[0]}


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("way", ["", " in hops"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_spread_over_processes_equals_one_process(name: str, way: str, single: dict, many: list) -> None:
    ours, theirs = together([part[f"{name}{way}"] for part in many]), single[name]
    assert torch.equal(ours["load"], theirs["load"])
    for key, value in ours.items():
        if name.startswith(("no_history", "current")):  # shared experts, and h, scale by their own process's numbers
            limit = 0.15
        elif CASES[name].recipe == "fp32":
            limit = 1e-6
        elif key == "amax" or ".experts." in key:
            limit = 1e-5  # equal bits, as far as the CPU's BF16 products do not depend on the number of rows
        else:
            limit = 4e-3  # sums over a process's experts, or tokens, are rounded to BF16 before they are added up
        assert error(value, theirs[key]) <= limit, key


def test_a_process_without_chosen_experts_has_gradients_of_zero(many: list) -> None:
    idle = [part["one_process"] for part in many if not part["one_process"]["grad.moe.experts.down.weight"].any()]
    assert len(idle) == len(many) - 1
    for part in idle:
        assert not part["grad.moe.experts.gate_up.weight"].any() and part["y"].any() and part["dh"].any()


def test_a_model_with_mtp_spread_over_processes_equals_one_process(single: dict, many: list) -> None:
    ours, theirs = together([part["model"] for part in many]), single["model"]
    assert any(key.startswith("grad.mtp.0.moe.experts") for key in ours)
    for key, value in ours.items():
        assert error(value, theirs[key]) < 1e-5, key


@pytest.mark.parametrize("name", CASES)
def test_slots_change_no_bit(name: str, two: list, many: list) -> None:
    for part in [*many, *(two if name in OF_TWO else [])]:
        theirs, ours = part[name], part[f"{name} in slots"]
        assert 0 <= ours.pop("fill") <= 1 and ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), key


def test_more_tokens_than_slots_are_noticed_where_they_arrive_and_are_left_out(two: list, many: list) -> None:
    for parts in (two, many):
        assert max(float(part["crowd"]["fill"]) for part in parts) > 1
        for part in parts:
            assert all(torch.isfinite(part["crowd"][key]).all() for key in ("y", "dh"))
        assert any(not torch.equal(part["crowd"]["y"], part["one_process"]["y"]) for part in parts)


def test_processes_agree_on_the_largest_of_their_numbers(two: list, many: list) -> None:
    for parts in (two, many):
        for part in parts:
            assert part["largest"]["of"][:2].tolist() == [(len(parts) - 1) / 8, 1.0]
            assert part["largest"]["of"][2].isnan()


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_room_of_slots(processes: int) -> None:
    tokens, chosen, each = 1000, 6, 64 // processes
    for capacity in (1.0, 1.25, 100.0):
        slots, choices = room(capacity, tokens, chosen, processes, each)
        even = tokens * (1 - (1 - 1 / processes) ** chosen)
        assert min(even * capacity, tokens) <= slots < min(even * capacity, tokens) + 17 and slots % 16 == 0
        assert capacity * tokens * chosen <= choices or choices == processes * slots * min(chosen, each)
    assert room(100.0, tokens, chosen, processes, each)[1] >= processes * tokens * min(chosen, each)  # whatever comes


if __name__ == "__main__":
    main(Path(sys.argv[1]))


def test_a_run_uses_slots_when_the_need_has_settled_and_fits_them_to_it() -> None:
    """Routing that grows by less than an eighth between reviews fits. A peak of the first steps is forgotten. A need
    of 93 % of the room (2.8 of 3) starts the count of calm reviews again."""
    slots = Slots(SimpleNamespace(group=None), 1.25, torch.zeros(()), OBSERVED)  # type: ignore[arg-type]
    for need, observing in ((2.0, 2), (4.0, 2), (2.4, 1), (2.8, 2), (2.4, 1), (1.5, 0)):
        slots.fit(need / slots.capacity)
        assert (slots.observing, slots.capacity) == (observing, pytest.approx(max(1.25, SPARE * need)))
    slots.fit(1.0 / slots.capacity)  # in slots: room that was made stays
    assert slots.capacity == pytest.approx(SPARE * 1.5)
    slots.fit(0.95)
    assert not slots.observing and slots.capacity == pytest.approx(SPARE * 1.5 * 0.95 * SPARE)
    slots.fit(1.01)
    assert slots.observing == OBSERVED, "steps were skipped"
