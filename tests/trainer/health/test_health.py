"""Looks inside and shadows change nothing in training, bit for bit; what they say is what happened; where it is
written."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from run_lines import events, lines, metrics
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from precision import gemm_layers, observe
from precision.observe import is_sampled, observing
from trainer.config import Config
from trainer.config.health import TO_BF16, check_shadow
from trainer.forecast.memory import forecast_memory
from trainer.forecast.preflight import check
from trainer.health import shadow
from trainer.health.casts import Casts
from trainer.health.health import COUNTS, Health, load_statistics
from trainer.parallel.blocks import parallelize
from trainer.parallel.mesh import Degrees
from trainer.step import second_pass
from trainer.step.engine import Engine, build_engine
from trainer.step.train_step import train_step
from trainer.trainer import Trainer

Configs = Callable[..., Config]
CPU = torch.device("cpu")
STEPS = 2


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(320, (4, 25), generator=generator) for _ in range(STEPS)]


def everything(engine: Engine) -> dict[str, Tensor]:
    """All that a step may change."""
    state: dict[str, Tensor] = dict(engine.model.state_dict())
    for name, moments in engine.optimizer.state_dict().items():
        state |= {f"{name}/{key}": value for key, value in moments.items()}
    for key in ("amax", "max_logits", "scale", "history"):
        state[key] = getattr(engine.arena, key)
    for i, layer in enumerate(gemm_layers(engine.model)):
        assert layer.operand is not None
        state |= {f"{i}.{k}": t.float() for k, t in zip("abcd", layer.operand, strict=True) if t is not None}
    return state | {"rng": torch.get_rng_state(), "committed": engine.guard.committed}


def train(config: Config, watched: bool, compiler: Any = None) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """State after some steps, and what was written about each."""
    engine, entries, written = build_engine(config, CPU), list[dict[str, Any]](), list[dict[str, Any]]()
    if compiler is not None:
        parallelize(engine.model, config.recompute, True, compiler)
    every = 1 if watched else 0
    shadow_every = every if any(layer.recipe.is_fp8 for layer in gemm_layers(engine.model)) else 0
    watch = replace(config.health, every=every, shadow_every=shadow_every)
    health = Health(watch, engine, lambda entry: entries.append(dict(entry)), 4, 2)
    for step, tokens in enumerate(batches(), start=1):
        health.before(step, tokens)
        assert all(p.grad is None for p in engine.model.parameters())
        with health.inside(step, logged=True):
            result = train_step(engine, step, tokens, 2)
        assert bool(result.verdict.ok) and not is_sampled()
        if watched:
            collected = health.collect(result.load, result.verdict.ok)
            line = health.report(step, {k: v.tolist() for k, v in collected.items()})
            written.append(line | entries[-1])
    return everything(engine), written


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("bf16", ["recompute=full"]),
        ("fp8_delayed", []),
        ("fp8_jit", ["precision.table.lm_head=fp8"]),
        ("fp8_block", ["recompute=selective"]),
    ],
)
def test_training_does_not_notice(config: Configs, recipe: str, more: list[str]) -> None:
    made = config(f"+recipe={recipe}", "precision.backend=reference", *more)
    alone, _ = train(made, False)
    watched, lines = train(made, True)
    assert alone.keys() == watched.keys()
    for name, tensor in alone.items():
        assert torch.equal(tensor, watched[name]), name
    line = lines[-1]
    assert all(math.isfinite(line[f"act/kurtosis_{place}"]) for place in ("qkv", "ffn", "block"))
    assert ("fp8/error_worst" in line) == ("shadow/loss_gap" in line) == (recipe != "bf16")
    if recipe != "bf16":
        # FP8 shows, as the rounding that it is: E4M3 has 3 bits, E5M2 2; BF16 has 8. A loss may be equal
        assert 0 < line["fp8/error_mean"] < 2**-3 and math.isfinite(line["shadow/loss_gap"])
        assert 0 < line["shadow/cosine_mean"] < 1 - 2**-16


def test_a_step_sees_every_cast_of_every_microbatch(config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the observer apart sees of the same tokens, of all of them or of some rows."""
    made = config("+recipe=fp8_delayed", "precision.table.lm_head=fp8", "precision.backend=reference")
    engine, tokens = build_engine(made, CPU), batches()[0]
    train_step(engine, 1, tokens, 2)
    health = Health(replace(made.health, every=1), engine, lambda entry: None, 4, 2)
    whole = Casts(health.rows, CPU)
    with second_pass.without_side_effects(engine), observing(whole):
        for microbatch in tokens.split(2):
            second_pass.run(engine, microbatch, 4, lambda name, parameter: setattr(parameter, "grad", None))
    weights = torch.tensor([name.endswith(":weight") for name in health.rows.names])
    for most in (4096, 17):
        monkeypatch.setattr(observe, "SAMPLE_ON_CPU", most)
        with health.inside(2, logged=True):
            result = train_step(engine, 2, tokens, 2)
        ours, theirs = (casts._parts.sum(1) for casts in (health._casts, whole))
        theirs[weights] /= 2  # made for each pass there, once for a step here
        seen = health.collect(result.load, result.verdict.ok)
        assert torch.isfinite(seen["tensors/fp8/error"]).all(), "inputs, weights and gradients of each GEMM"
        if most == 17:
            assert (ours[:, 0] < theirs[:, 0] / 2).all()
            torch.testing.assert_close(ours[:, 3] / ours[:, 4], theirs[:, 3] / theirs[:, 4], rtol=1, atol=0)
            break
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
        engine = build_engine(made, CPU)
        train_step(engine, 1, tokens, 2)
        health = Health(replace(made.health, every=1), engine, lambda entry: None, 4, 2)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_sampled_steps_of_compiled_blocks_compile_nothing_and_show_what_eager_ones_do(
    config: Configs, backend: str
) -> None:
    dense = ["model.num_layers=1", "model.num_mtp_layers=0", "precision.backend=reference"]
    made = config("+recipe=fp8_delayed", *dense)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    left, _ = train(made, False, counter)
    graphs = counter.frame_count
    state, lines = train(made, True, counter)
    assert 0 < graphs == counter.frame_count
    assert all(torch.equal(tensor, state[name]) for name, tensor in left.items())
    eager = train(made, True)[1]
    if backend == "aot_eager":  # the same operations
        assert [(line["fp8"], line["blocks"]) for line in lines] == [(line["fp8"], line["blocks"]) for line in eager]
        return
    # fused, they round less, which moves numbers over an edge of FP8: by less than other weights do
    seeds = [config("+recipe=fp8_delayed", *dense, f"trainer.seed={made.trainer.seed + i}") for i in (1, 2, 3)]
    runs = [eager, *(train(each, True)[1] for each in seeds)]
    for group in ("fp8", "blocks"):
        for what in eager[0][group]:
            if what == "error" or group == "blocks":  # "saturated" and "underflown" count too few numbers
                ours, *theirs = (torch.tensor(each[0][group][what]) for each in (lines, *runs))
                others = torch.stack(theirs)
                assert ((ours - theirs[0]).abs() <= (others.amax(0) - others.amin(0)).amax()).all(), (group, what)


