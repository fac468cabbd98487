"""Blocks that are compiled and recomputed stay within documents, too; recomputation keeps the core's results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models import DeepSeek
from trainer.config import Config
from trainer.config.schema import Recompute
from trainer.parallel import blocks
from trainer.parallel.blocks import parallelize
from trainer.step.engine import build_model

Configs = Callable[..., Config]
KEYS = ("precision=fp32", "model.num_mtp_layers=1", "model.num_layers=1", "model.num_experts=2")
KEYS += ("model.num_experts_per_token=1",)  # a graph has each expert's product
END = 5


def gradients(model: DeepSeek, tokens: Tensor) -> list[Tensor]:
    losses = model(tokens)
    losses.total.backward()
    return [losses.total.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("recompute", "compiled"), [(Recompute.selective, True), (Recompute.selective, False), (Recompute.full, False)]
)
def test_the_numbers_are_those_of_plain_blocks(config: Configs, recompute: Recompute, compiled: bool) -> None:
    tokens = torch.randint(6, 320, (2, 25), generator=torch.Generator().manual_seed(0))
    tokens[0, 3] = tokens[0, 14] = tokens[1, 8] = END
    results = []
    for how in (Recompute.none, recompute):
        torch.compiler.reset()
        model = build_model(config(*KEYS), torch.device("cpu"))[1]
        model.end_of_text = END
        parallelize(model, how, compiled and how is recompute, backend="aot_eager")
        results.append(gradients(model, tokens))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_recomputation_does_not_run_the_kernel_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("precision.kernels.document_attention", reason="Triton is missing")
    from precision.kernels.attention_ops import document_attention

    runs, forward = [], kernels.forward

    def counted(*args: object) -> tuple[Tensor, Tensor]:
        runs.append(1)
        return forward(*args)

    monkeypatch.setattr(kernels, "forward", counted)
    x = torch.randn(1, 1, 16, 16, requires_grad=True)
    bounds = torch.stack([torch.zeros(1, 16), torch.full((1, 16), 16)]).int()

    def function(x: Tensor) -> Tensor:
        return document_attention(x * 2, x + 1, x.sin(), bounds, 0.2)[0]

    (plain,) = torch.autograd.grad(function(x).sum(), x)
    (again,) = torch.autograd.grad(blocks._recompute_all_but_core(function, x).sum(), x)
    assert torch.equal(plain, again)
    assert len(runs) == 2
