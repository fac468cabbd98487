"""Kurtosis against the formula, at the places that its name says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import DeepSeek
from models.block import Block
from precision.observe import observing
from trainer.build import build_engine
from trainer.config import Config
from trainer.distributed import World
from trainer.health import aside
from trainer.health.activations import Kurtosis

CPU = torch.device("cpu")


def of(x: Tensor) -> Tensor:
    wide = x.detach().double()
    return wide.pow(4).mean(-1) / wide.square().mean(-1).square()


@pytest.mark.parametrize(("recipe", "recompute"), [("bf16", "full"), ("fp8_block", "none")])
def test_places(config: Callable[..., Config], recipe: str, recompute: str) -> None:
    engine = build_engine(config(f"+recipe={recipe}", f"recompute={recompute}", "model.q_lora_rank=16"), CPU)
    model, seen = engine.model, dict[str, Any]()
    block = model.iter_blocks()[1][1]
    assert isinstance(block.attn.q_b, nn.Module)

    def keep(key: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, out: seen.update({key: out})

    block.attn.q_b.register_forward_hook(keep("q"))
    block.attn.kv_b.register_forward_hook(keep("kv"))
    block.register_forward_hook(keep("block"))
    hooks = count_hooks(model)
    kurtosis = Kurtosis(model.iter_blocks(), CPU)
    tokens = torch.randint(320, (1, 25), generator=torch.Generator().manual_seed(0))
    with aside.aside(engine), observing(lambda *cast: None), kurtosis.watching():
        aside.run(engine, tokens, 4)
    means = kurtosis.means(World(CPU))
    torch.testing.assert_close(means["qkv"][1], of(torch.cat([seen["q"], seen["kv"]], -1)).mean(), rtol=1e-5, atol=0)
    torch.testing.assert_close(means["block"][1], of(seen["block"][0]).mean(), rtol=1e-5, atol=0)
    again = 2 if recompute == "full" else 1
    assert kurtosis.sums[:, 1, 1].tolist() == [24 * again, 3 * 24 * again, 3 * 24 * again], "shared rows and two routed"
    assert torch.isfinite(means["ffn"]).all() and (means["ffn"] > 1).all()
    assert count_hooks(model) == hooks


def count_hooks(model: DeepSeek) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_numbers_and_outliers() -> None:
    kurtosis = Kurtosis([(name, Block.__new__(Block)) for name in "abc"], CPU)
    x = torch.randn(4000, 256, generator=torch.Generator().manual_seed(0))
    kurtosis._add(0, "block", x)
    one = torch.zeros(8, 256)
    one[:6, 3] = 7.0  # all in one feature; two rows of zeros, which are no tokens
    kurtosis._add(1, "block", one)
    means = kurtosis.means(World(CPU))["block"]
    assert float(means[0]) == pytest.approx(3.0, rel=0.02) and float(means[1]) == pytest.approx(256)
    assert torch.isnan(means[2])
