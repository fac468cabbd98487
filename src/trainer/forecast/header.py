"""The header that a run prints before its first step: folder, model, data, devices, duration, memory."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from models.flops import count_parameters
from precision import Plan
from precision.errors import counted
from trainer.config import Config
from trainer.config.timeline import Timeline, at_peak_memory
from trainer.config_diff import printable_override
from trainer.data import Prepared
from trainer.forecast.cost import RATES, Machine, cost
from trainer.forecast.gpus import Target, target
from trainer.forecast.memory import GIB, forecast
from trainer.forecast.narrow import slowdown
from trainer.forecast.schedule import schedule_lines
from trainer.forecast.unusual import unusual
from trainer.forecast.words import duration, ranks, short
from trainer.parallel.mesh import Degrees, resolve


def header(
    config: Config, plan: Plan, overrides: Sequence[str], run: Path, processes: int, data: Prepared
) -> list[tuple[str, str]]:
    """Return labels and values, one pair a line. processes: ranks of the job."""
    t, degrees, facts = config.trainer, resolve(config.parallel, processes), data.train.sidecar
    count, where = count_parameters(config.model), target(config)
    timeline = Timeline(t)
    trained = timeline.tokens(timeline.steps)
    experts = counted(config.model.num_experts, "expert") if config.model.num_moe_blocks else "dense"
    memory = sum(forecast(at_peak_memory(config), plan, degrees, where.gpu_memory)[0].values())
    backends = sorted({row.recipe.backend for row in plan.gemms.values()})
    fp8 = plan.fp8_shares_at(t.sequence_length)[0]
    name = "CPU" if where.gpu is None else where.gpu.name
    rows = [
        ("run folder", str(run)),
        ("recipe", f"{config.precision.name}; {shown(overrides) or 'nothing overridden'}"),
        (
            "model",
            f"{counted(config.model.num_layers, 'block')} of {config.model.hidden_size}, {experts}; "
            f"{short(count.total)} parameters, {short(count.active)} active",
        ),
        ("device", f"{name}, {ranks(degrees)}; {', '.join(backends)} backend; {fp8:.0%} of the GEMM FLOPs in FP8"),
        (
            "tokens",
            f"{timeline.at(1).tokens:,} a step{' at first' * bool(timeline.segments[1:])}, "
            f"{trained:,} in {counted(timeline.steps, 'step')}: {trained / facts.num_tokens:.2g} epochs",
        ),
        *schedule_lines(config),
        ("memory", f"{memory / GIB:.2f} GiB a process by forecast, of {where.memory / GIB:.1f}"),
    ]
    if (time := time_line(config, plan, degrees, where)) is not None:
        rows.append(("time", time))
    rows += [("unusual", line) for line in unusual(config, facts.num_tokens, facts.num_documents)]
    return [*rows, ("", "")]


def time_line(config: Config, plan: Plan, degrees: Degrees, where: Target) -> str | None:
    """Return the forecast duration of a run; None except on an H200, the only GPU with measured rates."""
    if where.gpu is None or "H200" not in where.gpu.name:
        return None
    timeline, config = Timeline(config.trainer), at_peak_memory(config)
    if timeline.epochs is not None:  # the text is not read yet
        return None
    t = config.trainer
    tokens = t.global_batch_size * t.sequence_length
    flops = 1e12 * RATES[any(row.recipe.is_fp8 for row in plan.gemms.values())]
    flops /= slowdown(config.model, plan, t.sequence_length, tokens)
    rate = tokens / cost(config, plan, degrees, Machine(degrees.world, memory=where.memory, flops=flops)).step
    whole = timeline.tokens(timeline.steps) / rate
    return f"{duration(whole)} by forecast, {rate:,.0f} tokens/s, at rates measured on an H200"


def shown(overrides: Sequence[str]) -> str:
    """Return the overrides as typed, without secrets."""
    return shlex.join(map(printable_override, overrides))
