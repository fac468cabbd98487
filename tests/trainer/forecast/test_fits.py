"""A run that does not fit is refused before anything is allocated, with settings that fit; forecasts agree."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from composed import config_of

from trainer.config import Config, GpuChoice
from trainer.config.timeline import each_shape
from trainer.forecast.dry_run import report
from trainer.forecast.expert_messages import PER_NODE
from trainer.forecast.fits import check_memory, does_not_fit
from trainer.forecast.gpus import KNOWN, Target, target
from trainer.forecast.memory import GIB, forecast
from trainer.forecast.preflight import check, check_fsdp_policy
from trainer.launch import device
from trainer.launch.device import host_cpus, host_memory
from trainer.parallel.mesh import resolve

Make = Callable[..., Config]
MOONLIGHT = ["model=moonlight_16b", "+recipe=fp8_delayed", "trainer.sequence_length=4096", "dry_run=true"]


def asked(*overrides: str, ranks: int = 1) -> str | None:
    """What is said to a config on the GPU that it names."""
    config = config_of([*MOONLIGHT, *overrides])
    return does_not_fit(config, check(config), resolve(config.parallel, ranks), target(config), ranks)


def test_settings_that_fit_are_not_refused() -> None:
    batch = "trainer.global_batch_size=64", "trainer.microbatch_size=8"
    assert asked(*batch, "parallel.shard=8", "gpu=h200", ranks=8) is None


@pytest.mark.parametrize("gpu", ["gpu=h200", "gpu=h100"])
def test_settings_that_are_advised_fit(gpu: str) -> None:
    degrees = "parallel.shard=8", "trainer.global_batch_size=128"
    said = asked("trainer.microbatch_size=16", *degrees, gpu, ranks=8)
    assert said is not None and said.startswith("trainer.microbatch_size=16: each process is forecast to take ")
    advised = said.partition("; set ")[2].split()
    assert advised and asked("trainer.microbatch_size=16", *degrees, gpu, *advised, ranks=8) is None


def test_a_phase_that_does_not_fit_is_named_with_its_own_keys() -> None:
    given = "parallel.shard=8", "gpu=h200", "trainer.global_batch_size=128", "trainer.microbatch_size=1"
    said = asked(*given, "trainer.phases=[{until:5},{microbatch_size:16}]", ranks=8)
    own = "trainer.phases[1].microbatch_size"
    assert said is not None and said.startswith(f"trainer.phases, from step 6 on: {own}=16: each process is forecast")
    advised = said.partition("; set ")[2]
    assert advised.startswith(f"{own}=")
    fitting = f"trainer.phases=[{{until:5}},{{microbatch_size:{advised.split()[0].removeprefix(f'{own}=')}}}]"
    assert asked(*given, fitting, *advised.split()[1:], ranks=8) is None


def test_a_microbatch_that_is_advised_forms_whole_rounds_of_stages() -> None:
    given = "parallel.pipeline=2", "parallel.stages_per_rank=2", "parallel.shard=4", "gpu=h100"
    given += "model=deepseek_v2_lite", "trainer.global_batch_size=40"
    said = asked(*given, "trainer.microbatch_size=5", ranks=8)
    assert said is not None
    advised = said.partition("; set ")[2].split()
    assert advised
    config = config_of([*MOONLIGHT, *given, *advised])
    check_fsdp_policy(config, resolve(config.parallel, 8))


def test_a_microbatch_that_is_advised_divides_the_batch_of_each_phase() -> None:
    given = "parallel.shard=8", "gpu=h100", "trainer.global_batch_size=48", "trainer.microbatch_size=6"
    given += ("trainer.phases=[{until:5},{global_batch_size:96}]",)
    said = asked(*given, ranks=8)
    assert said is not None
    config = config_of([*MOONLIGHT, *given, *said.partition("; set ")[2].split()])
    assert config.trainer.microbatch_size < 6
    for _, shape in each_shape(config):
        check_fsdp_policy(shape, resolve(config.parallel, 8))


def test_a_model_that_no_setting_fits_is_sent_to_more_gpus() -> None:
    said = asked("gpu=h100", "trainer.global_batch_size=1", "trainer.microbatch_size=1")
    assert said is not None and said.startswith("model.num_layers=27: each process is forecast to take ")
    enough = re.search(r"(\d+) such GPUs hold it \(python scripts/plan_parallelism\.py --gpus (\d+)\)", said)
    assert enough is not None and enough[1] == enough[2]
    spread = f"parallel.shard={enough[1]}", "recompute=full", "trainer.microbatch_size=1"
    assert asked("gpu=h100", f"trainer.global_batch_size={enough[1]}", *spread, ranks=int(enough[1])) is None


def test_more_gpus_hold_a_model_with_symmetric_dispatch_too() -> None:
    given = "model=deepseek_v3", "model.num_layers=10", "gpu=h100", "trainer.global_batch_size=8"
    said = asked(
        *given,
        "trainer.microbatch_size=1",
        "parallel.shard=8",
        "parallel.expert=8",
        "parallel.dispatch=symmetric",
        ranks=8,
    )
    assert said is not None and re.search(r"\d+ such GPUs hold it", said), said


def test_the_gpus_that_hold_a_model_fill_their_nodes() -> None:
    """The planner refuses 20 of them: torchrun starts equally many on each node."""
    said = asked("gpu=rtx4090", "parallel.shard=5", "trainer.global_batch_size=5", "trainer.microbatch_size=1", ranks=5)
    assert said is not None and (found := re.search(r"--gpus (\d+)", said)) is not None
    assert int(found[1]) % PER_NODE == 0


def test_ranks_of_a_host_share_its_memory(config: Make) -> None:
    made = config("parallel=fsdp")
    plan, degrees = check(made), resolve(made.parallel, 2)
    need = sum(forecast(made, plan, degrees, None)[0].values())
    host = Target(None, 1.5 * need)
    check_memory(made, plan, degrees, host, 1)
    with pytest.raises(ValueError, match=r"each of 2 ranks of this host has .* or start anyway with force_memory=true"):
        check_memory(made, plan, degrees, host, 2)
    check_memory(replace(made, force_memory=True), plan, degrees, host, 2)


def test_a_host_has_memory() -> None:
    assert GIB / 4 < host_memory() < 2**50


def test_a_container_has_its_share_of_the_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    share = tmp_path / "cpu.max"
    monkeypatch.setattr(device, "_CPU_SHARE", share)
    there = host_cpus()
    for text, cpus in (("max 100000", there), ("50000 100000", 1), (f"{100000 * there + 1} 100000", there)):
        share.write_text(text)
        assert host_cpus() == cpus


def test_a_named_gpu_is_for_forecasts(config: Make) -> None:
    with pytest.raises(ValueError, match=r"gpu=h200: a run uses the GPUs that it finds; set gpu=auto, or dry_"):
        check(config("gpu=h200", "trainer.device=auto"))
    with pytest.raises(ValueError, match=r"gpu=h200: trainer.device=cpu uses none; set gpu=auto, or trainer.device="):
        check(config("gpu=h200", "dry_run=true"))


@pytest.mark.parametrize("gpu", [choice.value for choice in GpuChoice if choice is not GpuChoice.auto])
def test_a_dry_run_forecasts_for_the_gpu_that_it_is_asked_about(gpu: str) -> None:
    config = config_of(["model=deepseek_30m", "+recipe=fp8_delayed", "dry_run=true", f"gpu={gpu}"])
    plan, known = check(config), KNOWN[config.gpu]
    assert known.gpu is not None
    text = report(config, plan)
    assert f", on {known.name}" in text and f"of the {known.memory / GIB:.1f} GiB of {known.name}" in text
    assert plan.served_by("cuda") is (known.gpu.capability == (9, 0))


def test_a_dry_run_of_ranks_on_cpus_names_the_gpus_to_ask_about(config: Make) -> None:
    made = config("parallel.replicate=2", "trainer.microbatch_size=1", "dry_run=true", "trainer.device=auto")
    asked = report(made, check(made)).splitlines()[-1]
    assert asked == "this forecast is for CPUs; gpu=h200, h100, a100 or rtx4090 makes one for that GPU"


@pytest.mark.parametrize(
    ("asked", "sequences"),
    [
        (MOONLIGHT[:3], 64),
        (["+recipe=moonlight_16b_8xh100"], 512),  # a recipe's batch, expert groups and recompute
        ([*MOONLIGHT[:3], "trainer.phases=[{until:9},{sequence_length:8192}]"], 64),
        ([*MOONLIGHT[:3], "trainer.phases=[{until:9},{global_batch_size:128,sequence_length:8192}]"], 16),
    ],
)
def test_the_planner_and_a_dry_run_of_its_command_agree(run_python: Callable, asked: list[str], sequences: int) -> None:
    done = run_python("scripts/plan_parallelism.py", "--gpus", "8", "--rows", "1", *asked, "gpu=h200")
    head, row, *_, command = done.stdout.splitlines()
    gib = row.split()[head.split().index("GiB")]
    overrides = [word for word in shlex.split(command) if "=" in word and not word.startswith("--")]
    config = config_of([*overrides, "dry_run=true", "gpu=h200"])
    assert config.trainer.global_batch_size == sequences
    total = next(line for line in report(config, check(config)).splitlines() if line.startswith("  total"))
    assert float(gib) == pytest.approx(float(total.split()[1]), abs=0.06)
