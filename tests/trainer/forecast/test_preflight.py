"""Preflight: keys that do not fit each other are refused by name, and the forecast is what a run takes."""

import re
from collections.abc import Callable

import pytest
import torch
from composed import config_of

from precision import bind
from precision.errors import UserError
from precision.hardware import Gpu
from precision.linear import gemm_layers
from trainer.config import Config
from trainer.forecast import preflight
from trainer.forecast.check_values import check_values, with_fitting_microbatch
from trainer.forecast.dry_run import report
from trainer.forecast.fits import out_of_memory_message
from trainer.forecast.gpus import Target
from trainer.forecast.memory import ROOM, forecast_memory, pick_fsdp_policy
from trainer.forecast.preflight import check, without_effect
from trainer.forecast.stages import check_stages
from trainer.parallel.mesh import Degrees, FsdpPolicy, forecast_degrees, resolve
from trainer.step.engine import build_model
from trainer.trainer import Trainer

Make = Callable[..., Config]
PRECISIONS = ["bf16", "fp32", "fp8_delayed", "fp8_jit", "fp8_block"]
BY_TENSOR = ["precision=fp8_jit", "precision.scaling.granularity=tensor"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "trainer.microbatch_size=3",
            "trainer.microbatch_size=3: it does not divide trainer.global_batch_size=4; set 2",
        ),
        (
            "trainer.microbatch_size=8",
            "trainer.microbatch_size=8: it does not divide trainer.global_batch_size=4; set 4",
        ),
        ("trainer.microbatch_size=0", "trainer.microbatch_size=0: out of range; set 1 or more"),
        ("trainer.max_steps=0", "trainer.max_steps=0: out of range; set 1 or more"),
        ("trainer.seed=-1", "trainer.seed=-1: out of range; set 0 or more"),
        ("trainer.sequence_length=8192", "set at most 4096"),
        (
            "trainer.sequence_length=1",
            "trainer.sequence_length=1: model.num_mtp_layers=1 predicts that many tokens further",
        ),
        ("run.dir=", "run.dir='': no folder; set a folder, or leave it out"),
        ("run.init_from=", "run.init_from='': no folder; set null"),
        ("data.cache_dir=", "data.cache_dir='': prepared data needs a folder"),
        ("logging.every=0", "logging.every=0: out of range; set 1 or more"),
        ("eval.every=-5", "eval.every=-5: must be steps (2000), tokens (10B) or a share of the run"),
        ("eval.at_end=0", "eval.at_end=0: out of range; set 1 or more, or null"),
        ("eval.batches=0", "eval.batches=0: out of range; set 1 or more, or null"),
        ("checkpoint.keep=-1", "checkpoint.keep=-1: out of range"),
        ("recovery.max_consecutive_skips=-1", "recovery.max_consecutive_skips=-1: out of range"),
        ("parallel.timeout=0", "parallel.timeout=0.0: out of range; set seconds, 1 to 1e9"),
        ("parallel.timeout=1e10", "parallel.timeout=10000000000.0: out of range; set seconds, 1 to 1e9"),
        ("health.power.seconds=inf", "health.power.seconds=inf: out of range; set 0.1 to 3600"),
        ("optim.lr=0", "optim.lr=0.0: out of range; set a number above 0"),
        ("optim.lr=nan", "optim.lr=nan: out of range"),
        ("optim.eps=1e-60", "optim.eps=1e-60: it is 0 in FP32, and 0 / 0 not a number; set 1e-8"),
        ("optim.muon.momentum=2", "optim.muon.momentum=2.0: out of range; set 0.95"),
        (
            "trainer.phases=[{router_bias_update_rate:0.1}] model.num_dense_layers=2 model.num_mtp_layers=0",
            "trainer.phases[0].router_bias_update_rate=0.1: no block has experts; leave it out",
        ),
        (
            "trainer.phases=[{router_bias_update_rate:1}] model.router_scoring=softmax model.router_bias_update_rate=0",
            "trainer.phases[0].router_bias_update_rate=1.0: model.router_scoring=softmax has no bias; leave it out",
        ),
        ("optim.clip=0", "optim.clip=0.0: out of range; set a number above 0, or null not to clip"),
        ("optim.weight_decay=nan", "optim.weight_decay=nan: out of range"),
        ("optim.weight_decay=inf", "optim.weight_decay=inf: out of range"),
        ("optim.decay_fraction=1.5", "optim.decay_fraction=1.5: it is a share; set 0 to 1"),
        ("optim.betas=[0.9]", "optim.betas=[0.9]: AdamW has two"),
        ("optim.betas=[0.9,1]", "optim.betas=[0.9, 1.0]: AdamW has two, from 0 to below 1"),
        ("debug.inject={step:7,where:loss,value:nan}", "debug.inject.step=7: there is no such step; set 1 to"),
        ("debug.inject={step:1,where:loss,value:0}", "debug.inject.value=0.0: it would do nothing; set nan or inf"),
        ("debug.inject={step:1,where:loss,value:9,steps:0}", "debug.inject.steps=0: out of range; set 1"),
        ("debug.inject={step:1,where:loss,value:9,windows:[3]}", "debug.inject.windows=[3]: no such range; set [BEGIN"),
        ("recovery.spikes.window=1", "recovery.spikes.window=1: too few steps"),
        ("recovery.spikes.min_steps=129", "recovery.spikes.min_steps=129: it is a part of recovery.spikes.window=128"),
        ("recovery.spikes.threshold=0", "recovery.spikes.threshold=0.0: out of range; set a number above 0"),
        ("recovery.rewind.max=-1", "recovery.rewind.max=-1: out of range; set 0 or more"),
        ("recovery.rewind.lr_factor=2", "recovery.rewind.lr_factor=2.0: a rewind may lower the learning rate"),
        (
            "recovery.rewind.lr_factor=0.5 recovery.rewind.lr_steps=0",
            "recovery.rewind.lr_steps=0: the learning rate is lowered for no step; set 1",
        ),
        ("precision.backend=cuda trainer.device=cpu", "precision.backend=cuda: it needs a Hopper GPU (sm_90)"),
        ("precision.backend=reference precision.never_slower=true", "precision.never_slower=true: backend=refer"),
        (
            "trainer.phases=[{until:2},{global_batch_size:3}]",
            "step 3 on: trainer.microbatch_size=2: it does not divide trainer.phases[1].global_batch_size=3; set 1",
        ),
        ("model.hidden_size=1e15", "model.hidden_size=1000000000000000: out of range; set at most 262144"),
        ("model.num_layers=1e15", "model.num_layers=1000000000000000: out of range; set at most 4096"),
        ("model.num_experts_per_token=5", "model.num_experts_per_token=5: there are 4 experts"),
        ("data.validation_fraction=0", "data.validation_fraction=0"),
        ("data.path=/does/not/exist", "data.path=/does/not/exist: there is no such folder"),
    ],
)
def test_keys_that_do_not_fit_each_other_are_refused_in_one_line(config: Make, override: str, says: str):
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        check(config(*override.split()))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("mode", ["nonsense", "offline", ""])
def test_a_mode_that_wandb_would_refuse_is_refused_before_the_run(
    config: Make, mode: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", mode)
    check(config())
    if mode != "nonsense":
        check(config("logging.wandb.enabled=true"))
        return
    with pytest.raises(ValueError, match=r"WANDB_MODE=nonsense: not one of online, offline, .*; set one"):
        check(config("logging.wandb.enabled=true"))


def test_a_dimension_that_fp8_cannot_have_is_refused_but_bf16_takes_it(config: Make):
    odd = "model.moe_intermediate_size=36"
    check(config(odd))
    with pytest.raises(ValueError, match=r"^layers\.1\.moe\..* cannot run in FP8: .* not a multiple of 16; "):
        check(config(odd, "precision=fp8_delayed"))


def test_the_exceptions_that_are_advised_for_such_dimensions_add_up(config: Make):
    odd = ["precision=fp8_delayed", "model.moe_intermediate_size=36", "model.intermediate_size=68"]
    odd += ["model.kv_lora_rank=36", 'precision.rules.exceptions=[{match: "layers.*.attn.o", precision: bf16}]']
    for _ in range(3):
        with pytest.raises(UserError, match="cannot run in FP8") as refusal:
            check(config(*odd))
        odd.append(str(refusal.value).partition(" or set ")[2].strip("'"))
    plan = check(config(*odd))
    assert not plan.gemms["layers.0.attn.o"].recipe.is_fp8  # what was given remains


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


def test_the_report_names_plan_parameters_flops_and_memory_of_the_largest_model():
    config = config_of(["+recipe=fp8_delayed", "model=deepseek_v3"])
    text = report(config, check(config))
    experts = r"^layers\.3-60\.moe\.experts\.gate_up +moe\.experts +7168 -> 4096 x 256 +e4m3 +e5m2"
    assert re.search(experts, text, re.MULTILINE)
    assert re.search(r"^gemm flops in fp8: 92\.\d% of the model", text, re.MULTILINE)
    assert "parameters   682.64 G total, 37.31 G active" in text  # 671 G and MTP's 11.6 G
    assert re.search(r"^flops +\d+\.\d+ G a token", text, re.MULTILINE)
    assert "memory of one process, GiB: a forecast" in text
    *sizes, fits = text.splitlines()[-8:]
    memory = {line[2:18].strip(): float(line[18:]) for line in sizes}
    assert fits.startswith("does not fit: model.num_layers=61: each process is forecast to take")
    assert list(memory) == ["parameters", "gradients", "optimizer", "compute weights", "activations", "head", "total"]
    assert memory["parameters"] == pytest.approx(682.64e9 * 4 / 2**30, rel=1e-4)
    assert memory["head"] == pytest.approx(2 * 129280 * 7168 * 4 / 2**30, rel=1e-3)  # MTP uses it a second time
    assert memory["total"] == pytest.approx(sum(memory.values()) / 2, rel=1e-6)


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


def test_a_dry_run_of_more_ranks_gives_each_its_share_of_the_batch(config: Make):
    made = config("parallel.shard=2", "trainer.microbatch_size=4", "trainer.global_batch_size=4")
    assert "a forecast, microbatch 2 x" in report(made, check(made))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["parallel=fsdp"], "memory of one process"),
        (["parallel=hsdp"], "memory of each of 8 ranks (replicate 1, shard 8, expert 1)"),
        (["parallel=fsdp", "parallel.expert=4"], "memory of each of 4 ranks (replicate 1, shard 4, expert 4)"),
        (["parallel=hsdp", "parallel.shard=2", "parallel.expert=4"], "4 ranks (replicate 2, shard 2, expert 4)"),
    ],
)
def test_a_dry_run_of_one_process_takes_the_fewest_ranks_that_go_together(config: Make, keys: list[str], says: str):
    made = config(*keys, "trainer.global_batch_size=16")
    assert says in report(made, check(made))


