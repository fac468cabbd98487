"""Recomputed and compiled blocks compute the same bits as plain ones, keep less, and are compiled once a kind."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from models import DeepSeek
from models.flops import kept_bytes_per_token
from precision import ScalingArena, begin_step, bind
from precision.linear import gemm_layers
from trainer.config import Config, Recompute
from trainer.forecast.memory import forecast_memory
from trainer.forecast.preflight import check
from trainer.parallel.blocks import parallelize
from trainer.step.engine import build_model

Configs = Callable[..., Config]
CPU = torch.device("cpu")
REFERENCE = "precision.backend=reference"


class Counter(CompileCounterWithBackend):
    """Compiles with a backend of torch; counts the graphs and how often they run."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        graph = super().__call__(*args, **kwargs)

        def run(*inputs: Any) -> Any:
            self.calls += 1
            return graph(*inputs)

        return run


def build(config: Config, compiler: CompileCounterWithBackend | None = None) -> tuple[DeepSeek, ScalingArena]:
    plan, model = build_model(config, CPU)
    arena = bind(model, plan, CPU)
    torch._dynamo.reset()
    parallelize(model, config.recompute, compiler is not None, compiler or "inductor")
    return model, arena


def two_steps(model: DeepSeek, arena: ScalingArena) -> tuple[Tensor, list[Tensor]]:
    """Amaxes with max logits, and gradients, of the second of two steps of two microbatches; it scales by the history
    of the first."""
    generator = torch.Generator().manual_seed(0)
    amax = arena.amax
    for _ in range(2):
        model.zero_grad()
        begin_step(model, arena)
        for _ in range(2):
            model(torch.randint(320, (2, 25), generator=generator)).total.backward()
        amax = torch.cat([arena.amax, arena.max_logits.flatten()])
        arena.commit(arena.finite())
    return amax, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("recipe", "q_lora_rank"),
    [
        ("bf16", "null"),
        ("fp8_delayed", "32"),
        ("fp8_jit", "null"),
        ("fp8_block", "32"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("bf16", "32"), ("fp8_delayed", "null"))),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("fp8_jit", "32"), ("fp8_block", "null"))),
    ],
)
def test_recomputation_changes_no_bit(config: Configs, recipe: str, q_lora_rank: str) -> None:
    keys = f"+recipe={recipe}", f"model.q_lora_rank={q_lora_rank}", REFERENCE
    amax, grads = two_steps(*build(config(*keys)))
    assert (amax > 0).sum() == len(amax), "every row saw something"
    for kind in ("selective", "full"):
        other, other_grads = two_steps(*build(config(*keys, f"recompute={kind}")))
        assert torch.equal(other, amax)
        assert all(torch.equal(a, b) for a, b in zip(other_grads, grads, strict=True))


@pytest.mark.parametrize(
    ("recipe", "recompute", "backend"),
    [("fp8_delayed", "full", "eager"), pytest.param("fp8_jit", "selective", "aot_eager", marks=pytest.mark.exhaustive)],
)
def test_many_compiled_blocks_are_one_graph_a_kind(config: Configs, recipe: str, recompute: str, backend: str) -> None:
    keys = f"+recipe={recipe}", "model.num_layers=4", "model.num_dense_layers=2", "model.num_mtp_layers=2", REFERENCE
    keys += "model.num_experts=2", "model.num_experts_per_token=1"  # a graph has each expert's product
    amax, grads = two_steps(*build(config(*keys)))
    counter = Counter(backend)
    other, other_grads = two_steps(*build(config(*keys, f"recompute={recompute}"), counter))
    assert counter.frame_count == 3, "dense, experts, MTP"
    passes = 2 if recompute == "full" else 1
    assert counter.calls == (4 + 2) * 4 * passes, "each block in each of four microbatches"
    assert torch.equal(other, amax)
    for ours, theirs in zip(other_grads, grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


def kept(model: DeepSeek) -> int:
    """Bytes that the blocks' forward pass of 2 x 128 tokens leaves alive: what autograd saves, and what a checkpoint's
    cache does."""

    def alive() -> list[Tensor]:
        gc.collect()
        return [t for t in gc.get_objects() if type(t) is Tensor]

    saved: list[Tensor] = []
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    before = alive()
    known = {id(t) for t in before}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        hidden = model.hidden(tokens)
    new = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive() if id(t) not in known}
    operands = (t for layer in gemm_layers(model) for t in layer.operand or () if t is not None)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *operands)}
    assert hidden.requires_grad and before
    return sum(size for pointer, size in new.items() if pointer not in own)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_less_is_kept_as_forecast(config: Configs, recipe: str) -> None:
    keys = f"+recipe={recipe}", "model.num_layers=8", "model.num_mtp_layers=0", "trainer.sequence_length=128", REFERENCE
    # head sizes at which the CPU's attention pads nothing: the forecast is of what training on a GPU keeps
    keys += "model.hidden_size=128", "model.v_head_dim=48", "model.qk_nope_head_dim=32", "model.num_heads=4"
    measured, forecast = {}, {}
    for kind in Recompute:
        made = config(*keys, f"recompute={kind.value}")
        measured[kind] = kept(build(made)[0])
        plan = check(made)
        head = kept_bytes_per_token(made.model, plan)["head"] * 2 * 128
        forecast[kind] = forecast_memory(made, plan)["activations"] - head
    assert measured[Recompute.full] < measured[Recompute.selective] < 0.85 * measured[Recompute.none]
    assert forecast[Recompute.none] == pytest.approx(measured[Recompute.none], rel=0.1)
    # while one block is computed again, its inside is there, too
    again = (measured[Recompute.none] - measured[Recompute.selective]) / 8
    assert forecast[Recompute.selective] == pytest.approx(measured[Recompute.selective] + again, rel=0.1)


def test_evaluation_recomputes_nothing(config: Configs) -> None:
    plain, _ = build(config(REFERENCE))
    selective, _ = build(config("recompute=selective", REFERENCE))
    tokens = torch.arange(48).view(2, 24)
    with torch.no_grad():
        assert torch.equal(selective.hidden(tokens), plain.hidden(tokens))
