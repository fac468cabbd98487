"""What a run prints before its first step: where it writes, what trains on what, how long, in how much memory."""

import shlex
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from models.flops import count_parameters
from precision import Plan
from trainer.config import Config
from trainer.config.timeline import Timeline, widest
from trainer.config_diff import printable
from trainer.data import Prepared
from trainer.forecast.cost import NETWORK, NODE_LINK, PER_NODE, RATES, Machine, cost
from trainer.forecast.course import course
from trainer.forecast.gpus import target
from trainer.forecast.memory import GIB, forecast
from trainer.forecast.unusual import unusual
from trainer.forecast.words import ranks, short
from trainer.parallel.mesh import resolve


def header(
    config: Config,
    plan: Plan,
    overrides: Sequence[str],
    run: Path,
    processes: int,
    data: Prepared,
) -> list[tuple[str, str]]:
    """Labels and values, one a line. processes: ranks of the job."""
    t, degrees, facts = config.trainer, resolve(config.parallel, processes), data.train.sidecar
    count, where = count_parameters(config.model), target(config)
    timeline, step = Timeline(t), t.global_batch_size * t.sequence_length
    trained, experts = (
        timeline.tokens(timeline.steps),
        f"{config.model.num_experts} experts" if config.model.num_experts else "dense",
    )
    memory = sum(forecast(widest(config), plan, degrees, where.gpu_memory)[0].values())
    backends = sorted({row.recipe.backend for row in plan.gemms.values()})
    fp8 = plan.fp8_shares_at(t.sequence_length)[0]
    name = "CPU" if where.gpu is None else where.gpu.name
    rows = [
        ("run folder", str(run)),
        ("recipe", f"{config.precision.name}; {shown(overrides) or 'nothing overridden'}"),
        (
            "model",
            f"{config.model.num_layers} blocks of {config.model.hidden_size}, {experts}; "
            f"{short(count.total)} parameters, {short(count.active)} active",
        ),
        ("device", f"{name}, {ranks(degrees)}; {', '.join(backends)} backend; {fp8:.0%} of the GEMM FLOPs in FP8"),
        (
            "tokens",
            f"{step:,} a step{' at first' * bool(timeline.stretches[1:])}, {trained:,} in {timeline.steps:,} steps: "
            f"{trained / facts.num_tokens:.2g} epochs",
        ),
        *course(config),
        ("memory", f"{memory / GIB:.2f} GiB a process by forecast, of {where.memory / GIB:.1f}"),
    ]
    if where.gpu is not None and "H200" in where.gpu.name:
        flops = 1e12 * RATES[any(row.recipe.is_fp8 for row in plan.gemms.values())]
        machine = Machine(processes, min(processes, PER_NODE), where.memory, flops, NODE_LINK, NETWORK)
        seconds = cost(config, plan, degrees, machine).step
        left = timedelta(seconds=round(seconds / step * trained))
        rows.append(("time", f"{left} by forecast, {step / seconds:,.0f} tokens/s, as measured on an H200"))
    rows += [("unusual", line) for line in unusual(config, facts.num_tokens, facts.num_documents)]
    return [*rows, ("", "")]


def shown(overrides: Sequence[str]) -> str:
    """The overrides as one would type them, without secrets."""
    words = []
    for override in overrides:
        key, equals, value = override.partition("=")
        words.append(shlex.quote(f"{key}{equals}{printable(key.lstrip('+~'), value)}"))
    return " ".join(words)
