"""Ranks that share a model train it as one process does: the same losses, scales and verdicts, for every layout. They
gather and quantise weights as often as the layout says, and share compiled blocks.

The ranks run this file as a program, over gloo: all cases of a world size one after the other.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import composed
import pytest
import torch
from ranks import run_cases
from torch._dynamo.testing import CompileCounterWithBackend

from precision import GroupedLinear
from precision.backends.reference import ReferenceBackend
from trainer.config import Recompute
from trainer.launch.world import World
from trainer.parallel.blocks import parallelize
from trainer.parallel.gather import Fp8GatherFormat, GatherFormat
from trainer.step.engine import build_engine
from trainer.step.train_step import train_step

RUN = ["trainer.device=cpu", "precision.backend=reference", "trainer.max_steps=4", "optim.warmup_steps=2"]
RUN += ["trainer.global_batch_size=4", "trainer.microbatch_size=1", "trainer.sequence_length=32", "optim.lr=5e-4"]
RUN += ["model.vocab_size=512", "model.hidden_size=64", "model.num_layers=2", "model.num_experts=4"]
RUN += ["data=text", "data.path=."]
FSDP, HSDP, EP = ("parallel=fsdp",), ("parallel=hsdp", "parallel.shard=2"), ("parallel=fsdp", "parallel.expert=2")
FP32 = "precision=fp32"
EACH, KEPT = "parallel.reduce_each_microbatch=true", "parallel.reshard_after_forward=false"


class Case(NamedTuple):
    """A run. keys: overrides. spoil: the rank whose loss is not a number in step 2. compiled: blocks are, by this
    backend of torch.compile. seed: of the data."""

    keys: tuple[str, ...]
    steps: int = 2
    spoil: int | None = None
    compiled: str | None = None
    seed: int = 3


SEEDS = range(4)


def over_seeds(name: str, *keys: str) -> dict[str, Case]:
    """A run of six steps from each of some seeds, of weights and data."""
    return {f"{name} {seed}": Case((*keys, f"trainer.seed={seed}"), steps=6, seed=seed) for seed in SEEDS}


XIELU = "model.activation=xielu"
FP16 = "precision=fp16", "precision.loss_scale.initial=16777216", "precision.loss_scale.interval=2"  # 2^24
ONE_KIND = "precision=fp8_delayed", "model.num_dense_layers=0", "model.num_mtp_layers=0"  # of block to compile
MIXED, SPREAD = (*FSDP, *ONE_KIND, "model.num_layers=3", "precision.rules.last_blocks=1"), (*EP, *ONE_KIND)
CASES = {
    1: {"xielu": Case((XIELU, FP32)), "fp32": Case((FP32,)), "fp16": Case(FP16, 8)}
    | {name: Case((f"precision={name}",)) for name in ("bf16", "fp8_delayed", "fp8_jit", "fp8_block")},
    2: {
        "fsdp fp32": Case((*FSDP, FP32)),
        "fsdp fp32 kept": Case((*FSDP, FP32, KEPT, "recompute=selective")),
        "fsdp fp32 kept each": Case((*FSDP, FP32, KEPT, EACH, "recompute=full")),
        "ep fp32": Case((*EP, FP32)),
        "ep fp32 kept": Case((*EP, FP32, KEPT)),
        "ep fp32 each": Case((*EP, FP32, EACH, "recompute=full")),
        "fsdp xielu": Case((*FSDP, XIELU, FP32)),
        "ep xielu": Case((*EP, XIELU, FP32)),
        "fsdp fp8_delayed": Case((*FSDP, "precision=fp8_delayed")),
        "fsdp fp8_jit": Case((*FSDP, "precision=fp8_jit")),
        "fsdp fp8_block": Case((*FSDP, "precision=fp8_block")),
        "ep fp8_jit": Case((*EP, "precision=fp8_jit")),
        "spoilt": Case((*FSDP, "precision=fp8_delayed"), 3, spoil=1),
        "ep spoilt": Case((*EP, "precision=fp8_delayed"), 3, spoil=1),
        "fsdp fp16": Case((*FSDP, *FP16), 8),
        "ep fp16 spoilt": Case((*EP, "precision=fp16"), 3, spoil=1),
        "mixed": Case(MIXED),
        "mixed compiled": Case((*MIXED, "recompute=full"), compiled="eager"),
        "spread": Case(SPREAD),
        "spread compiled": Case((*SPREAD, "recompute=selective"), compiled="aot_eager"),
    },
    4: {
        "hsdp fp32": Case((*HSDP, FP32)),
        "ddp fp32": Case(("parallel=hsdp", "parallel.shard=1", FP32)),
        "ep fp32": Case((*EP, FP32)),
        "ep over groups fp32": Case((*HSDP, "parallel.expert=4", FP32)),
        "hsdp fp8_block": Case((*HSDP, "precision=fp8_block")),
        "spoilt": Case((*HSDP, FP32), 3, spoil=2),
    },
}
OVER_SEEDS = {
    1: over_seeds("seeds bf16", "precision=bf16") | over_seeds("seeds delayed", "precision=fp8_delayed"),
    2: over_seeds("seeds ep", *EP, "precision=fp8_delayed"),
}
Curves = dict[str, list[dict[str, float]]]


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
    config = composed.config_of([*RUN, *case.keys])
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


@pytest.fixture(scope="module")
def curves(ask_ranks: Callable[..., Any]) -> dict[int, Curves]:
    """What each world size computed."""
    return ask_ranks(__file__, CASES)


def differences(ours: list[dict[str, float]], theirs: list[dict[str, float]], key: str = "loss/total") -> list[float]:
    return [abs(a[key] - b[key]) for a, b in zip(ours, theirs, strict=False)]


@pytest.mark.parametrize(("size", "name"), [(s, n) for s in (2, 4) for n in CASES[s] if "fp32" in n])
def test_in_fp32_every_layout_has_the_curve_of_one_process(curves: dict[int, Curves], size: int, name: str) -> None:
    ours, theirs = curves[size][name], curves[1]["fp32"]
    assert max(differences(ours, theirs)) < 1e-5
    assert max(differences(ours, theirs, "loss/mtp")) < 1e-5
    assert max(differences(ours, theirs, "optim/grad_norm")) < 1e-3
    assert max(differences(ours, theirs, "norm")) < 1e-3
    assert max(differences(ours, theirs, "bias")) == 0, "loads are those of the whole batch"
    assert max(differences(ours, theirs, "moe/load_max_over_mean_worst")) == 0


@pytest.mark.parametrize("name", [name for name in CASES[2] if "xielu" in name])
def test_parameters_of_activations_are_shared_as_weights_are(curves: dict[int, Curves], name: str) -> None:
    ours, theirs = curves[2][name], curves[1]["xielu"]
    assert max(differences(ours, theirs)) < 1e-5
    assert max(differences(ours, theirs, "optim/grad_norm")) < 1e-3


@pytest.mark.parametrize(("size", "name"), [(s, n) for s in (2, 4) for n in CASES[s] if "fp8" in n])
def test_in_fp8_layouts_differ_less_than_fp8_from_bf16(curves: dict[int, Curves], size: int, name: str) -> None:
    recipe = name.split()[-1]
    one = curves[1][recipe][: len(curves[size][name])]
    assert sum(differences(curves[size][name], one)) < sum(differences(curves[1]["bf16"], one))


@pytest.mark.exhaustive
def test_spread_experts_differ_less_than_fp8_from_bf16_with_one_scale_a_tensor(ask_ranks: Callable[..., Any]) -> None:
    """Over some seeds: the first step scales by what travels together, which the layout decides, and any two FP8 runs
    whose first scales differ are about as far from each other as they are from BF16, so that one seed says nothing."""
    curves = ask_ranks(__file__, OVER_SEEDS, "seeds")
    ours = theirs = 0.0
    for seed in SEEDS:
        one = curves[1][f"seeds delayed {seed}"]
        ours += sum(differences(curves[2][f"seeds ep {seed}"], one))
        theirs += sum(differences(curves[1][f"seeds bf16 {seed}"], one))
    print(f"expert parallelism {ours / len(SEEDS):.4f}, BF16 {theirs / len(SEEDS):.4f}")
    assert ours < theirs


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_jit", "fp8_block"])
def test_the_first_step_in_fp8_is_the_same_bit_for_bit(curves: dict[int, Curves], recipe: str) -> None:
    """Every scale and amax; the loss but for the order in which four microbatches' losses are added up."""
    ours, theirs = curves[2][f"fsdp {recipe}"][0], curves[1][recipe][0]
    assert [ours[key] for key in ("scale", "amax")] == [theirs[key] for key in ("scale", "amax")]
    assert ours["loss/total"] == pytest.approx(theirs["loss/total"], rel=4 * torch.finfo(torch.float32).eps, abs=0)


