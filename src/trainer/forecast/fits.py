"""Whether a run fits into memory, and the settings that would; what to do where it did not.

The forecast omits temporaries of ops, so a run that it finds too large is too large. Settings are tried in the order of
docs/parallelism.md: recompute=selective, smaller microbatches, recompute=full. Recommended settings leave a tenth of
the memory free.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from precision import Plan
from precision.errors import UserError
from trainer.config import Config, Recompute
from trainer.config.timeline import Timeline, at_peak_memory, peak_memory
from trainer.files import script
from trainer.forecast.check_values import with_phase
from trainer.forecast.cost import SPARE, Machine
from trainer.forecast.gpus import Target
from trainer.forecast.memory import GIB, forecast
from trainer.forecast.search import fewest
from trainer.forecast.stages import forms_whole_rounds, in_a_v
from trainer.parallel.mesh import Degrees


def check_memory(config: Config, plan: Plan, degrees: Degrees, target: Target, local_ranks: int) -> None:
    """Raise UserError, with settings that fit, if the forecast of a rank exceeds its memory. target: the device of the
    `local_ranks` ranks of this host."""
    if not config.force_memory and (problem := does_not_fit(config, plan, degrees, target, local_ranks)) is not None:
        raise UserError(f"{problem}; or start anyway with force_memory=true")


def does_not_fit(config: Config, plan: Plan, degrees: Degrees, target: Target, local_ranks: int) -> str | None:
    """Return a line with what is too large and what to do, or None if the run fits."""
    peak = peak_memory(config)
    batches = [each.batch for each in Timeline(config.trainer).segments if each.microbatch == peak.microbatch]
    problem = _problem(at_peak_memory(config), plan, degrees, target, local_ranks, batches)
    return None if problem is None else with_phase(config, peak, problem)


def _problem(
    config: Config, plan: Plan, degrees: Degrees, target: Target, local_ranks: int, batches: Sequence[int]
) -> str | None:
    shared = target.gpu is None and local_ranks > 1
    room = target.memory / local_ranks if shared else target.memory
    need = _needed(config, plan, degrees, target)
    if need <= room:
        return None
    device = f"each of {local_ranks} ranks of {target.name}" if shared else target.name
    problem = f"each process is forecast to take {need / GIB:.1f} GiB, and {device} has {room / GIB:.1f}"
    for other in _smaller(config, degrees, batches):
        if _needed(other, plan, degrees, target) <= SPARE * room:
            was, fix = _memory_keys(config), _memory_keys(other)
            changed = [key for key in was if was[key] != fix[key]]
            return f"{changed[0]}={was[changed[0]]}: {problem}; set {' '.join(f'{key}={fix[key]}' for key in changed)}"
    elsewhere = _elsewhere(config, plan, degrees, target)
    return f"model.num_layers={config.model.num_layers}: {problem}; no microbatch and recompute fit: {elsewhere}"


def _needed(config: Config, plan: Plan, degrees: Degrees, target: Target) -> float:
    return sum(forecast(config, plan, degrees, target.gpu_memory)[0].values())


def _memory_keys(config: Config) -> dict[str, object]:
    return {"trainer.microbatch_size": config.trainer.microbatch_size, "recompute": config.recompute.value}


def _smaller(config: Config, degrees: Degrees, batches: Sequence[int]) -> Iterator[Config]:
    """Yield configs of the same step in less memory, the cheapest first. batches: of all steps with this microbatch."""
    t, p, order = config.trainer, config.parallel, list(Recompute)
    more = order[order.index(config.recompute) :]
    cheap = [choice for choice in more if choice is not Recompute.full]
    shares = [max(batch // degrees.data, 1) for batch in batches]
    most = max(min(t.microbatch_size, min(shares) // degrees.pipeline), 1)  # stages need at least as many microbatches
    in_rounds = p.stages_per_rank > 1 and not in_a_v(p)
    sizes = [
        size
        for size in range(most, 0, -1)
        if math.gcd(*shares) % size == 0
        and (not in_rounds or all(forms_whole_rounds(share // size, degrees.pipeline) for share in shares))
    ]
    for choices in (cheap, [Recompute.full]):
        for size in sizes:
            for choice in choices:
                yield replace(config, trainer=replace(t, microbatch_size=size), recompute=choice)


def _elsewhere(config: Config, plan: Plan, degrees: Degrees, target: Target) -> str:
    """Return the advice for a model that is too large for these ranks."""
    if target.gpu is None:
        return "choose a smaller model, or see other GPUs with dry_run=true gpu=h200"
    enough = fewest(config, plan, Machine(degrees.world, memory=target.memory))
    if enough is None:
        return "choose a smaller model"
    table = f"python {script('scripts/plan_parallelism.py')} --gpus {enough}"
    return f"{enough} such GPUs hold it ({table}), or choose a smaller model"


def out_of_memory_message(forecast: dict[str, float], allocated: float, total: float) -> str:
    """Return the message for a full GPU of `total` bytes with `allocated` in use: the category that grew, and what
    helps.

    forecast: of this run, from `forecast_memory`.
    """
    steady = sum(forecast[name] for name in ("parameters", "gradients", "optimizer"))
    rest = {name: size for name, size in forecast.items() if name not in ("parameters", "gradients", "optimizer")}
    passing = max(allocated - steady, 0.0)
    more = passing - sum(rest.values())  # weights, gradients and moments have exactly their forecast size
    above = f", {more / GIB:.1f} GiB above the forecast" if more > 0.05 * total else ""
    largest = max(rest, key=lambda name: rest[name]) if passing >= steady else "optimizer"
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in forecast.items())
    helps = {
        "activations": "lower trainer.microbatch_size, or set recompute=selective (less) or full (least)",
        "head": "lower trainer.microbatch_size, or model.vocab_size",
        "compute weights": "set parallel.reshard_after_forward=true, or raise parallel.shard or parallel.expert",
        "BF16 shadow": "set health.shadow_every=0",
        "communication": "raise parallel.expert, or lower trainer.microbatch_size",
        "optimizer": "spread it over more GPUs (parallel.shard), or train a smaller model",
    }
    grew = "weights, gradients and optimizer" if largest == "optimizer" else largest
    return (
        f"out of GPU memory: {allocated / GIB:.1f} of {total / GIB:.1f} GiB in use; most of it by {grew}{above} "
        f"(forecast, GiB: {named}); {helps[largest]}"
    )
