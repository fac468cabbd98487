"""Ranks that each hold a piece of every sequence (context), and parts of heads and vocabulary, too (tensor), train as
one process does: losses, gradients, verdicts, evaluation.

The ranks run this file as a program, over gloo: all cases of a world size one after the other.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import composed
import pytest
import torch
from ranks import run_cases
from torch.distributed.tensor import DTensor

from precision import Linear
from trainer.forecast.memory import forecast_memory
from trainer.launch.world import World
from trainer.parallel.shard_views import local
from trainer.step.engine import Engine, build_engine
from trainer.step.evaluation import mean_loss
from trainer.step.train_step import train_step

STEPS, LONG, LENGTH, BATCH, END = 2, 20, 24, 2, 7
RUN = ["trainer.device=cpu", "precision.backend=reference", f"trainer.max_steps={LONG}", "optim.warmup_steps=1"]
RUN += [f"trainer.global_batch_size={BATCH}", "trainer.microbatch_size=1", f"trainer.sequence_length={LENGTH}"]
RUN += ["model.vocab_size=64", "model.hidden_size=64", "model.num_layers=2", "model.num_mtp_layers=2"]
RUN += ["model.num_experts=4"]
RUN += ["model.balance_loss_weight=0.01", "data=text", "data.path=.", "optim.lr=5e-4"]
RUN += ["optim.qk_clip=1"]  # below any head's log-sum-exp: all are clipped in each step


class Case(NamedTuple):
    """A run. keys: overrides. documents: attention stays within them. spoil: the rank whose loss is not a number in
    step 2."""

    keys: tuple[str, ...]
    steps: int = STEPS
    documents: bool = False
    spoil: int | None = None


def context(size: int) -> str:
    return f"parallel.context={size}"


def tensor(size: int) -> str:
    return f"parallel.tensor={size}"


FP32, FULL, EP = "precision=fp32", "recompute=full", "parallel.expert=2"
Q_LATENT, CLIP = "model.q_lora_rank=32", "optim.qk_clip=1"
RECIPES = ("fp8_delayed", "fp8_jit", "fp8_block")


# each axis meets every option; documents and latent queries, of which neither meets the other, share a run
CASES = {
    1: {"plain": Case((FP32,)), "documents": Case((FP32, Q_LATENT, CLIP), documents=True)}
    | {name: Case((f"precision={name}",), 1) for name in ("bf16", *RECIPES)},
    2: {
        "plain full": Case((FP32, context(2), FULL)),
        "documents": Case((FP32, context(2), "recompute=selective", Q_LATENT, CLIP), documents=True),
        "spoilt": Case((FP32, context(2)), 3, spoil=1),
        "plain tensor expert": Case((FP32, tensor(2), EP, FULL)),
        "documents tensor": Case((FP32, tensor(2), "recompute=selective", Q_LATENT, CLIP), documents=True),
        "spoilt tensor": Case((FP32, tensor(2)), 3, spoil=1),
    }
    | {"fp8_delayed": Case(("precision=fp8_delayed", context(2)), 1)}
    | {f"{name} tensor": Case((f"precision={name}", tensor(2)), 1) for name in RECIPES},
    4: {
        "plain shard": Case((FP32, context(2), "parallel.shard=2")),
        "plain four": Case((FP32, context(4))),
        "plain tensor shard": Case((FP32, tensor(2), "parallel.shard=2")),
        "documents tensor context": Case((FP32, tensor(2), context(2), Q_LATENT, CLIP), documents=True),
        "plain replicate expert": Case((FP32, context(2), "parallel.replicate=2", EP)),
    },
}

TO_THE_END = {
    size: {name: case._replace(steps=LONG) for name, case in cases.items() if case.steps == STEPS}
    for size, cases in CASES.items()
}


def batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 64, (BATCH, LENGTH + 1), generator=generator)


def scales(model: torch.nn.Module) -> dict[str, float]:
    """Inverse scales of weights that have one each."""
    weights = {name: layer.operand for name, layer in model.named_modules() if isinstance(layer, Linear)}
    inverse = {name: weight.scale_inv for name, weight in weights.items() if weight is not None}
    return {name: float(inv) for name, inv in inverse.items() if inv is not None and not inv.dim()}


def gradients(engine: Engine) -> dict[str, list[float]]:
    """Norm, and product with a fixed random tensor, of each parameter's gradient."""
    found = {}
    for i, (name, parameter) in enumerate(engine.model.named_parameters()):
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if (dim := getattr(parameter, "spread_dim", None)) is not None:  # a tensor group's
            pieces = [torch.empty_like(gradient) for _ in range(engine.degrees.tensor)]
            group = parameter.spread.get_group()  # type: ignore[attr-defined]
            torch.distributed.all_gather(pieces, gradient.contiguous(), group=group)
            gradient = torch.cat(pieces, dim)
        probe = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(i))
        found[name] = [float(gradient.norm()), float((gradient * probe).sum())]
    return found


