"""The model as a whole: its start, its plan, its state, and that running it another way changes nothing."""

import math
from collections.abc import Callable
from itertools import cycle, islice

import pytest
import torch
from torch import Tensor

from models import DeepSeek, ModelConfig, RouterScoring
from precision import GroupedLinear, Linear, Plan, bind

Build = Callable[..., DeepSeek]
OnMeta = Callable[..., tuple[DeepSeek, Plan]]
RECIPES = ["fp32", "bf16", "fp8_delayed", "fp8_jit", "fp8_block"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_tiny_starts_at_the_entropy_of_its_vocabulary(recipe: str, on_meta: OnMeta) -> None:
    model, plan = on_meta(ModelConfig(), recipe)
    model.to_empty(device="cpu")
    model.init_weights(seed=0)
    bind(model, plan, "cpu")
    losses = model(torch.randint(0, 4096, (2, 129), generator=torch.Generator().manual_seed(0)))
    assert abs(losses.lm.item() - math.log(4096)) < 0.1
    assert abs(losses.mtp.item() - math.log(4096)) < 0.1
    losses.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), name


def test_the_seed_decides_the_weights(on_meta: OnMeta) -> None:
    def weights(seed: int) -> list[Tensor]:
        model, _ = on_meta(ModelConfig(num_layers=2, num_experts=4))
        model.to_empty(device="cpu").init_weights(seed)
        return list(model.state_dict().values())

    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(1), weights(2), strict=True))


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_every_gemm_of_the_plan_is_the_module_of_that_name(q_lora_rank: int | None, on_meta: OnMeta) -> None:
    model, plan = on_meta(ModelConfig(q_lora_rank=q_lora_rank, num_mtp_layers=2))
    modules = {name: m for name, m in model.named_modules() if isinstance(m, Linear | GroupedLinear)}
    assert modules.keys() == plan.gemms.keys()
    for name, module in modules.items():
        row = plan.gemms[name]
        assert module.weight.shape[-2:] == (row.out_features, row.in_features)
        assert (module.weight.dim() == 3) == (row.groups > 1)
    norms = {row.name for row in plan.tensors.values() if row.op == "norm"}
    assert norms == {name.removesuffix(".weight") for name, p in model.named_parameters() if p.dim() == 1}


def test_blocks_are_listed_once_mtp_last(build: Build) -> None:
    model = build(num_mtp_layers=2)
    named = model.iter_blocks()
    assert [name for name, _ in named] == ["layers.0", "layers.1", "layers.2", "mtp.0", "mtp.1"]
    assert all(model.get_submodule(name) is block for name, block in named)


def test_norms_embedding_and_routers_do_not_decay(build: Build) -> None:
    model = build()
    kept = model.no_decay()
    assert {"norm.weight", "embed.weight", "layers.1.moe.router.weight", "mtp.0.enorm.weight"} <= kept
    assert not any("experts" in name or "attn.q." in name for name in kept)
    assert "lm_head.weight" not in kept


def test_load_has_a_row_for_each_block_with_experts(build: Build, tokens: Tensor) -> None:
    model = build(num_mtp_layers=2)
    load = model(tokens).load
    assert load.shape == (4, 8)
    assert load.dtype == torch.int64
    assert (load.sum(1) == 2 * 40 * model.config.num_experts_per_token).all()
    assert build(num_dense_layers=3, num_mtp_layers=0)(tokens).load.shape == (0, 8)


def test_router_bias_moves_against_the_load_if_the_step_is_good(build: Build) -> None:
    model = build()
    load = torch.tensor([[4, 0, 2, 2, 2, 2, 2, 2]] * model.config.num_moe_blocks)
    before = [b.clone() for b in model.router_bias]
    model.update_router_bias(load, torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(model.router_bias, before, strict=True))
    model.update_router_bias(load, torch.tensor(True))
    for now, was in zip(model.router_bias, before, strict=True):
        torch.testing.assert_close(now - was, torch.tensor([-0.001, 0.001, 0, 0, 0, 0, 0, 0]), atol=1e-7, rtol=0)
    zero_mean = build(router_bias_zero_mean=True)
    # the mean of 1 and seven times -1 is -0.75, of twice 1 and six times -1 -0.5: each block has its own
    steps = {(9, *[1] * 7): [-0.00175] + [0.00025] * 7, (9, 9, *[1] * 6): [-0.0015] * 2 + [0.0005] * 6}
    uneven = list(islice(cycle(steps), model.config.num_moe_blocks))
    before = [b.clone() for b in zero_mean.router_bias]
    zero_mean.update_router_bias(torch.tensor(uneven), torch.tensor(True))
    for now, was, row in zip(zero_mean.router_bias, before, uneven, strict=True):
        torch.testing.assert_close(now - was, torch.tensor(steps[row]), atol=1e-7, rtol=0)
    softmax = build(router_scoring=RouterScoring.softmax, router_bias_update_rate=0.0)
    assert softmax.router_bias == []
    softmax.update_router_bias(load, torch.tensor(True))


def test_a_sequence_means_the_same_in_any_batch(build: Build, tokens: Tensor) -> None:
    model = build(q_lora_rank=24)
    with torch.no_grad():
        together = model.hidden(tokens)
        alone = torch.cat([model.hidden(t[None]) for t in tokens])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
