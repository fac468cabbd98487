"""Two GPUs that share a layer's experts compute over NCCL what one GPU computes on the whole batch, kernels included.

The processes run this file as a program, each on its half of the tokens, all recipes one after the other.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor

from models import DeepSeek, ModelConfig
from models.block import MoEBlock
from precision import Plan, PrecisionConfig, begin_step, bind
from precision.hardware import detect

PRECISIONS = Path(__file__).parents[3] / "configs" / "precision"
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 512, "num_layers": 3, "num_heads": 4, "kv_lora_rank": 64}
SIZES |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "intermediate_size": 512}
SIZES |= {"moe_intermediate_size": 272, "num_experts": 16, "num_experts_per_token": 6}
SEQUENCES, LENGTH, WORLD = 4, 777, 2
RECIPES = ["bf16", "fp8_delayed", "fp8_jit", "fp8_block"]
CASES = [f"{recipe}-{only}" for recipe in RECIPES for only in ("all", "first half")]  # the second: one GPU gets nothing

needs_two = pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")


def layer(case: str, amaxes: list[Tensor], rank: int = 0, size: int = 1, group: Any = None) -> dict[str, Tensor]:
    """A norm and the layer of experts behind it on this process's tokens, after steps with these amaxes."""
    recipe, only = case.split("-")
    device = torch.device("cuda", rank)
    base = OmegaConf.structured(PrecisionConfig), OmegaConf.load(PRECISIONS / f"{recipe}.yaml")
    precision = OmegaConf.merge(*base, OmegaConf.from_dotlist(["backend=cuda"]))
    config = ModelConfig(**SIZES)
    plan = Plan(OmegaConf.to_object(precision), config.num_layers, detect(device))  # type: ignore[arg-type]
    with torch.device("meta"):
        model = DeepSeek(config, plan)
    model.to_empty(device=device)
    model.init_weights(seed=0)
    for bias in model.router_bias:
        bias.zero_()
        bias[8 if only == "first half" else 16 :] = -10.0
    block = model.get_submodule("layers.1")
    assert isinstance(block, MoEBlock)
    for _, other in model.iter_blocks():
        if group is not None and isinstance(other, MoEBlock):
            other.moe.spread(group)
    arena = bind(model, plan, device)
    for amax in amaxes:
        arena.amax.copy_(amax)
        arena.commit(arena.finite())
    begin_step(model, arena)
    generator = torch.Generator().manual_seed(3)
    h, upstream = torch.randn(2, SEQUENCES * LENGTH, 512, generator=generator).to(device, torch.bfloat16).unbind()
    h, upstream = (x.chunk(size)[rank].clone() for x in (h, upstream))
    h.requires_grad_()
    assert block.ffn_norm is not None
    y, _, load = block.moe(block.ffn_norm(h, block.moe.feed), SEQUENCES // size)
    y.backward(upstream)
    assert h.grad is not None
    made = {"y": y.detach(), "load": load, "amax": arena.amax, "dh": h.grad}
    made |= {f"grad.{n}": p.grad for n, p in block.named_parameters() if p.grad is not None}
    return {key: value.cpu() for key, value in made.items()}


def main(folder: Path) -> None:
    """One process: all cases, results into a file."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    try:
        amaxes = torch.load(folder / "amaxes.pt")
        made = {case: layer(case, amaxes[case], rank, WORLD, dist.group.WORLD) for case in CASES}
        torch.save(made, folder / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    """What one GPU computes, and the amaxes of the step before."""
    made: dict[str, Any] = {"amaxes": {}}
    for case in CASES:
        before = [layer(case, [])["amax"]]
        made["amaxes"][case], made[case] = before, layer(case, before)
    return made


@pytest.fixture(scope="module")
def both(
    single: dict[str, Any], start_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, Tensor]]]:
    """What each of two GPUs computes."""
    folder = tmp_path_factory.mktemp("processes")
    torch.save(single["amaxes"], folder / "amaxes.pt")
    start_ranks(__file__, WORLD, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))


@needs_two
@pytest.mark.parametrize("case", CASES)
def test_two_gpus_equal_one(case: str, single: dict[str, Any], both: list) -> None:
    theirs, parts = single[case], [part[case] for part in both]
    errors = {}
    for key, value in theirs.items():
        tensors = [part[key] for part in parts]
        if key in ("y", "dh") or ".experts." in key:
            ours = torch.cat(tensors)
        else:
            ours = torch.stack(tensors).amax(0) if key == "amax" else torch.stack(tensors).sum(0)
        errors[key] = error(ours, value)
    print(case, {key: f"{value:.1e}" for key, value in errors.items()})
    assert errors.pop("load") == 0
    for key, value in errors.items():
        same = key == "amax" or ".experts." in key  # the same FP8 numbers in the same order
        assert value < (1e-3 if same else 4e-3), key  # else sums over a process's experts, or tokens, rounded to BF16
    if case.endswith("first half"):
        assert not parts[1]["grad.moe.experts.down.weight"].any()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