def train(_: str, case: Case, world: World) -> dict[str, Any]:
    """Each step's metrics, and the first one's gradients; the same on all ranks."""
    config = composed.config_of([*RUN, *case.keys])
    engine = build_engine(config, world.device, world=world)
    engine.model.end_of_text = END if case.documents else None
    generator = torch.Generator().manual_seed(3)
    lines, first, amaxes = [], {}, {}
    norms = engine.optimizer.grad_norms

    def seen() -> torch.Tensor:
        if not first and engine.degrees.expert == 1:
            first.update(gradients(engine))
            rows = zip(engine.arena.names, engine.arena.amax.tolist(), strict=True)
            amaxes.update({name: amax for name, amax in rows if ":weight" in name})
            amaxes.update(scales(engine.model))
        return norms()

    engine.optimizer.grad_norms = seen  # type: ignore[method-assign]
    for step in range(1, case.steps + 1):
        handles = []
        if case.spoil == world.rank and step == 2:
            _, block = engine.model.iter_blocks()[1]
            handles.append(block.register_forward_pre_hook(lambda _, args: (args[0] * torch.nan, *args[1:])))
        result = train_step(engine, step, engine.share_of(batch(generator)), 1)
        for handle in handles:
            handle.remove()
        line = {key: float(value) for key, value in result.metrics.items()} | {"ok": float(result.verdict.ok)}
        line["norm"] = float(engine.optimizer.norms(torch.tensor(True))[0])
        line["bias"] = float(torch.stack(engine.model.router_bias).double().abs().sum())
        lines.append(line)
    held_out = mean_loss(engine.model, [batch(generator)[:1] for _ in range(3)], 1, world)
    held = 4.0 * sum(local(parameter).numel() for parameter in engine.model.parameters())
    forecast = forecast_memory(config, engine.plan, engine.degrees)["parameters"]
    found = {"lines": lines, "gradients": first, "validation": held_out, "amaxes": amaxes, "held": [held, forecast]}
    assert all(str(other) == str(found) for other in world.gather(found)), "the same on every rank"
    return found


@pytest.fixture(scope="module")
def runs(ask_ranks: Callable[..., Any]) -> dict[int, Any]:
    """What each world size computed."""
    return ask_ranks(__file__, CASES)


def gap(ours: Any, theirs: Any, key: str) -> float:
    return max(abs(a[key] - b[key]) for a, b in zip(ours["lines"], theirs["lines"], strict=False))


ALIKE = [
    (size, name, next(one for one in CASES[1] if name.startswith(one)))
    for size in (2, 4)
    for name, case in CASES[size].items()
    if FP32 in case.keys and case.spoil is None
]


@pytest.mark.parametrize(("size", "name", "one"), ALIKE)
def test_in_fp32_the_curve_is_that_of_one_process(runs: dict[int, Any], size: int, name: str, one: str) -> None:
    ours, theirs = runs[size][name], runs[1][one]
    for key in ("loss/total", "loss/lm", "loss/mtp", "loss/balance"):
        assert gap(ours, theirs, key) < 1e-5
    assert gap(ours, theirs, "optim/grad_norm") < 1e-3 and gap(ours, theirs, "norm") < 1e-3
    assert gap(ours, theirs, "bias") == 0, "loads are those of whole sequences"
    assert abs(ours["validation"] - theirs["validation"]) < 1e-5


@pytest.mark.exhaustive
def test_with_context_a_whole_run_is_that_of_one_rank(ask_ranks: Callable[..., Any]) -> None:
    runs = ask_ranks(__file__, TO_THE_END, "to the end")
    for size, name, one in ALIKE:
        if name in runs[size]:
            test_in_fp32_the_curve_is_that_of_one_process(runs, size, name, one)


@pytest.mark.parametrize(("size", "name", "one"), [each for each in ALIKE if "expert" not in each[1]])
def test_with_context_each_gradient_of_the_first_step_is_that_of_one_rank(
    runs: dict[int, Any], size: int, name: str, one: str
) -> None:
    ours, theirs = runs[size][name]["gradients"], runs[1][one]["gradients"]
    assert ours.keys() == theirs.keys() and theirs
    for parameter, (norm, product) in theirs.items():
        assert ours[parameter][0] == pytest.approx(norm, rel=1e-4), parameter
        assert abs(ours[parameter][1] - product) < 1e-4 * norm * 20, parameter


@pytest.mark.parametrize("name", ["fp8_delayed", *(f"{name} tensor" for name in RECIPES)])
def test_in_fp8_ranks_differ_less_than_fp8_from_bf16(runs: dict[int, Any], name: str) -> None:
    """By gradients: a loss is one number, in which errors of rounding meet by chance. In a delayed recipe's first step
    each rank takes the scale of its own piece, any number: both gradients then are roundings of one, each its error
    away."""

    def distance(ours: Any, theirs: Any) -> float:
        pairs = [(ours["gradients"][name], theirs["gradients"][name]) for name in theirs["gradients"]]
        return math.sqrt(sum(((a[1] - b[1]) / b[0]) ** 2 for a, b in pairs) / len(pairs))

    one = runs[1][name.split()[0]]
    roundings = 2 if "delayed" in name else 1
    assert distance(runs[2][name], one) < roundings * distance(runs[1]["bf16"], one)


@pytest.mark.parametrize("recipe", RECIPES)
def test_amax_and_scale_of_a_weight_are_those_of_all_its_parts(runs: dict[int, Any], recipe: str) -> None:
    assert runs[2][f"{recipe} tensor"]["amaxes"] == runs[1][recipe]["amaxes"] != {}


@pytest.mark.parametrize("name", ["plain tensor expert", "documents tensor"])
def test_a_rank_of_a_tensor_group_holds_what_is_forecast(runs: dict[int, Any], name: str) -> None:
    held, forecast = runs[2][name]["held"]
    assert held == forecast < runs[1][name.split()[0]]["held"][0]


@pytest.mark.parametrize("name", ["spoilt", "spoilt tensor"])
def test_a_nan_in_one_piece_skips_the_step_on_all_ranks(runs: dict[int, Any], name: str) -> None:
    lines = runs[2][name]["lines"]
    assert [line["ok"] for line in lines] == [1, 0, 1]
    assert all(lines[1][key] == lines[0][key] for key in ("norm", "bias"))
    assert lines[2]["norm"] != lines[1]["norm"]


if __name__ == "__main__":
    run_cases(TO_THE_END if sys.argv[2:] else CASES, train, Path(sys.argv[1]))
