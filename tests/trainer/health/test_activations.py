"""Kurtosis against the formula, at the places that its name says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from precision import Kurtosis, observe
from precision.formats import Format
from precision.kurtosis import bind_kurtosis
from precision.observe import sampling
from trainer.config import Config
from trainer.health.activations import BlockKurtosis
from trainer.launch.world import World
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

CPU = torch.device("cpu")


def ignored(place: int, x: Tensor, data: Tensor, inv: Tensor, fmt: Format, live: Tensor | None = None) -> None:
    """Does not look at casts."""


def of(x: Tensor) -> Tensor:
    wide = x.detach().double()
    return wide.pow(4).mean(-1) / wide.square().mean(-1).square()


@pytest.mark.parametrize(("recipe", "recompute"), [("bf16", "full"), ("fp8_block", "none")])
def test_places(config: Callable[..., Config], recipe: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "SAMPLE_ON_CPU", 4096)
    engine = build_engine(config(f"+recipe={recipe}", f"recompute={recompute}", "model.q_lora_rank=16"), CPU)
    model, seen = engine.model, dict[str, Any]()
    block = model.iter_blocks()[1][1]
    assert isinstance(block.attn.q_b, nn.Module)

    def keep(key: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, out: seen.update({key: out})

    block.attn.q_b.register_forward_hook(keep("q"))
    block.attn.kv_b.register_forward_hook(keep("kv"))
    block.register_forward_hook(keep("block"))
    kurtosis = BlockKurtosis(model.iter_blocks())
    tokens = torch.randint(320, (1, 25), generator=torch.Generator().manual_seed(0))
    train_step(engine, 1, tokens, 1)
    assert not kurtosis.sums.any(), "no sampler is set"
    kept = set(model.state_dict())
    assert not any("kurtosis" in name for name in kept)
    with sampling(ignored):
        train_step(engine, 2, tokens, 1)
    means = kurtosis.means(World(CPU))
    torch.testing.assert_close(means["qkv"][1], of(torch.cat([seen["q"], seen["kv"]], -1)).mean(), rtol=1e-5, atol=0)
    torch.testing.assert_close(means["block"][1], of(seen["block"][0]).mean(), rtol=1e-5, atol=0)
    again = 2 if recompute == "full" else 1
    assert kurtosis.sums[:, 1, 1].tolist() == [24 * again, 3 * 24 * again, 3 * 24 * again], "shared rows and two routed"
    assert torch.isfinite(means["ffn"]).all() and (means["ffn"] > 1).all()
    kurtosis.forget()
    assert not kurtosis.sums.any()


def test_numbers_and_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [Kurtosis("block") for _ in range(3)]
    sums = bind_kurtosis(modules, CPU)
    of_sequences = [module.sequences for module in modules]
    x = torch.randn(4000, 256, generator=torch.Generator().manual_seed(0))
    one = torch.zeros(8, 256)
    one[:6, 3] = 7.0  # all in one feature; two rows of zeros, which are no tokens
    for row, tensor in enumerate((x, one)):
        modules[row](tensor)
    assert not sums.any()
    monkeypatch.setattr(observe, "SAMPLE_ON_CPU", 4096)
    with sampling(ignored):
        modules[0](x.view(2, 2000, 256)[..., :100], x.view(2, 2000, 256)[..., 100:])
        modules[1](one)
    torch.testing.assert_close(sums[0], torch.tensor([float(of(x).sum()), 4000.0]).double(), rtol=1e-5, atol=0)
    first = of_sequences[0]
    assert first is not None
    torch.testing.assert_close(
        first, torch.stack([of(x.view(2, -1)).sum(), torch.tensor(2.0).double()]), rtol=1e-5, atol=0
    )
    assert float(sums[1, 0] / sums[1, 1]) == pytest.approx(256) and sums[1, 1] == 6 and not sums[2].any()
    monkeypatch.setattr(observe, "SAMPLE_ON_CPU", 1000)
    with sampling(ignored):
        modules[2](x)
    torch.testing.assert_close(sums[2], torch.tensor([float(of(x[::5]).sum()), 800.0]).double(), rtol=1e-5, atol=0)


def test_a_huge_token_is_seen_over_a_sequence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "SAMPLE_ON_CPU", 4096)
    module = Kurtosis("qkv")
    bind_kurtosis([module], CPU)
    x = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 100
    with sampling(ignored):
        module(x)
    assert module.sums is not None and module.sequences is not None
    by_token, by_sequence = (float(sums[0] / sums[1]) for sums in (module.sums, module.sequences))
    assert module.sequences[1] == 4 and by_token < 4 and by_sequence == pytest.approx(3 * 64, rel=0.25)
