"""Preflight: keys that do not fit each other are refused by name, and those without effect are named."""

import re
from collections.abc import Callable

import pytest
from composed import config_of

from precision.errors import UserError
from precision.hardware import Gpu
from trainer.config import Config
from trainer.forecast import preflight
from trainer.forecast.check_values import check_values, with_fitting_microbatch
from trainer.forecast.dry_run import report
from trainer.forecast.gpus import Target
from trainer.forecast.preflight import check, without_effect
from trainer.forecast.stages import check_stages
from trainer.parallel.mesh import forecast_degrees, resolve
from trainer.trainer import Trainer

Make = Callable[..., Config]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "trainer.microbatch_size=3",
            "trainer.microbatch_size=3: it does not divide trainer.global_batch_size=4; set 2",
        ),
        ("trainer.microbatch_size=0", "trainer.microbatch_size=0: out of range; set 1 or more"),
        ("trainer.seed=-1", "trainer.seed=-1: out of range; set 0 or more"),
        ("trainer.sequence_length=8192", "set at most 4096"),
        (
            "trainer.sequence_length=1",
            "trainer.sequence_length=1: model.num_mtp_layers=1 predicts that many tokens further",
        ),
        ("run.dir=", "run.dir='': no folder; set a folder, or leave it out"),
        ("logging.every=0", "logging.every=0: out of range; set 1 or more"),
        ("eval.every=-5", "eval.every=-5: must be steps (2000), tokens (10B) or a share of the run"),
        ("eval.at_end=0", "eval.at_end=0: out of range; set 1 or more, or null"),
        ("health.power.seconds=inf", "health.power.seconds=inf: out of range; set 0.1 to 3600"),
        ("optim.lr=0", "optim.lr=0.0: out of range; set a number above 0"),
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
        ("optim.weight_decay=inf", "optim.weight_decay=inf: out of range"),
        ("optim.decay_fraction=1.5", "optim.decay_fraction=1.5: it is a share; set 0 to 1"),
        ("optim.betas=[0.9,1]", "optim.betas=[0.9, 1.0]: AdamW has two, from 0 to below 1"),
        ("debug.inject={step:7,where:loss,value:nan}", "debug.inject.step=7: there is no such step; set 1 to"),
        ("debug.inject={step:1,where:loss,value:0}", "debug.inject.value=0.0: it would do nothing; set nan or inf"),
        ("debug.inject={step:1,where:loss,value:9,steps:0}", "debug.inject.steps=0: out of range; set 1"),
        ("debug.inject={step:1,where:loss,value:9,windows:[3]}", "debug.inject.windows=[3]: no such range; set [BEGIN"),
        ("recovery.spikes.window=1", "recovery.spikes.window=1: too few steps"),
        ("recovery.spikes.min_steps=129", "recovery.spikes.min_steps=129: it is a part of recovery.spikes.window=128"),
        ("recovery.spikes.threshold=0", "recovery.spikes.threshold=0.0: out of range; set a number above 0"),
        ("recovery.rewind.margin=1000001", "recovery.rewind.margin=1000001: out of range; set at most 1000000"),
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
        (
            "optim.schedule=phases trainer.phases=[{until:2,lr:1},{lr:2,lr_shape:linear,lr_until:1}]",
            "trainer.phases[1].lr_until=1: the move of lr would end before it begins, at step 3; set more",
        ),
        (
            "optim.schedule=phases trainer.phases=[{lr:1,lr_until:1}]",
            "trainer.phases[0].lr_until=1: lr_shape=constant changes at once; set trainer.phases[0].lr_shape=linear",
        ),
        ("model.hidden_size=1e15", "model.hidden_size=1000000000000000: out of range; set at most 262144"),
        ("model.num_experts_per_token=5", "model.num_experts_per_token=5: only 4 experts"),
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
    assert plan.gemms["layers.1.moe.router"].decided_by == "table"


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
    monkeypatch.setattr("trainer.forecast.preflight.proof.prove", lambda *_, **__: None)  # there is no such GPU
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


def test_what_is_advised_for_a_batch_suits_its_stages_too(config: Make):
    keys = "parallel.shard=3", "parallel.pipeline=2", "trainer.microbatch_size=2"
    made = config(*keys, "trainer.global_batch_size=8")
    with pytest.raises(ValueError, match=r"3 ranks .* as many microbatches; set a multiple of 6$"):
        check_values(made, resolve(made.parallel, 6))
    made = config(*keys, "trainer.global_batch_size=6")
    degrees = resolve(made.parallel, 6)
    check_stages(with_fitting_microbatch(made, degrees), degrees)