def test_ranks_warn_that_auto_would_take_transformer_engine(config: Make, monkeypatch: pytest.MonkeyPatch):
    """On a chip newer than Hopper."""
    monkeypatch.setattr(preflight, "target", lambda _: Target(Gpu("NVIDIA B200", (10, 0)), 2.0**37))
    monkeypatch.setattr("trainer.forecast.preflight.build_problem", lambda: None)
    monkeypatch.setattr("trainer.forecast.preflight.proof.prove", lambda _: None)  # there is no such GPU
    monkeypatch.setattr("precision.resolve.te_problem", lambda *_: None)
    made = config("+recipe=fp8_delayed", "parallel=fsdp", "trainer.device=auto", "precision.backend=auto")
    assert check(made, world_size=1).served_by("transformer_engine")
    with pytest.raises(ValueError, match=r"backend=auto: on NVIDIA B200 it takes Transformer Engine, and its modules"):
        check(made, world_size=2)


def test_smaller_microbatches_leave_evaluations_as_long_as_they_were(config: Make):
    made = config("parallel=fsdp", "trainer.microbatch_size=8", "trainer.global_batch_size=8", "eval.batches=3")
    for ranks, size, batches in ((1, 8, 3), (2, 4, 6), (8, 1, 24)):
        shared = with_fitting_microbatch(made, resolve(made.parallel, ranks))
        assert (shared.trainer.microbatch_size, shared.eval.batches) == (size, batches)
    made = config("parallel=fsdp", "trainer.microbatch_size=4", "trainer.global_batch_size=12", "eval.batches=1")
    assert with_fitting_microbatch(made, resolve(made.parallel, 4)).eval.batches == 2, "4 windows, 3 at a time"
    every = config("parallel=fsdp", "trainer.microbatch_size=4", "trainer.global_batch_size=4", "eval.batches=null")
    assert with_fitting_microbatch(every, resolve(every.parallel, 2)).eval.batches is None


