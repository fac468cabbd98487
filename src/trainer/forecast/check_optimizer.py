"""Checks of the optimizer's settings."""

import math

from precision.config import LossScaleConfig
from precision.errors import refuse
from trainer.config import Config, Moments, OptimizerName
from trainer.optim.orthogonalise import FEWEST

SLOWEST = 0.98
"""Largest decay of a moment in BF16. Changes below 2^-9 are rounded away, and with a decay near 1 most changes are: a
second moment then stays 5 % too high at 0.99, and never falls at 0.999."""


def check_optimizer(config: Config) -> None:
    """Raise UserError, naming key, value and fix, for invalid settings of `optim` and the precision table."""
    _check_moments(config)
    _check_loss_scale(config.precision.loss_scale)
    muon = config.optim.muon
    if muon is None:
        if config.optim.name is OptimizerName.muon:
            refuse("optim.name", "muon", "optim.muon is null", "leave optim.muon out, or set optim=muon_wsd")
        return
    if not 0 <= muon.momentum < 1:
        refuse("optim.muon.momentum", muon.momentum, "out of range", "set 0.95, or 0 to below 1")
    fewest = FEWEST[muon.coefficients]
    if muon.steps is not None and not fewest <= muon.steps <= 100:
        refuse("optim.muon.steps", muon.steps, "out of range", f"set {fewest} to 100, or null")


def _check_moments(config: Config) -> None:
    o = config.optim
    if o.moments is Moments.fp32:
        return
    decays = {"optim.betas": max(o.betas)}
    if o.name is OptimizerName.muon and o.muon is not None:
        decays["optim.muon.momentum"] = o.muon.momentum
    for key, decay in decays.items():
        if decay > SLOWEST:
            why = f"moments in BF16 lose changes as small as a decay of {decay} makes"
            given, slowest = decay, str(SLOWEST)
            if key == "optim.betas":
                given, slowest = o.betas, f"[{','.join(str(min(beta, SLOWEST)) for beta in o.betas)}]"
            refuse(key, given, why, f"set {slowest} or less, or optim.moments=fp32")


def _check_loss_scale(c: LossScaleConfig) -> None:
    for key, value in {"initial": c.initial, "minimum": c.minimum}.items():
        if not 2.0**-126 <= value <= 2.0**126 or math.frexp(value)[0] != 0.5:
            why = "other factors than powers of two round gradients"
            refuse(f"precision.loss_scale.{key}", f"{value:g}", why, "set 65536, 1, or another power of two")
    if c.minimum > c.initial:
        fix = f"set at most {c.initial:g}"
        refuse("precision.loss_scale.minimum", f"{c.minimum:g}", "above precision.loss_scale.initial", fix)