def test_a_gpu_without_a_compiler_is_reported_before_training(config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "build_problem", lambda: "no compiler; install one")
    check(config("trainer.device=cpu"))
    monkeypatch.setattr(preflight, "target", lambda _: Target(Gpu("NVIDIA A100", (8, 0)), 2.0**36))
    made = config("trainer.device=auto")
    with pytest.raises(ValueError, match=r"^trainer\.device=auto: no compiler; install one$"):
        check(made)
    check(config("trainer.device=auto", "dry_run=true"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("parallel=single",), r"parallel\.shard=1: .*set parallel\.shard=-1"),
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
        (("parallel.tensor=2", "model.v_head_dim=8", "model.num_heads=2"), r"tensor=2: a rank has 1 head of"),
        (
            ("parallel.tensor=2", "model.num_heads=2", "model.qk_nope_head_dim=24", "model.qk_rope_head_dim=8"),
            r"tensor=2: a rank has 1 head of model\.qk_nope_head_dim \+ model\.v_head_dim=40, not a multiple of 16",
        ),
        (
            ("parallel.tensor=2", "precision.table.lm_head=fp8", "model.vocab_size=528"),
            r"tensor=2: a rank has 264 words of model\.vocab_size, for a head in FP8 not a multiple of 16; set .*=bf16",
        ),
        (("parallel.tensor=2", "health.shadow_every=3"), r"every=3: it does not support parallel\.tensor=2; set"),
    ],
)
def test_settings_that_ranks_cannot_share_are_refused(
    config: Callable[..., Config], keys: tuple[str, ...], message: str
) -> None:
    made = config("parallel=fsdp", *keys)
    with pytest.raises(ValueError, match=message):
        check(made, world_size=max(made.parallel.shard, 2))


def test_what_no_phase_brings_is_refused_without_one(config: Callable[..., Config]) -> None:
    phases = "trainer.phases=[{until: 2}, {mtp_loss_weight: 0.1}]"
    with pytest.raises(ValueError, match=r"^parallel\.expert=2: it does not divide model\.num_experts=5; set 1"):
        check(config("parallel=fsdp", "parallel.expert=2", "model.num_experts=5", phases), world_size=2)


def test_the_advice_for_tensor_goes_with_the_model_and_the_ranks(config: Make):
    """6 and 3 divide the heads, but not the ranks; of 4, each would have three heads of 24 values."""
    keys = "model.num_heads=12", "model.v_head_dim=24", "trainer.sequence_length=48", "trainer.microbatch_size=1"
    with pytest.raises(ValueError, match=r"^parallel\.tensor=8: it does not divide model\.num_heads=12; set 2$"):
        check(config("parallel=fsdp", "parallel.tensor=8", *keys), world_size=8)
    check(config("parallel=fsdp", "parallel.tensor=2", *keys), world_size=8)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("model.num_heads=6", r"num_heads=6 as 4 ranks with parallel\.context=2; set 1$"),
        ("model.vocab_size=501", r"vocab_size=501; set 1$"),
    ],
)
def test_the_advice_for_tensor_beside_context_names_what_cuts_it(config: Make, key: str, says: str):
    """A context group cuts heads and positions, but no vocabulary: another `parallel.context` would not help."""
    made = config("parallel=fsdp", "parallel.tensor=2", "parallel.context=2", "model.num_heads=4", key)
    with pytest.raises(ValueError, match=rf"parallel\.tensor=2: it does not divide model\.{says}"):
        check(made, world_size=4)


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
        (["health.every=7"], 1, "health.every=7 has no effect: the run ends before, trainer.max_steps=6; set"),
        (["health.every=6"], 1, None),
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
        (
            ["precision=fp8_jit", "precision.scaling.history=9"],
            1,
            "history=9 has no effect: with method=current scales",
        ),
        (["precision=fp8_delayed", "precision.scaling.history=9"], 1, None),
        (["model.mtp_loss_weight=1", "model.num_mtp_layers=0"], 1, "mtp_loss_weight=1.0 has no effect: model.num_mtp"),
        (["model.mtp_loss_weight=1"], 1, None),
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
