"""The phases of a run, as lines for dry runs and the header, and the checks of them."""

import math
from itertools import pairwise

from models.config import ModelConfig, RouterScoring
from precision.errors import counted, refuse
from trainer.config import Config, Schedule
from trainer.config.phases import Shape
from trainer.config.timeline import ENDLESS, Phase, Timeline, rates
from trainer.forecast.words import short


def check_phases(config: Config) -> None:
    """Raise UserError, naming the key, for impossible phases, or phases that the rest of the config would ignore."""
    o, timeline = config.optim, Timeline(config.trainer)
    moved = [phase for phase in config.trainer.phases if phase.lr is not None]
    if moved and o.schedule is not Schedule.phases:
        refuse("optim.schedule", o.schedule.value, "trainer.phases set the learning rate", "set optim.schedule=phases")
    if o.schedule is Schedule.phases and not moved:
        refuse("optim.schedule", "phases", "no phase has an lr", "set wsd or cosine, or lr in trainer.phases")
    for number, phase in enumerate(config.trainer.phases):
        key = f"trainer.phases[{number}]"
        for name in ("lr", "mtp_loss_weight", "router_bias_update_rate"):
            if (value := getattr(phase, name)) is not None and not 0 <= value < math.inf:
                refuse(f"{key}.{name}", value, "out of range", "set 0 or more")
        for name in ("global_batch_size", "microbatch_size", "sequence_length"):
            if (value := getattr(phase, name)) is not None and value < 1:
                refuse(f"{key}.{name}", value, "out of range", "set 1 or more")
        if phase.lr is None and phase.lr_shape is not Shape.constant:
            refuse(f"{key}.lr_shape", phase.lr_shape.value, "there is no lr to move to", f"set {key}.lr")
        if phase.lr_until is not None and phase.lr_shape is Shape.constant:
            fix = f"set {key}.lr_shape=linear, or cosine"
            refuse(f"{key}.lr_until", phase.lr_until, "lr_shape=constant changes at once", fix)
        if phase.mtp_loss_weight and not config.model.num_mtp_layers:
            refuse(f"{key}.mtp_loss_weight", phase.mtp_loss_weight, "model.num_mtp_layers=0", "leave it out")
        if phase.router_bias_update_rate and (why := _why_no_bias(config.model)) is not None:
            refuse(f"{key}.router_bias_update_rate", phase.router_bias_update_rate, why, "leave it out")
    moves = rates(timeline)
    for (_, end, rate, _), (begin, *_) in pairwise(moves):
        if begin < end:
            why = f"the rate is still moving to {rate:g} until step {end}"
            refuse("trainer.phases", f"lr from step {begin + 1} on", why, "let one move end before the next begins")
    for number, phase in enumerate(timeline.phases):
        until = phase.config.lr_until
        if until is not None and timeline.last_step_of(until) <= phase.begin < timeline.steps:
            why = f"the move of lr would end before it begins, at step {phase.begin + 1}"
            refuse(f"trainer.phases[{number}].lr_until", until, why, "set more")


def _why_no_bias(model: ModelConfig) -> str | None:
    """Return why the model has no selection bias, None if it has."""
    if model.router_scoring is RouterScoring.softmax:
        return "model.router_scoring=softmax has no bias"
    return None if model.num_moe_blocks else "no block has experts"


def schedule_lines(config: Config) -> list[tuple[str, str]]:
    """Return a label and a line for each phase and for the config's spans converted to steps. Empty if nothing changes
    along the run and its length is in steps."""
    timeline, t = Timeline(config.trainer), config.trainer
    if timeline.epochs is not None:
        return [("length", f"{t.max_tokens}: steps and the lengths of phases follow from the text")]
    length = f"{_tokens(timeline, timeline.steps)} in {counted(timeline.steps, 'step')}"
    lines = [] if t.max_tokens is None else [("length", length)]
    spans = {"warm-up": config.optim.warmup_steps, "evaluation every": config.eval.every}
    spans |= {"checkpoint every": config.checkpoint.every, "logged every": config.logging.every}
    converted = [  # a warm-up may have no step
        f"{what} {value}, {counted(max(timeline.steps_of(value), int(what != 'warm-up')), 'step')}"
        for what, value in spans.items()
        if not isinstance(value, int)
    ]
    lines += [("in steps", "; ".join(converted))] if converted else []
    return lines + [("phase", _line(timeline, phase)) for phase in timeline.phases]


def _line(timeline: Timeline, phase: Phase) -> str:
    if phase.begin >= timeline.steps:
        return f"from step {phase.begin + 1:,} on: after the end of the run"
    end = min(phase.end, timeline.steps)
    first, last = timeline.at(phase.begin + 1), timeline.at(end)
    c = phase.config
    batch = f"{first.batch:,}" if not c.batch_ramp else f"{first.batch:,} growing to {c.global_batch_size:,}"
    parts = [f"{batch} x {last.length:,}"]
    if c.lr is not None:
        by = "at its end" if c.lr_until is None else f"by {c.lr_until}"
        parts.append(f"lr {c.lr:g}" + (f" {by}, {c.lr_shape.value}" if c.lr_shape is not Shape.constant else ""))
    parts += [f"{name} {value:g}" for name in ("mtp_loss_weight", "router_bias_update_rate")
              if (value := getattr(c, name)) is not None]  # fmt: skip
    cut = ", cut by the run's end" if phase.end != ENDLESS and phase.end > end else ""
    return f"steps {phase.begin + 1:,} to {end:,} (to {_tokens(timeline, end)}{cut}): {', '.join(parts)}"


def _tokens(timeline: Timeline, step: int) -> str:
    return f"{short(timeline.tokens(step)).replace('G', 'B')} tokens"