@pytest.mark.parametrize(("size", "name"), [(2, "spoilt"), (2, "ep spoilt"), (4, "spoilt")])
def test_a_bad_step_on_one_rank_is_skipped_by_all(curves: dict[int, Curves], size: int, name: str) -> None:
    lines = curves[size][name]
    assert [line["ok"] for line in lines] == [1, 0, 1]
    before, dropped, after = lines
    for key in ("norm", "bias", "scale") if size == 2 else ("norm", "bias"):
        assert dropped[key] == before[key], "nothing of it was kept"
    assert after["norm"] != dropped["norm"]


@pytest.mark.parametrize("way", ["fsdp", "ep"])
def test_kept_weights_are_gathered_once_a_step(curves: dict[int, Curves], way: str) -> None:
    """The others twice in each of two microbatches, but for the last block, embedding and head."""
    once, again = curves[2][f"{way} fp32 kept"], curves[2][f"{way} fp32"]
    assert again[0]["arrived"] > 2.4 * once[0]["arrived"] and once[1]["arrived"] == once[0]["arrived"]
    for key in ("loss/total", "norm", "scale", "amax"):
        assert [line[key] for line in once] == [line[key] for line in again]


@pytest.mark.parametrize(
    ("size", "name"),
    [(2, name) for name in CASES[2] if name.split()[0] == "ep"] + [(4, "ep over groups fp32"), (4, "ep fp32")],
)
def test_experts_that_no_other_rank_has_are_not_gathered(curves: dict[int, Curves], size: int, name: str) -> None:
    shared = (size, name) == (4, "ep fp32")
    assert all((line["experts"] > 0) is shared and line["arrived"] > 0 for line in curves[size][name])


