"""A step whose forward and backward passes are CUDA graphs is the step that it is without.

Two plain runs from one seed need not agree to the bit on a GPU (sums by atomics), so they are the measure: a run with
graphs may be as far from the first of them as a few times the second one is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from precision import gemm_layers
from trainer.step.engine import Engine
from trainer.step.microbatch import EagerMicrobatch, GraphedMicrobatch
from trainer.step.train_step import train_step

Engines = Callable[..., Engine]
BATCH, LENGTH, STEPS = 8, 128, 5
FAST = "optim.warmup_steps=1", "optim.lr=1e-3", "compile.enabled=false"


@dataclass
class Outcome:
    """losses [steps], loads [steps], masters by name, histories, and what the masters began as."""

    losses: Tensor
    norms: Tensor
    masters: Tensor
    history: Tensor
    begin: Tensor


def masters(e: Engine) -> Tensor:
    return torch.cat([p.detach().flatten() for p in e.model.parameters()])


def batches(e: Engine, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(e.model.config.vocab_size, (BATCH, LENGTH + 1), generator=generator) for _ in range(steps)]


def run(e: Engine, microbatch: int) -> Outcome:
    begin = masters(e)
    results = [train_step(e, i, tokens, microbatch) for i, tokens in enumerate(batches(e), start=1)]
    assert all(bool(r.verdict.ok) for r in results)
    losses, norms = (torch.stack([r.metrics[k] for r in results]) for k in ("loss/total", "optim/grad_norm"))
    return Outcome(losses, norms, masters(e), e.arena.history.clone(), begin)


def assert_same_run(graphed: Outcome, plain: Outcome, again: Outcome) -> None:
    """Each part of `graphed` is as near to `plain` as `again` is, times 4; nearer than 1e-3 is near enough."""
    for part in ("losses", "norms", "history"):
        ours, theirs, noise = (getattr(o, part).double() for o in (graphed, plain, again))
        allowed = max(4 * float((noise - theirs).norm()), 1e-3 * float(theirs.norm()))
        assert float((ours - theirs).norm()) <= allowed, part
    moved = float((plain.masters - plain.begin).norm())
    allowed = max(4 * float((again.masters - plain.masters).norm()), 1e-2 * moved)
    assert float((graphed.masters - plain.masters).norm()) <= allowed < moved


def compare(engine: Engines, microbatch: int, *overrides: str) -> None:
    sizes = f"trainer.global_batch_size={BATCH}", f"trainer.microbatch_size={microbatch}"
    plain, again, graphed = (
        run(engine(*sizes, *FAST, *overrides, f"cuda_graph={graph}"), microbatch)
        for graph in ("false", "false", "true")
    )
    assert_same_run(graphed, plain, again)


@pytest.mark.parametrize("microbatch", [8, 4, 2])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_jit", "fp8_block"])
def test_cuda_graphs_are_the_same_run(engine: Engines, recipe: str, microbatch: int) -> None:
    compare(engine, microbatch, f"+recipe={recipe}")


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_cuda_graphs_are_the_same_run_recomputed(engine: Engines, recompute: str) -> None:
    compare(engine, 4, "+recipe=fp8_delayed", f"recompute={recompute}")


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_cuda_graphs_are_the_same_run_compiled(engine: Engines, recompute: str) -> None:
    compare(engine, 4, "+recipe=fp8_delayed", "compile.enabled=auto", f"recompute={recompute}")


def test_a_skipped_step_leaves_nothing_in_the_static_gradients(engine: Engines) -> None:
    e = engine("+recipe=fp8_delayed", *FAST, "cuda_graph=true")
    first, second, third = batches(e, 3)
    assert bool(train_step(e, 1, first, 4).verdict.ok)
    before = masters(e)
    weight = gemm_layers(e.model)[0].weight
    with torch.no_grad():
        healthy = weight[0, 0].clone()
        weight[0, 0] = torch.nan
    assert not bool(train_step(e, 2, second, 4).verdict.ok)
    with torch.no_grad():
        weight[0, 0] = healthy
    assert torch.equal(masters(e), before), "a skipped step changes no bit"
    assert bool(train_step(e, 3, third, 4).verdict.ok)
    assert not torch.equal(masters(e), before)


def test_steps_wait_for_nothing_and_launch_the_same_addresses(engine: Engines) -> None:
    e = engine("+recipe=fp8_jit", *FAST, "cuda_graph=true")
    tokens = [t.cuda() for t in batches(e, 4)]
    train_step(e, 1, tokens[0], 4)

    def addresses() -> list[int]:
        return [t.data_ptr() for layer in gemm_layers(e.model) for t in layer.operand or () if t is not None]

    at = addresses()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (2, 3):
            train_step(e, step, tokens[step - 1], 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    e.model.eval()
    with torch.no_grad():  # evaluation goes the plain way, in between
        e.model.hidden(tokens[3][:, :-1])
    e.model.train()
    result = train_step(e, 4, tokens[3], 4)
    assert bool(result.verdict.ok) and addresses() == at


@pytest.mark.parametrize(
    ("keys", "graphed"),
    [
        ([], True),
        (["debug.inject={step: 3, where: loss, value: nan}"], False),
        (["precision.backend=reference"], False),
        (["trainer.microbatch_size=16384", "trainer.global_batch_size=16384"], False),
    ],
)
def test_auto(engine: Engines, keys: list[str], graphed: bool) -> None:
    """By itself where the pass can be recorded and takes little memory."""
    e = engine("+recipe=fp8_delayed", "cuda_graph=auto", *keys)
    assert isinstance(e.microbatch, GraphedMicrobatch if graphed else EagerMicrobatch)


def test_a_step_that_cannot_be_recorded_runs_without_a_graph(engine: Engines) -> None:
    """With auto, after a warning: here experts that are multiplied group by group, which waits for their offsets."""
    plain, graphed = (engine("precision=fp32", *FAST) for _ in range(2))
    graphed.microbatch = GraphedMicrobatch(graphed.model, must=False)
    tokens = batches(plain)
    with pytest.warns(UserWarning, match="cuda_graph=auto: .* cannot be recorded .*; this run continues without"):
        train_step(graphed, 1, tokens[0], 4)
    train_step(plain, 1, tokens[0], 4)
    ours, theirs = (train_step(e, 2, tokens[1], 4).metrics["loss/total"] for e in (graphed, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