def test_each_stage_has_a_microbatch(config: Make):
    for batch, size in ((32, 8), (12, 3), (6, 1), (2, 1)):
        keys = f"trainer.global_batch_size={batch}", "trainer.microbatch_size=16", "trainer.device=cpu"
        made = config("parallel.shard=2", "parallel.pipeline=2", *keys)
        degrees = resolve(made.parallel, 4)
        staged = with_fitting_microbatch(made, degrees)
        assert staged.trainer.microbatch_size == size
        if batch > 2:
            check_stages(staged, degrees)
    with pytest.raises(ValueError, match=r"global_batch_size=2: parallel.pipeline=2 .*; set 4 or a multiple of it"):
        check_stages(staged, degrees)


def test_degrees_that_do_not_go_with_the_batch_are_refused_by_a_dry_run_too(config: Make):
    made = config("parallel.shard=3")
    with pytest.raises(ValueError, match=r"^trainer\.global_batch_size=\d+: 3 ranks .* set a multiple of"):
        report(made, check(made))


@pytest.mark.parametrize(
    ("batch", "size", "says"),
    [
        (7, 4, "trainer.global_batch_size=7: 2 ranks compute a multiple of 2 sequences; set a multiple of 2"),
        (12, 5, "it does not divide a rank's 6 sequences of trainer.global_batch_size=12; set 3, or another divisor"),
    ],
)
def test_what_is_advised_for_a_batch_suits_its_ranks_too(config: Make, batch: int, size: int, says: str):
    made = config("parallel=fsdp", f"trainer.global_batch_size={batch}", f"trainer.microbatch_size={size}")
    with pytest.raises(ValueError, match=re.escape(says)):
        check(made, world_size=2)
    two = config("parallel.shard=2", f"trainer.global_batch_size={batch}", f"trainer.microbatch_size={size}")
    with pytest.raises(ValueError, match=re.escape(says)):  # in a dry run by one process
        check_values(two, forecast_degrees(two.parallel, 1))


