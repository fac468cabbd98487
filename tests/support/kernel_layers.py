"""Layers of any backend with random weights, for tests of kernels in Triton's interpreter or on a GPU."""

from dataclasses import replace

import torch
from torch import nn

from precision import Feed, GroupedLinear, Linear, Plan, PrecisionConfig, ScalingArena, bind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Layers(nn.Module):
    """A norm's gain and the layers that a test names: casting weights takes most of the interpreter's time."""

    alone: Linear
    up: Linear
    down: Linear
    grouped: GroupedLinear
    ups: GroupedLinear
    downs: GroupedLinear

    def __init__(self, config: PrecisionConfig, backend: str, sizes: tuple[int, int, int], parts: tuple[str, ...]):
        super().__init__()
        (width, inner, experts), self.plan, self.kernels = sizes, Plan(config, 1), backend
        ops = {"alone": "attn.o", "up": "ffn", "down": "ffn"}
        for part in parts:
            k, n = {"up": (width, 2 * inner), "down": (inner, width)}.get(part.rstrip("s"), (width, inner))
            op, many = ops.get(part, "moe.experts"), (1, 1.0) if part in ops else (experts, 2.0)
            row = self.plan.gemm(f"layers.0.{op}.{part}", op, k, n, *many)
            row = replace(row, recipe=replace(row.recipe, backend=backend))
            setattr(self, part, Linear(row) if part in ops else GroupedLinear(row))
        self.gain = nn.Parameter(torch.ones(width))
        self.feed = self.feed_of("up", "ups", tensor=True)
        self.grouped_feed, self.down_feed, self.downs_feed = map(self.feed_of, ("grouped", "down", "downs"))

    def feed_of(self, *parts: str, tensor: bool = False) -> Feed:
        return Feed(*(getattr(self, part) for part in parts if hasattr(self, part)), tensor=tensor)


def build(
    config: PrecisionConfig, backend: str, sizes: tuple[int, int, int], *parts: str
) -> tuple[Layers, ScalingArena]:
    torch.manual_seed(1)
    layers = Layers(config, backend, sizes, parts)
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    layers.to(DEVICE)
    return layers, bind(layers, layers.plan, DEVICE)