def test_a_shadow_compares_with_the_bf16_run_itself(config: Configs) -> None:
    ours = build_engine(config("+recipe=fp8_block", "precision.backend=reference"), CPU)
    theirs = build_engine(config("+recipe=bf16", "precision.backend=reference"), CPU)
    tokens = batches()[0][:2]
    seen = shadow.compare(ours, tokens, 4)
    losses = []
    for engine in (ours, theirs):
        losses.append(engine.model(tokens))
        losses[-1].total.backward()
    gap = losses[0].lm.detach().double() - losses[1].lm.detach().double()
    assert torch.equal(seen.loss_gap, gap)
    names = shadow.module_names(ours)
    norm = torch.stack([p.grad.norm() for p in theirs.model.parameters() if p.grad is not None]).norm()
    for i, (a, b) in enumerate(zip(ours.model.parameters(), theirs.model.parameters(), strict=True)):
        assert a.grad is not None and b.grad is not None
        cosine = torch.cosine_similarity(a.grad.flatten().double(), b.grad.flatten().double(), 0)
        assert float(seen.cosine[i]) == pytest.approx(float(cosine), abs=1e-5), names[i]
        assert float(seen.share[i]) == pytest.approx(float(b.grad.norm() / norm), rel=1e-4), names[i]
    assert names[0] == "embed" and "layers.1.moe.experts.down" in names


