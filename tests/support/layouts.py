"""Runs on ranks that share a model, in layouts that tests choose: metrics of each step, and how often a weight is
gathered or quantised.

A test's file is the program of its ranks, over gloo: `main` runs all cases of a world size one after the other.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import composed
import torch
from ranks import run_cases
from torch._dynamo.testing import CompileCounterWithBackend

from precision import GroupedLinear
from precision.backends.reference import ReferenceBackend
from trainer.config import Config, Recompute
from trainer.launch.world import World
from trainer.parallel.blocks import parallelize
from trainer.parallel.gather import Fp8GatherFormat, GatherFormat
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

STEPS = 4
RUN = ["trainer.device=cpu", "precision.backend=reference", f"trainer.max_steps={STEPS}", "optim.warmup_steps=2"]
RUN += ["trainer.global_batch_size=4", "trainer.microbatch_size=1", "trainer.sequence_length=32", "optim.lr=5e-4"]
RUN += [
    "model.vocab_size=512",
    "model.hidden_size=64",
    "model.num_layers=2",
    "model.num_experts=4",
    "data=text",
    "data.path=.",
]
FSDP, HSDP, EP = ("parallel=fsdp",), ("parallel=hsdp", "parallel.shard=2"), ("parallel=fsdp", "parallel.expert=2")
FP32 = "precision=fp32"
EACH, KEPT = "parallel.reduce_each_microbatch=true", "parallel.reshard_after_forward=false"
Curves = dict[str, list[dict[str, float]]]


class Case(NamedTuple):
    """A run. keys: overrides. spoil: the rank whose loss is not a number in step 2. compiled: blocks are, by this
    backend of torch.compile. seed: of the data."""

    keys: tuple[str, ...]
    steps: int = STEPS
    spoil: int | None = None
    compiled: str | None = None
    seed: int = 3


def config_of(case: Case) -> Config:
    return composed.config_of([*RUN, *case.keys])


counted: Counter[str] = Counter()


def count() -> None:
    """How often a weight is gathered, how often one of experts, and how often one of experts is quantised."""
    for kind in (GatherFormat, Fp8GatherFormat):

        def arrive(self: GatherFormat, *args: Any, inner: Callable = kind._arrive, **out: Any) -> Any:
            counted["arrived"] += 1
            counted["experts"] += isinstance(self._layer, GroupedLinear)
            return inner(self, *args, **out)

        kind._arrive = arrive
    quantise = ReferenceBackend.quantize_weight

    def quantised(self: ReferenceBackend, master: torch.Tensor, *args: Any) -> Any:
        counted["quantised"] += master.dim() == 3
        return quantise(self, master, *args)

    ReferenceBackend.quantize_weight = quantised  # type: ignore[method-assign, assignment]


def train(_: str, case: Case, world: World) -> list[dict[str, float]]:
    """The metrics of each step, and what must be the same on all ranks."""
    assert world.gather_numbers([world.rank, 0.1]) == [[other, 0.1] for other in range(world.size)]
    config = config_of(case)
    plain = dataclasses.replace(config, recompute=Recompute.none) if case.compiled else config
    engine = build_engine(plain, world.device, world=world)
    counter = CompileCounterWithBackend(case.compiled or "eager")
    if case.compiled:
        torch._dynamo.reset()
        parallelize(engine.model, config.recompute, True, counter)
    generator = torch.Generator().manual_seed(case.seed)
    lines = []
    counted.clear()
    for step in range(1, case.steps + 1):
        base = torch.randint(0, 512, (4, 1), generator=generator)
        tokens = (base + torch.arange(33) * torch.randint(1, 4, (4, 1), generator=generator)) % 512
        if case.spoil == world.rank and step == 2:
            with torch.no_grad():
                _, block = engine.model.iter_blocks()[1]
                handle = block.register_forward_pre_hook(lambda _, args: (args[0] * torch.nan, *args[1:]))
            result = train_step(engine, step, engine.share_of(tokens), config.trainer.microbatch_size)
            handle.remove()
        else:
            result = train_step(engine, step, engine.share_of(tokens), config.trainer.microbatch_size)
        line = {key: float(value) for key, value in result.metrics.items()}
        line["overflow"] = float(result.verdict.overflow)
        line["ok"], line["place"] = float(result.verdict.ok), float(result.verdict.place)
        line["scale"], line["amax"] = float(engine.arena.scale.double().sum()), float(engine.arena.amax.double().sum())
        line["norm"] = float(engine.optimizer.norms(torch.tensor(True))[0])
        line["bias"] = float(torch.stack(engine.model.router_bias).double().abs().sum())
        line["graphs"] = counter.frame_count
        line |= {key: counted[key] for key in ("arrived", "experts", "quantised")}
        counted.clear()
        everyone = world.gather(line)
        assert all(str(other) == str(line) for other in everyone), "the same on every rank"
        lines.append(line)
    return lines


def main(out: Path, chosen: Mapping[int, Mapping[str, Case]]) -> None:
    count()
    run_cases(chosen, train, out)


def differences(ours: list[dict[str, float]], theirs: list[dict[str, float]], key: str = "loss/total") -> list[float]:
    return [abs(a[key] - b[key]) for a, b in zip(ours, theirs, strict=False)]