def test_gathered_weights_are_quantised_once_a_step_as_in_one_process(curves: dict[int, Curves]) -> None:
    """In two microbatches; where they are gathered, in each forward and backward pass."""
    one, alone, gathered = (
        [line["quantised"] for line in lines]
        for lines in (curves[1]["fp8_jit"], curves[2]["ep fp8_jit"], curves[2]["fsdp fp8_jit"])
    )
    assert alone == one and len(set(one)) == 1 and min(gathered) > 2 * one[0] > 0


def test_compiled_blocks_share_graphs_but_not_those_of_another_precision(curves: dict[int, Curves]) -> None:
    plain, compiled = curves[2]["mixed"], curves[2]["mixed compiled"]
    assert compiled[-1]["graphs"] == 2, "of three blocks with experts, the last is in BF16"
    assert max(differences(plain, compiled)) < 1e-3
    assert compiled[0]["amax"] == plain[0]["amax"]


def test_compiled_blocks_with_spread_experts_compute_the_same(curves: dict[int, Curves]) -> None:
    plain, compiled = curves[2]["spread"], curves[2]["spread compiled"]
    assert 0 < compiled[-1]["graphs"] <= 6, "the parts of a block are compiled once a kind"
    assert compiled[0]["amax"] == pytest.approx(plain[0]["amax"], rel=1e-5)
    for key in ("loss/total", "optim/grad_norm", "norm"):
        assert [line[key] for line in compiled] == pytest.approx([line[key] for line in plain], rel=1e-4), key


def test_in_fp16_ranks_scale_the_loss_as_one_process_does(curves: dict[int, Curves]) -> None:
    """From too high a scale down, and up again."""
    ours, theirs = curves[2]["fsdp fp16"], curves[1]["fp16"]
    for key in ("optim/loss_scale", "ok", "overflow"):
        assert [line[key] for line in ours] == [line[key] for line in theirs]
    assert ours[-1]["optim/loss_scale"] > ours[-2]["optim/loss_scale"]
    assert {line["overflow"] for line in ours} == {0, 1} and len({line["optim/loss_scale"] for line in ours}) > 3
    assert max(differences(ours, theirs)) < 2.0**-10 * theirs[0]["loss/total"], "a rounding of FP16"


def test_in_fp16_a_bad_step_on_one_rank_is_skipped_by_all(curves: dict[int, Curves]) -> None:
    lines = curves[2]["ep fp16 spoilt"]
    assert [(line["ok"], line["overflow"], line["optim/loss_scale"]) for line in lines] == [
        (1, 0, 2**16), (0, 0, 2**16), (1, 0, 2**15)
    ]  # fmt: skip
    assert lines[1]["norm"] == lines[0]["norm"] != lines[2]["norm"]


if __name__ == "__main__":
    count()
    run_cases(OVER_SEEDS if sys.argv[2:] else CASES, train, Path(sys.argv[1]))
