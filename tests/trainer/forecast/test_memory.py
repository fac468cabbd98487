"""The memory that is forecast is what a model takes, on one rank and on several, and the FSDP policy follows it."""

import re
from collections.abc import Callable

import pytest
import torch
from composed import config_of

from precision import bind
from precision.linear import gemm_layers
from trainer.config import Config
from trainer.forecast.dry_run import report
from trainer.forecast.fits import out_of_memory_message
from trainer.forecast.memory import ROOM, forecast_memory, pick_fsdp_policy
from trainer.forecast.preflight import check
from trainer.parallel.mesh import Degrees, FsdpPolicy, resolve
from trainer.step.engine import build_model

Make = Callable[..., Config]
PRECISIONS = ["bf16", "fp32", "fp8_delayed", "fp8_jit", "fp8_block"]
BY_TENSOR = ["precision=fp8_jit", "precision.scaling.granularity=tensor"]


@pytest.mark.parametrize("precision", [[f"precision={name}"] for name in PRECISIONS] + [BY_TENSOR], ids=str)
def test_the_forecast_of_weights_is_what_a_bound_model_holds(config: Make, precision: list[str]):
    made = config(*precision)
    plan, model = build_model(made, torch.device("cpu"))
    bind(model, plan, torch.device("cpu"))
    masters = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    operands = [layer.operand for layer in gemm_layers(model) if layer.operand is not None]
    parts = [part for operand in operands for part in (operand.data, operand.data_t) if part is not None]
    copies = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parts}
    forecast = forecast_memory(made, check(made))
    assert forecast["parameters"] == forecast["gradients"] == sum(masters.values())
    assert forecast["optimizer"] == 2 * sum(masters.values())
    assert forecast["compute weights"] == sum(size for at, size in copies.items() if at not in masters)


def test_recomputation_and_smaller_microbatches_take_less(config: Make):
    def activations(*overrides: str) -> float:
        made = config("model.num_layers=6", *overrides)
        return forecast_memory(made, check(made))["activations"]

    assert activations("recompute=full") < 0.7 * activations()
    assert activations("trainer.microbatch_size=1") == pytest.approx(activations() / 2)


@pytest.mark.parametrize(
    ("degrees", "part"),
    [
        ("parallel.shard=8", (1 / 8, 1 / 8)),
        ("parallel.replicate=2 parallel.shard=4", (1 / 4, 1 / 4)),
        ("parallel.shard=8 parallel.expert=8", (1 / 8, 1 / 8)),
        ("parallel.replicate=4 parallel.shard=2 parallel.expert=8", (1 / 2, 1 / 8)),
    ],
)
def test_ranks_that_share_a_model_hold_their_parts_of_it(degrees: str, part: tuple[float, float]):
    """part: of everything else, and of the experts' weights."""
    batch = "trainer.microbatch_size=8 trainer.global_batch_size=64 trainer.sequence_length=4096"
    overrides = f"model=moonlight_16b +recipe=fp8_delayed {batch} {degrees}".split()
    made = config_of(overrides)
    plan = check(made)
    alone, shared = forecast_memory(made, plan), forecast_memory(made, plan, resolve(made.parallel, 8))
    experts = 26 * 64 * 3 * 2048 * 1408 * 4
    assert shared["parameters"] == (alone["parameters"] - experts) * part[0] + experts * part[1]
    assert shared["optimizer"] == 2 * shared["parameters"]
    assert shared["compute weights"] < 0.25 * alone["compute weights"]  # three blocks of 27, embedding and head
    assert shared["activations"] == alone["activations"]
    text = report(made, plan)
    assert f"memory of each of 8 ranks (replicate {made.parallel.replicate}, shard {made.parallel.shard}" in text
    assert "communication" in text


def test_activations_go_as_gradients_come(config: Make):
    """In a step of one microbatch; with two, the first one's gradients wait beside the second one's activations."""
    length = "trainer.sequence_length={}".format

    def forecast(*overrides: str) -> dict[str, float]:
        made = config("model.num_layers=6", *overrides)
        return forecast_memory(made, check(made))

    one = "trainer.global_batch_size=2", "trainer.microbatch_size=2"
    two = "trainer.global_batch_size=4", "trainer.microbatch_size=2"
    long, short = forecast(*one, length(512)), forecast(*one, length(2))
    assert long["activations"] == forecast(*two, length(512))["activations"], "as the backward pass begins"
    assert 0 < long["gradients"] < 0.4 * long["parameters"]
    assert short["activations"] == 0 and short["gradients"] == short["parameters"], "as it ends"
    assert sum(long.values()) < sum(forecast(*two, length(512)).values())
    made = config("model.num_layers=6", *one, length(512))
    recorded = forecast_memory(made, check(made), graphs=True)
    assert recorded["gradients"] == recorded["parameters"] and recorded["activations"] == long["activations"]


