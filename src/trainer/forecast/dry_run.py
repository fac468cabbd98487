"""The output of `dry_run=true`: plan, parameters, FLOPs, a forecast of memory and time, and whether the run fits."""

from models.flops import count_parameters, flops_per_token
from precision import Plan
from trainer.config import Config, Device, OptimizerName
from trainer.config.timeline import at_peak_memory, each_shape
from trainer.forecast.check_values import in_phase, with_fitting_microbatch
from trainer.forecast.cost import Machine
from trainer.forecast.fits import does_not_fit
from trainer.forecast.gpus import Target, target
from trainer.forecast.header import time_line
from trainer.forecast.memory import GIB, forecast
from trainer.forecast.muon import muon_load, muon_size
from trainer.forecast.preflight import check_fsdp_policy, without_effect
from trainer.forecast.schedule import schedule_lines
from trainer.forecast.stages import stages_line
from trainer.forecast.unusual import unusual
from trainer.forecast.words import ranks, short
from trainer.parallel.mesh import Degrees, FsdpPolicy, forecast_degrees


def report(config: Config, plan: Plan, processes: int = 1) -> str:
    """Return the precision, the size and each rank's memory of a run, as several lines of text.

    Its degrees: `forecast_degrees`. Raises UserError if they do not fit each other or the batch.
    """
    degrees = forecast_degrees(config.parallel, processes)
    run = with_fitting_microbatch(config, degrees)
    for segment, shape in each_shape(run):
        with in_phase(run, segment):
            check_fsdp_policy(shape, degrees)
    config = at_peak_memory(run)
    t = config.trainer
    count = count_parameters(config.model)
    flops = flops_per_token(config.model, t.sequence_length)
    machine = target(config)
    memory, policy = forecast(config, plan, degrees, machine.gpu_memory)
    tokens = t.global_batch_size * t.sequence_length
    total = sum(memory.values())
    rows = [*memory.items(), ("total", total)]
    whole, blocks = plan.fp8_shares_at(t.sequence_length)
    return "\n".join(
        [
            plan.to_text(),
            f"fp8          with attention's core {whole:.1%} of the GEMM flops, {blocks:.1%} of its blocks",
            f"parameters   {short(count.total)} total, {short(count.active)} active (head counted, embedding not)",
            f"flops        {short(flops)} a token, {short(flops * tokens)} a step of {tokens:,} tokens",
            *(f"{label:<13}{line}" for label, line in schedule_lines(run)),
            *(f"unusual      {line}" for line in unusual(run)),
            *([_muon_line(config, plan, degrees, count.total)] if config.optim.name is OptimizerName.muon else ()),
            "",
            f"memory of {ranks(degrees)}, GiB: a forecast, microbatch {t.microbatch_size} x {t.sequence_length}"
            + (f", on {machine.name}" if machine.gpu is not None else ""),
            *(f"  {name:<16} {size / GIB:10.3f}" for name, size in rows),
            *([_fsdp_line(policy, config, degrees)] if degrees.world > 1 else ()),
            *([stages_line(config, plan, degrees)] if degrees.pipeline > 1 else ()),
            *_fits(run, plan, degrees, machine, total),
            *([f"time: {time}"] if (time := time_line(run, plan, degrees, machine)) is not None else ()),
            *(f"\n{line}" for line in without_effect(run, degrees.world)),
        ]
    )


def _fits(config: Config, plan: Plan, degrees: Degrees, machine: Target, total: float) -> list[str]:
    """Return a line on whether the run fits; several ranks on CPUs may be on several hosts, of any memory."""
    if machine.gpu is None and degrees.world > 1:
        on_cpu = config.trainer.device is Device.cpu
        return [] if on_cpu else ["this forecast is for CPUs; gpu=h200, h100, a100 or rtx4090 makes one for that GPU"]
    problem = does_not_fit(config, plan, degrees, machine, 1)
    share = f"{total / machine.memory:.0%} of the {machine.memory / GIB:.1f} GiB of {machine.name}"
    return [f"fits: {share}" if problem is None else f"does not fit: {problem}"]


def _muon_line(config: Config, plan: Plan, degrees: Degrees, total: float) -> str:
    its = muon_size(config, plan)
    rest = short(total - its.elements)
    return (
        f"optimizer    muon: {short(its.elements)} in {its.matrices} matrices, {short(its.flops)} FLOPs a step; "
        f"adamw: {rest}{_owners(config, plan, degrees)}"
    )


def _owners(config: Config, plan: Plan, degrees: Degrees) -> str:
    if degrees.world == 1:
        return ""
    busiest, sent = muon_load(config, plan, degrees)
    mean = short(muon_size(config, plan, degrees).flops)
    return (
        f"\n             a rank: {mean} FLOPs, {busiest:.3f} times that at most; sends at most {short(sent)}B a step, "
        f"{1e3 * Machine(degrees.world).seconds(sent, degrees.stage):.1f} ms beside the arithmetic"
    )


def _fsdp_line(policy: FsdpPolicy, config: Config, degrees: Degrees) -> str:
    t = config.trainer
    again = "once a step" if policy.keep_gathered else "again for each forward and backward pass"
    reduced = "each microbatch" if policy.reduce_each_microbatch else "once a step"
    several = t.global_batch_size > t.microbatch_size * degrees.data
    return f"weights are gathered {again}" + (f", gradients reduced {reduced}" if several else "")
