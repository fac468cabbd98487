"""Checks of values that need neither model nor torch, whose import takes two seconds: a mistake is reported at once."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from precision.config import check_scaling
from precision.errors import UserError, counted, refuse
from trainer.config import Config, RunConfig
from trainer.config.data import check_data
from trainer.config.phases import span
from trainer.config.recovery import RecoveryConfig
from trainer.config.timeline import Segment, Timeline, each_shape, last_step
from trainer.forecast.limits import check_limits
from trainer.forecast.schedule import check_phases
from trainer.parallel.mesh import ONE_PROCESS, Degrees, divisor_near

_SHAPE = re.compile(r"trainer\.(global_batch_size|microbatch_size|sequence_length)\b")


def check_values(config: Config, degrees: Degrees = ONE_PROCESS) -> None:
    """Raise UserError, naming key, value and fix, for values that no machine, or no ranks of `degrees`, could train
    with."""
    _check_run(config.run)
    check_sizes(config)
    check_phases(config)
    for segment, shape in each_shape(config):
        with in_phase(config, segment):
            _check_length(shape)
            check_batch(shape, degrees)
    _check_recovery(config.recovery)
    check_single_steps(config)
    check_data(config.data, config.model.vocab_size)
    config.model.validate()
    check_scaling(config.precision.scaling)


@contextmanager
def in_phase(config: Config, segment: Segment) -> Iterator[None]:
    """Name the phase, and its keys, in errors about a shape that it brings."""
    try:
        yield
    except UserError as error:
        if not _SHAPE.search(str(error)):
            raise
        raise UserError(with_phase(config, segment, str(error))) from None


def with_phase(config: Config, segment: Segment, message: str) -> str:
    """Return a message about a shape with the phase that brings it, and its keys."""
    if not config.trainer.phases:
        return message
    phases = [phase.config for phase in Timeline(config.trainer).phases if phase.begin < segment.first]

    def in_force(key: re.Match[str]) -> str:
        given = [n for n, phase in enumerate(phases) if getattr(phase, key[1]) is not None]
        return f"trainer.phases[{given[-1]}].{key[1]}" if given else key[0]

    return f"trainer.phases, from step {segment.first} on: {_SHAPE.sub(in_force, message)}"


def _check_run(run: RunConfig) -> None:
    for key, path, fix in (("dir", run.dir, "set a folder, or leave it out"), ("init_from", run.init_from, "set null")):
        if path == "":  # an unset shell variable; Path reads it as the current folder
            refuse(f"run.{key}", "''", "no folder", fix)
    if run.dir.partition("/")[0] == "~":
        refuse("run.dir", run.dir, "~ is not expanded after =", "write $HOME")


def check_sizes(config: Config) -> None:
    """Raise UserError for impossible numbers, and for sequences that the model cannot take."""
    check_limits(config)
    o = config.optim
    if (amount := span(every := config.logging.every)) is not None and not amount.number:
        refuse("logging.every", every, "out of range", "set 1 or more")
    if o.eps < 2**-126:
        refuse("optim.eps", o.eps, "it is 0 in FP32, and 0 / 0 not a number", "set 1e-8, or 1e-37 at least")
    if len(o.betas) != 2 or not all(0 <= beta < 1 for beta in o.betas):
        refuse("optim.betas", o.betas, "AdamW has two, from 0 to below 1", "set [0.9,0.95]")
    _check_length(config)


def _check_length(config: Config) -> None:
    t, m = config.trainer, config.model
    if t.sequence_length > m.max_position_embeddings:
        why = f"the model is meant for at most model.max_position_embeddings={m.max_position_embeddings}"
        refuse("trainer.sequence_length", t.sequence_length, why, f"set at most {m.max_position_embeddings}")
    if t.sequence_length <= m.num_mtp_layers:
        why = f"model.num_mtp_layers={m.num_mtp_layers} predicts that many tokens further"
        refuse("trainer.sequence_length", t.sequence_length, why, f"set more than {m.num_mtp_layers}")


def check_batch(config: Config, degrees: Degrees) -> None:
    """Raise UserError if the ranks of `degrees` cannot share the batch, or compute it in microbatches."""
    t = config.trainer
    share, rest = divmod(t.global_batch_size, degrees.data)
    if not rest and t.global_batch_size % t.microbatch_size:
        below = next(n for n in range(min(t.microbatch_size, share), 0, -1) if share % n == 0)
        part = f"a rank's {counted(share, 'sequence')} of " if degrees.data > 1 else ""
        why = f"it does not divide {part}trainer.global_batch_size={t.global_batch_size}"
        refuse("trainer.microbatch_size", t.microbatch_size, why, f"set {below}, or another divisor")
    together = degrees.data if rest else t.microbatch_size * degrees.data
    if t.global_batch_size % together:
        doing = "" if together == degrees.data else f" with trainer.microbatch_size={t.microbatch_size}"
        axes = [f"parallel.{a}={n}" for a, n in (("context", degrees.context), ("tensor", degrees.tensor)) if n > 1]
        who = f"groups of {' * '.join(axes)} ranks" if axes else "ranks"
        why = f"{degrees.data} {who}{doing} compute a multiple of {together} sequences"
        if degrees.pipeline > 1:
            why += f", and parallel.pipeline={degrees.pipeline} stages need as many microbatches"
        fix = f"set a multiple of {together * degrees.pipeline}"
        refuse("trainer.global_batch_size", t.global_batch_size, why, fix)


def with_fitting_microbatch(config: Config, degrees: Degrees) -> Config:
    """Return the config with a microbatch of which a rank's share of the batch has at least one, with a pipeline one a
    stage. Evaluations then take more microbatches for the same windows."""
    t, e = config.trainer, config.eval
    share, rest = divmod(t.global_batch_size, degrees.data)
    most = max(share // degrees.pipeline, 1)
    if rest or t.microbatch_size <= most or share < 1:  # check_sizes refuses a batch of none
        return config
    size = divisor_near(most, share)
    batches = None if e.batches is None else -(-e.batches * t.microbatch_size // size)
    return replace(config, trainer=replace(t, microbatch_size=size), eval=replace(e, batches=batches))


def cut_line(given: Config, config: Config) -> str | None:
    """Return a line on what `with_fitting_microbatch` has changed; None if nothing."""
    was, now, stages = given.trainer.microbatch_size, config.trainer.microbatch_size, config.parallel.pipeline
    why = f"a rank's share of the batch is {now}" if stages == 1 else f"{stages} stages need as many microbatches"
    return None if was == now else f"trainer.microbatch_size={was}: {why}; it computes {now} at a time"


def check_single_steps(config: Config) -> None:
    """Raise UserError for a fault or a profile in steps that the run lacks. A length in epochs has as many as the text
    gives it (`with_epochs`)."""
    _check_debug(config)
    _check_profile(config)


def _check_debug(config: Config) -> None:
    inject = config.debug.inject
    if inject is None:
        return
    last = Timeline(config.trainer).steps
    if not 1 <= inject.step <= last:
        fix = f"set 1 to {last_step(config)}"
        refuse("debug.inject.step", inject.step, "there is no such step", fix)
    if abs(inject.value) <= 1:
        why = "it would do nothing"
        refuse("debug.inject.value", inject.value, why, "set nan or inf, or a number above 1 for a spike")
    if inject.windows is not None and (len(inject.windows) != 2 or not 0 <= inject.windows[0] < inject.windows[1]):
        refuse("debug.inject.windows", inject.windows, "no such range", "set [BEGIN,END], END not included, or null")


def _check_recovery(r: RecoveryConfig) -> None:
    if not 2 <= r.spikes.min_steps <= r.spikes.window:
        why = f"it is a part of recovery.spikes.window={r.spikes.window}"
        refuse("recovery.spikes.min_steps", r.spikes.min_steps, why, f"set 2 to {r.spikes.window}")
    if r.rewind.lr_steps < (0 if r.rewind.lr_factor == 1 else 1):
        refuse(
            "recovery.rewind.lr_steps", r.rewind.lr_steps, "the learning rate is lowered for no step", "set 1 or more"
        )


def _check_profile(config: Config) -> None:
    steps, last = config.profile.steps, Timeline(config.trainer).steps
    if steps is None:
        return
    if len(steps) != 2:
        refuse("profile.steps", steps, "a window has a first and a last step", "set [10,12], or null")
    if not 1 <= steps[0] <= steps[1] <= last:
        why = "no such window of steps"
        refuse("profile.steps", steps, why, f"set [FIRST,LAST], from 1 to {last_step(config)}")
