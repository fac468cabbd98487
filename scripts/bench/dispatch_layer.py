"""What the dispatch bench runs: a norm and a layer of experts, in a time limit, also as a CUDA graph."""

import argparse
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import measure
import torch
import torch.distributed as dist
from layers import plan_of
from torch import Tensor

from models import DeepSeek, ModelConfig
from models.block import MoEBlock
from precision import ScalingArena, begin_step, bind

LIMIT, FIRST = 50.0, 400.0  # limits in seconds of a phase, and of one that compiles


class Silent:
    """Messages that stay local: what this process would send arrives here."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def exchange(self, rows: tuple[Tensor, ...], sent: Tensor, arriving: Tensor | None, keep: bool) -> list[Tensor]:
        return [one.clone() for one in rows] if keep else list(rows)


class Layer:
    """A norm and its experts on this process's tokens."""

    def __init__(self, o: argparse.Namespace, recipe: str, tokens: int, group: dist.ProcessGroup, device: torch.device):
        sizes = {"hidden_size": o.hidden, "moe_intermediate_size": o.width, "intermediate_size": o.hidden}
        sizes |= {"num_experts": o.experts, "num_experts_per_token": o.chosen, "num_layers": 2, "vocab_size": 512}
        sizes |= {"num_dense_layers": 1, "num_mtp_layers": 0}
        plan = plan_of(recipe, device, tokens, num_layers=2)
        with torch.device("meta"):
            model = DeepSeek(ModelConfig(**sizes), plan)
        model.to_empty(device=device)
        model.init_weights(seed=0)
        block = model.get_submodule("layers.1")
        assert isinstance(block, MoEBlock)
        block.moe.spread(group)
        self.model, self.block, self.group = model, block, group
        self.arena: ScalingArena = bind(model, plan, device)
        generator = torch.Generator().manual_seed(dist.get_rank())
        h, self.dy = torch.randn(2, tokens, o.hidden, generator=generator).to(device, torch.bfloat16).unbind()
        self.h = h.requires_grad_()
        (self.bias,) = model.router_bias

    def through(self, dispatcher: Any) -> None:
        """Use this dispatcher from now on."""
        self.block.moe.dispatcher = dispatcher

    def begin(self) -> None:
        """Begin a step: quantise weights, drop gradients."""
        begin_step(self.model, self.arena)
        self.h.grad = None
        for parameter in self.block.parameters():
            parameter.grad = None

    def forward(self) -> Tensor:
        """Compute y [T, D]."""
        assert self.block.ffn_norm is not None
        return self.block.moe(self.block.ffn_norm(self.h, self.block.moe.feed), 1)[0]

    def run(self) -> Tensor:
        y = self.forward()
        y.backward(self.dy)
        return y.detach()

    def results(self, y: Tensor) -> dict[str, Tensor]:
        """Return what must not depend on how tokens travel."""
        made = {"y": y, "dh": self.h.grad, "amax": self.arena.amax}
        made |= {name: parameter.grad for name, parameter in self.block.named_parameters()}
        return {name: value.detach().clone() for name, value in made.items() if value is not None}

    def step(self) -> dict[str, Tensor]:
        self.begin()
        return self.results(self.run())

    def commit(self) -> None:
        """Compute the next step's scales from the amaxes of all."""
        dist.all_reduce(self.arena.amax, dist.ReduceOp.MAX, group=self.group)
        self.arena.commit(self.arena.finite())


@contextmanager
def phase(name: str, limit: float = LIMIT) -> Iterator[None]:
    """End the process, reporting where, if the code inside takes longer than `limit` seconds."""

    def end() -> None:
        print(f"rank {os.environ.get('RANK')}: {name} took longer than {limit:.0f} s", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)

    timer = threading.Timer(limit, end)
    timer.daemon = True
    timer.start()
    try:
        yield
        measure.synchronize()
    finally:
        timer.cancel()


def graph_of(layer: Layer) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record forward and backward. Returns the graph and the buffer of y."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer.begin()
            layer.run()
    torch.cuda.current_stream().wait_stream(stream)
    layer.begin()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        y = layer.run()
    return graph, y
