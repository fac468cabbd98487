"""Compiled blocks record the same amaxes as eager ones, recomputed or not, with one graph for each kind of block."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from precision import (
    AmaxProbe,
    Feed,
    GroupedLinear,
    Linear,
    Plan,
    PrecisionConfig,
    begin_step,
    bind,
    combine_rows,
    gather_rows,
    rms_norm,
    swiglu,
)

WIDTH, EXPERTS, CHOSEN, BLOCKS = 64, 4, 2, 2


class MoeBlock(nn.Module):
    """Norm, shared experts and routed experts that share one operand, residual: every fused op of the package."""

    def __init__(self, plan: Plan, name: str):
        super().__init__()
        sizes = {"in_features": WIDTH, "out_features": 2 * WIDTH}, {"in_features": WIDTH, "out_features": WIDTH}
        self.shared_up = Linear(plan.gemm(f"{name}.moe.shared.gate_up", "moe.shared", **sizes[0]))
        self.shared_down = Linear(plan.gemm(f"{name}.moe.shared.down", "moe.shared", **sizes[1]))
        grouped = {"groups": EXPERTS, "rows_per_token": CHOSEN}
        self.up = GroupedLinear(plan.gemm(f"{name}.moe.experts.gate_up", "moe.experts", **sizes[0], **grouped))
        self.down = GroupedLinear(plan.gemm(f"{name}.moe.experts.down", "moe.experts", **sizes[1], **grouped))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.feeds = Feed(self.shared_up, self.up, tensor=True), Feed(self.shared_down), Feed(self.down)
        self.up_feed = Feed(self.up)
        self.probe = AmaxProbe(f"{name}.moe")

    def forward(self, x: Tensor, index: Tensor, inverse: Tensor, offsets: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(x, self.gain, 1e-6, self.feeds[0])
        shared = self.shared_down(swiglu(self.shared_up(normed), self.feeds[1]))
        rows = gather_rows(normed, index, inverse, self.up_feed)
        rows = self.down(swiglu(self.up(rows, offsets), self.feeds[2], weight), offsets)
        routed = combine_rows(rows, index, inverse, torch.float32)
        return x + self.probe(shared + routed.to(x.dtype))


def routing(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by expert; the last expert gets none."""
    chosen = torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in range(tokens)])
    order = chosen.flatten().argsort(stable=True)
    offsets = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).int()
    return order // CHOSEN, order.argsort().view(tokens, CHOSEN), offsets


def run(config: PrecisionConfig, compiled: bool, recompute: bool) -> tuple[Tensor, list[Tensor], int]:
    """Amaxes and gradients of two microbatches through the blocks, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plan = Plan(config, BLOCKS)
    blocks = nn.ModuleList(MoeBlock(plan, f"layers.{i}") for i in range(BLOCKS))
    for parameter in blocks.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.05)
    arena = bind(blocks, plan, "cpu")
    counter = CompileCounterWithBackend("aot_eager")
    calls = [torch.compile(b, backend=counter, fullgraph=True, dynamic=False) if compiled else b for b in blocks]
    for _ in range(2):  # the second step scales by the history of the first
        begin_step(blocks, arena)
        for _ in range(2):
            index, inverse, offsets = routing(33)
            weight = torch.rand(33 * CHOSEN)
            x = torch.randn(33, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            for call in calls:
                args = x, index, inverse, offsets, weight
                x = checkpoint(call, *args, use_reentrant=False) if recompute else call(*args)
            x.float().square().sum().backward()
        amax = arena.amax.clone()
        arena.commit(arena.finite())
    return amax, [p.grad for p in blocks.parameters() if p.grad is not None], counter.frame_count


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_jit", "fp8_block"])
def test_compiled_and_recomputed_blocks_record_what_eager_ones_do(
    recipe: Callable[..., PrecisionConfig], name: str
) -> None:
    amax, grads, _ = run(recipe(name), compiled=False, recompute=False)
    assert (amax > 0).sum() == len(amax), "every row saw something"
    for compiled in (False, True) if name == "fp8_delayed" else (True,):
        other, other_grads, graphs = run(recipe(name), compiled, recompute=True)
        torch.testing.assert_close(other, amax, rtol=0, atol=0)
        for ours, theirs in zip(other_grads, grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * theirs.abs().max().item())
        assert graphs == (1 if compiled else 0)