def test_saturation_shows_before_the_scale_knows(config: Configs) -> None:
    """Weights that grow a thousandfold at once: the history's scale is too large for them, and the step says so."""
    made = config("+recipe=fp8_delayed", "precision.backend=reference")
    engine, written = build_engine(made, CPU), list[dict[str, Any]]()
    health = Health(replace(made.health, every=2), engine, lambda entry: written.append(dict(entry)), 4, 2)
    train_step(engine, 1, batches()[0], 2)
    layer = next(layer for layer in gemm_layers(engine.model) if layer.recipe.is_fp8)
    with torch.no_grad():
        layer.weight.mul_(1000)
    with health.inside(2, logged=True):
        result = train_step(engine, 2, batches()[1], 2)
    found = health.report(2, {k: v.tolist() for k, v in health.collect(result.load, result.verdict.ok).items()})
    assert found["fp8/saturated_worst"] > 0.9
    row = written[0]["names"]["fp8"].index("layers.0.attn.q:weight")
    assert written[1]["fp8"]["saturated"][row] > 0.9 and written[1]["fp8"]["error"][row] > 0.9


def test_the_scale_of_the_heads_gradient_is_that_of_its_bound(config: Configs) -> None:
    """1 / targets of a microbatch, and not that of past steps, which had fewer."""
    keys = ("precision=fp8_delayed", "precision.table.lm_head=fp8", "model.num_mtp_layers=0", "health.every=0")
    phases = "trainer.phases=[{until: 2}, {microbatch_size: 4}]"
    sizes = ("trainer.max_steps=3", "trainer.global_batch_size=4", "trainer.microbatch_size=1", phases)
    trainer = Trainer(config(*keys, *sizes, "logging.every=1"))
    names, *entries = lines(trainer.train().folder / "tensors.jsonl")
    at = names["names"]["fp8"].index("lm_head:grad")
    scales = [entry["fp8"]["scale"][at] for entry in entries]
    assert scales == pytest.approx([57344 * 24, 57344 * 24, 57344 * 96], rel=0.02)
    arena = trainer.run.engine.arena
    own = (arena.scaled & (arena.in_force() == 0)).nonzero().flatten().tolist()
    assert [arena.names[row] for row in own] == ["lm_head:grad"], "no report of a bad step has a scale of it"


def test_entropy_of_loads() -> None:
    statistics = load_statistics(torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0]]))
    torch.testing.assert_close(statistics["entropy"], torch.tensor([1.0, 0.0, 0.5]).double())
    assert str(float(statistics["entropy"][1])) == "0.0", "an alert prints it"
    assert statistics["load_max_over_mean"].tolist() == [1, 4, 2]


def test_the_load_of_an_only_expert_is_even() -> None:
    """Else every run with one expert has an alert that its router has collapsed."""
    statistics = load_statistics(torch.tensor([[7], [64]]))
    assert [each.tolist() for each in statistics.values()] == [[1.0, 1.0], [1.0, 1.0]]


def test_a_run_writes_metrics_and_tensors(config: Configs) -> None:
    keys = ["+recipe=fp8_delayed", "run.name=it", "logging.every=4", "health.every=3", "health.shadow_every=5"]
    folder = Trainer(config(*keys, "checkpoint.every=4")).train().folder
    logged = {line["step"]: line for line in metrics(folder, "loss/total")}
    names, *entries = lines(folder / "tensors.jsonl")
    assert not (folder / "dashboard.html").exists(), "health.dashboard=false"
    assert list(logged) == [entry["step"] for entry in entries] == [1, 3, 4, 5, 6]
    for step, (line, entry) in enumerate(zip(logged.values(), entries, strict=True)):
        step = line["step"]
        assert 0 < line["optim/update_ratio"] < 0.1 and line["memory/allocated_gib"] > 0
        assert line["moe/entropy_worst"] <= line["moe/entropy"] <= 1 and 0 < line["moe/bias_max"] < 0.1
        rows, moe = entry["fp8"], entry["moe"]
        assert len(rows["scale"]) == len(rows["amax"]) == len(names["names"]["fp8"])
        assert all(len(values) == len(names["names"]["moe"]) == 2 for values in moe.values())
        blocks = entry["blocks"]
        assert ("fp8/error_mean" in line) == ("error" in rows) == ("kurtosis_qkv" in blocks) == (step in (3, 6))
        assert len(tops := blocks["max_logit"]) == 3 and min(tops) > 0
        assert max(tops) == pytest.approx(line["act/max_logit"], rel=1e-3)
        assert ("shadow/loss_gap" in line) == ("shadow" in entry) == (step == 5)
        assert ("load" in entry) == (step in (3, 5, 6))
    look, shadowed = entries[1], entries[3]
    assert names["names"]["blocks"] == ["layers.0", "layers.1", "mtp.0"]
    assert all(len(look["blocks"][f"kurtosis_{place}"]) == 3 for place in ("qkv", "ffn", "block"))
    assert [sum(block) for block in look["load"]] == [4 * 24 * 2] * 2
    assert max(look["fp8"]["error"]) == pytest.approx(logged[3]["fp8/error_worst"], rel=1e-3)
    assert 0 < shadowed["shadow"]["cosine"]["lm_head"] <= 1
    of_all = zip(shadowed["shadow"]["cosine"].values(), shadowed["shadow"]["share"].values(), strict=True)
    worst = min(cosine for cosine, share in of_all if share >= COUNTS)
    assert logged[5]["shadow/cosine_worst"] == pytest.approx(worst, rel=1e-3)

    folder = Trainer(config(*keys, "run.resume=auto", "trainer.max_steps=7", "checkpoint.every=0")).train().folder
    again = lines(folder / "tensors.jsonl")
    assert [entry.get("step") for entry in again] == [None, 1, 3, 4, 5, 6, None, 7]
    assert again[6] == names