def test_a_gpu_without_a_compiler_is_reported_before_training(config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "build_problem", lambda: "no compiler; install one")
    check(config("trainer.device=cpu"))
    monkeypatch.setattr(preflight, "target", lambda _: Target(Gpu("NVIDIA A100", (8, 0)), 2.0**36))
    made = config("trainer.device=auto")
    with pytest.raises(ValueError, match=r"^trainer\.device=auto: no compiler; install one$"):
        check(made)
    check(config("trainer.device=auto", "dry_run=true"))


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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("parallel=single",), r"parallel\.shard=1: .*choose parallel=fsdp"),
        (
            ("trainer.microbatch_size=4", "trainer.global_batch_size=4"),
            r"global_batch_size=4: 2 ranks .* multiple of 8",
        ),
        (
            ("parallel.expert=2", "model.num_experts=5"),
            r"parallel\.expert=2: it does not divide .*num_experts=5; set 1",
        ),
        (
            ("parallel.expert=6", "parallel.shard=6", "model.num_experts=4", "trainer.global_batch_size=12"),
            r"parallel\.expert=6: it does not divide .*num_experts=4; set 2",  # 4 would not go with six ranks
        ),
        (("precision.backend=transformer_engine",), r"backend=transformer_engine: its modules hold whole weights"),
        (("parallel.tensor=2", "model.num_heads=3"), r"parallel\.tensor=2: it does not divide model\.num_heads=3; set"),
        (("parallel.tensor=2", "model.vocab_size=501"), r"tensor=2: it does not divide model\.vocab_size=501"),
        (("parallel.tensor=2", "model.v_head_dim=8", "model.num_heads=2"), r"tensor=2: a rank's 1 heads of"),
        (("parallel.tensor=2", "health.shadow_every=3"), r"every=3: it does not support parallel\.tensor=2; set"),
    ],
)
def test_settings_that_ranks_cannot_share_are_refused(
    config: Callable[..., Config], keys: tuple[str, ...], message: str
) -> None:
    made = config("parallel=fsdp", *keys)
    with pytest.raises(ValueError, match=message):
        check(made, world_size=max(made.parallel.shard, 2))