def test_gradients_that_wait_to_be_reduced_are_whole(config: Make):
    made = config("parallel.shard=2", "trainer.microbatch_size=1", "trainer.global_batch_size=8")
    plan, degrees = check(made), resolve(made.parallel, 2)
    each, once = (forecast_memory(made, plan, degrees, FsdpPolicy(each))["gradients"] for each in (True, False))
    whole = 2 * forecast_memory(made, plan, degrees)["parameters"]
    assert each < 0.95 * once
    assert once == pytest.approx(1.5 * whole, rel=0.01)


def test_weights_of_experts_that_no_other_rank_has_stay(config: Make):
    """The rank's share of them, whether gathered weights stay or not; their gradients wait for nothing, either."""
    keys = "model.num_layers=8", "model.num_dense_layers=0", "model.num_mtp_layers=0", "precision=fp8_delayed"
    made = config(*keys, "parallel.shard=2", "health.shadow_every=1", "trainer.global_batch_size=8")
    plan = check(made)

    def forecast(degrees: Degrees, keeps: bool) -> dict[str, float]:
        return forecast_memory(made, plan, degrees, FsdpPolicy(False, keeps))

    rows = [row for row in plan.gemms.values() if row.op == "moe.experts"]
    experts = sum(row.in_features * row.out_features * row.groups for row in rows) / 2
    spread, shared = Degrees(shard=2, expert=2), Degrees(shard=4, expert=2)
    for name, size in {"compute weights": 1, "BF16 shadow": 2}.items():
        assert forecast(spread, True)[name] == forecast(shared, True)[name], "all of a rank's experts are there"
        gone = forecast(shared, False)[name] + size * experts * 5 / 8  # of 8 blocks three are there at a time
        assert forecast(spread, False)[name] == gone
    ours, theirs = (forecast(degrees, False) for degrees in (spread, Degrees(shard=2)))
    waiting, others = (each["gradients"] - each["parameters"] for each in (ours, theirs))
    assert waiting == others - 4 * 2 * experts


def test_the_fsdp_policy_follows_the_memory(config: Make):
    """With less and less of it: everything, whole gradients, gathered weights, neither; what is asked for is done."""
    batch = "trainer.microbatch_size=1", "trainer.global_batch_size=8", "trainer.sequence_length=8"
    made = config("parallel.shard=2", "model.num_layers=6", "precision=fp32", *batch)
    plan, degrees = check(made), resolve(made.parallel, 2)
    order = [FsdpPolicy(False, True), FsdpPolicy(False, False), FsdpPolicy(True, True), FsdpPolicy(True, False)]
    needs = [sum(forecast_memory(made, plan, degrees, way).values()) / ROOM for way in order]
    assert pick_fsdp_policy(made, plan, degrees, None) == order[1], "a CPU"
    for room in (*needs, 0.0, 1e12):
        fits = [way for way, need in zip(order, needs, strict=True) if need <= room]
        assert pick_fsdp_policy(made, plan, degrees, room) == (fits or order[3:])[0]
    asked = config("parallel.shard=2", "parallel.reshard_after_forward=true", *batch)
    assert pick_fsdp_policy(asked, plan, degrees, 1e12) == FsdpPolicy(False, False)
    asked = config("parallel.shard=2", "parallel.reshard_after_forward=false", *batch)
    assert pick_fsdp_policy(asked, plan, degrees, 0.0) == FsdpPolicy(True, True)


@pytest.mark.parametrize(
    ("in_use", "says"),
    [
        (60.0, "most of it by activations, 32.0 GiB above the forecast .* lower trainer.microbatch_size"),
        (41.0, "most of it by activations, 13.0 GiB above the forecast .* lower trainer.microbatch_size"),
        (30.0, "and optimizer .*parallel.shard"),
    ],
)
def test_a_full_gpu_is_explained(config: Make, in_use: float, says: str):
    made = config()
    forecast = dict.fromkeys(forecast_memory(made, check(made)), 0.0)
    forecast |= {"parameters": 5.0 * 2**30, "optimizer": 15.0 * 2**30, "activations": 8.0 * 2**30}
    message = out_of_memory_message(forecast, in_use * 2**30, 80.0 * 2**30)
    assert message.startswith(f"out of GPU memory: {in_use:.1f} of 80.0 GiB in use") and "\n" not in message
    assert re.search(says, message)