def test_a_sampled_step_with_every_logged_line(config: Configs) -> None:
    keys = ["+recipe=fp8_delayed", "logging.every=2", "trainer.max_steps=5", "trainer.microbatch_size=4"]
    keys += ["model.num_layers=1", "model.num_mtp_layers=0"]
    for every, inside in (("null", [1, 2, 4, 5]), ("4", [4]), ("0", [])):
        folder = Trainer(config(*keys, f"health.every={every}", f"run.name=every{every}")).train().folder
        logged = metrics(folder, "loss/total")
        assert [line["step"] for line in logged] == [1, 2, 4, 5]
        assert [line["step"] for line in logged if "fp8/error_mean" in line] == inside
        assert [line["step"] for line in logged if "act/kurtosis_qkv" in line] == inside


def test_a_shadow_without_memory_costs_shadows_and_not_the_run(
    config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(shadow, "compare", full)
    keys = ["+recipe=fp8_delayed", "health.shadow_every=2", "trainer.max_steps=4"]
    folder = Trainer(config(*keys)).train().folder
    (alert,) = events(folder, "alert")
    assert alert["step"] == 2 and alert["message"].startswith("health.shadow_every=2: not enough memory")
    assert [line["step"] for line in metrics(folder, "loss/total")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["+recipe=bf16", "health.shadow_every=10"], "health.shadow_every=10: nothing computes in FP8"),
        (["health.every=-1"], "health.every=-1: out of range"),
        (["health.shadow_every=-2"], "health.shadow_every=-2: out of range"),
    ],
)
def test_impossible_health_settings_are_refused(config: Configs, keys: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check(config(*keys))
    check(config("+recipe=fp8_jit", "health.shadow_every=10", "health.every=0"))


def test_attention_alone_in_fp8_is_compared_with_bf16(config: Configs) -> None:
    plan = check(config("+recipe=bf16", "precision.table.attn.core=fp8", "health.shadow_every=10"))
    assert plan.has_fp8 and plan.fp8_share == 0.0


def test_what_alerts_advise_to_resume_in_bf16_is_accepted(config: Configs) -> None:
    recipe, no_shadow = TO_BF16.split()
    check(config(recipe, "health.shadow_every=10", no_shadow))


def test_the_forecast_knows_of_the_shadow(config: Configs) -> None:
    plain, shadowed = (config("+recipe=fp8_delayed", f"health.shadow_every={every}") for every in (0, 10))
    plan = check(shadowed)
    without, with_it = forecast_memory(plain, plan), forecast_memory(shadowed, plan)
    fp8 = [row for row in plan.gemms.values() if row.recipe.is_fp8]
    size = 2 * sum(row.in_features * row.out_features * row.groups for row in fp8)
    assert with_it == without | {"BF16 shadow": size}
    ranks = forecast_memory(shadowed, plan, Degrees(shard=2))
    assert 0 < ranks["BF16 shadow"] <= size


def test_steps_of_transformer_engine_are_not_sampled(config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config("+recipe=fp8_delayed", "health.every=7")
    with pytest.raises(ValueError, match=r"health\.shadow_every=5: Transformer Engine"):
        check_shadow(replace(made.health, shadow_every=5), fp8=True, transformer_engine=True)
    check_shadow(made.health, fp8=True, transformer_engine=True)
    engine = build_engine(made, CPU)
    quiet = Health(made.health, engine, lambda entry: None, 4, 2)
    assert quiet.note is None and quiet.due(7)
    monkeypatch.setattr(engine.plan, "served_by", lambda backend: backend == "transformer_engine")
    health = Health(made.health, engine, lambda entry: None, 4, 2)
    assert health.note is not None and "Transformer Engine" in health.note and not health.due(7)
    with health.inside(7, logged=True):
        assert not is_sampled()
