"""Blocks whose experts are spread over processes, compiled and recomputed, compute the same bits as plain ones."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from models.block import MoEBlock
from precision import begin_step, bind
from trainer.config import Config, Recompute
from trainer.parallel.blocks import parallelize
from trainer.step.engine import build_model

Configs = Callable[..., Config]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Of one process, whose experts seem to be elsewhere to the code."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def two_steps(
    config: Config, group: dist.ProcessGroup | None, recompute: Recompute, compiler: CompileCounterWithBackend | None
) -> list[Tensor]:
    """Amaxes and gradients of two steps."""
    plan, model = build_model(config, torch.device("cpu"))
    for _, block in model.iter_blocks():
        if group is not None and isinstance(block, MoEBlock):
            block.moe.spread(group)
    arena = bind(model, plan, "cpu")
    torch._dynamo.reset()
    parallelize(model, recompute, compiler is not None, compiler or "inductor")
    generator, seen = torch.Generator().manual_seed(0), []
    for _ in range(2):
        model.zero_grad()
        begin_step(model, arena)
        for _ in range(2):
            model(torch.randint(320, (2, 25), generator=generator)).total.backward()
        seen += [arena.amax.clone(), *(p.grad for p in model.parameters() if p.grad is not None)]
        arena.commit(arena.finite())
    return seen


@pytest.mark.parametrize("recipe", [pytest.param("bf16", marks=pytest.mark.exhaustive), "fp8_delayed"])
def test_compiled_or_recomputed(config: Configs, recipe: str, group: dist.ProcessGroup) -> None:
    kinds = "model.num_layers=2", "model.num_dense_layers=0", "model.num_mtp_layers=0"  # only those that are spread
    made = config(f"+recipe={recipe}", *kinds, "precision.backend=reference")
    plain = two_steps(made, group, Recompute.none, None)
    counter = CompileCounterWithBackend("aot_eager")
    for recompute, compiler in ((Recompute.full, None), (Recompute.selective, counter)):
        spread = two_steps(made, group, recompute, compiler)
        assert len(spread) == len(plain)
        for ours, theirs in zip(spread, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    assert 0 < counter.frame_count <= 6, "the parts of a block are compiled once a kind"