@pytest.mark.parametrize(
    ("keys", "ranks", "says"),
    [
        (
            ["data.stop=all_exhausted"],
            1,
            "data.stop=all_exhausted has no effect: without weights all text is read, once",
        ),
        (["parallel.schedule=zbv"], 1, "parallel.schedule=zbv has no effect: there is one stage; set interleaved"),
        (["parallel.reshard_after_forward=true"], 1, "parallel.reshard_after_forward=true has no effect: one process"),
        (["parallel.reshard_after_forward=true"], 2, None),
        (
            ["parallel.expert=2", "model.num_dense_layers=1", "model.num_layers=1", "model.num_mtp_layers=0"],
            2,
            "parallel.expert=2 has no effect: no block has experts; set 1, or fewer model.num_dense_layers",
        ),
        (["parallel.expert=2"], 2, None),
        (["health.shadow_every=7"], 1, "health.shadow_every=7 has no effect: the run ends before, trainer.max_steps=6"),
        (["health.shadow_every=6"], 1, None),
        (["recovery.rewind.margin=1"], 1, "recovery.rewind.margin=1 has no effect: checkpoint.every=0, the run never"),
        (
            ["recovery.rewind.lr_factor=0.5", "recovery.rewind.max=0"],
            1,
            "lr_factor=0.5 has no effect: recovery.rewind.m",
        ),
        (["recovery.rewind.margin=1", "checkpoint.every=3"], 1, None),
        (["recovery.spikes.window=99"], 1, "spikes.window=99 has no effect: recovery.spikes.enabled=false does not"),
        (["recovery.spikes.window=99", "recovery.spikes.enabled=true"], 1, None),
        (["optim.muon.coefficients=polar_express"], 1, "coefficients=polar_express has no effect: optim.name=adamw"),
        (["optim.muon.coefficients=polar_express", "optim=muon_wsd"], 1, None),
        ([], 1, None),
    ],
)
def test_settings_without_effect_are_named(config: Make, keys: list[str], ranks: int, says: str | None):
    lines = without_effect(config(*keys), ranks)
    assert len(lines) == (says is not None) and (says is None or says in lines[0])


def test_settings_without_effect_are_reported_at_the_start_and_by_a_dry_run(config: Make):
    made = config("data.stop=all_exhausted", "trainer.max_steps=1", "health.every=0", "precision=fp32")
    (line,) = without_effect(made, 1)
    assert report(made, check(made)).endswith(f"\n{line}") and "no effect" not in report(config(), check(config()))
    run = Trainer(made).train().folder
    assert f"config: {line}" in (run / "logs" / "rank0.log").read_text()
    assert '"kind":"config"' in (run / "events.jsonl").read_text().replace('": "', '":"')
