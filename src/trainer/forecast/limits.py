"""The range of each key that has one of its own. Null is always in it; infinity and NaN never are."""

import sys
from typing import Any

from precision.errors import UserError
from trainer.config import Config

MOST = sys.float_info.max
ABOVE_0, ABOVE_1 = 5e-324, 1 + sys.float_info.epsilon
"""The smallest numbers above these."""
LIMITS: dict[str, tuple[float, float, str]] = {
    "out of range; set 1 or more": (
        1,
        MOST,
        "trainer.max_steps trainer.global_batch_size trainer.microbatch_size trainer.sequence_length "
        "debug.inject.steps",
    ),
    "out of range; set 1 or more, or null for every window": (1, MOST, "eval.batches eval.at_end"),
    "out of range; set 0 or more": (
        0,
        MOST,
        "trainer.seed eval.sample checkpoint.keep optim.weight_decay health.shadow_every "
        "recovery.max_consecutive_skips recovery.rewind.max recovery.rewind.margin",
    ),
    "out of range; set 0 or more, or null for every logged line": (0, MOST, "health.every"),
    "out of range; set at most 1000000": (0, 10**6, "recovery.rewind.margin"),  # the loader can number more windows
    "out of range; set a number above 0": (ABOVE_0, MOST, "optim.lr optim.eps"),
    "out of range; set a number above 0, or null not to clip": (ABOVE_0, MOST, "optim.clip"),
    "out of range; set a number above 0, such as 100, or null": (ABOVE_0, MOST, "optim.qk_clip"),
    "out of range; set a number above 0, such as 0.2": (ABOVE_0, MOST, "optim.muon.scale"),
    "out of range; set a number above 0, such as 6": (ABOVE_0, MOST, "recovery.spikes.threshold"),
    "out of range; set seconds, 1 to 1e9": (1, 1e9, "parallel.timeout"),  # gloo counts nanoseconds in 64 bits
    "out of range; set 0.1 to 3600": (0.1, 3600, "health.power.seconds"),
    "out of range; set 2000, or 1 at least": (1, 2**31 - 1, "precision.loss_scale.interval"),
    "it is a share; set 0 to 1": (0, 1, "optim.decay_fraction optim.min_lr_ratio"),
    "it is a multiple of the tokens of even routing; set 1.25, or 1 or more": (1, MOST, "parallel.dispatch_capacity"),
    "too few steps to estimate the usual spread; set 128, or 2 at least": (2, MOST, "recovery.spikes.window"),
    "a rewind may lower the learning rate, not raise it; set a number above 0 and at most 1": (
        ABOVE_0,
        1,
        "recovery.rewind.lr_factor",
    ),
}
"""Problem and fix -> smallest value, largest value, keys."""
ALERT_LIMITS: dict[str, tuple[float, float, str]] = {
    "above 0 and up to 1": (
        ABOVE_0,
        1,
        "saturated underflown shadow_cosine expert_entropy throughput_drop memory_full throttled",
    ),
    "above 1": (ABOVE_1, MOST, "grad_norm_spike scale_drop scale_rise expert_load"),
    "above 0": (
        ABOVE_0,
        MOST,
        "repeat loss_rise loss_plateau kurtosis_power shadow_loss_gap memory_growth straggler max_logit "
        "allocator_retries gpu_celsius gpu_memory_celsius",
    ),
    "of 0 or more": (0, MOST, "gpu_memory_errors"),
}
"""The same for thresholds in `health.alerts`."""


def check_limits(config: Config) -> None:
    """Raise UserError, naming key, value and fix, for a number outside of its range."""
    for says, (least, most, keys) in LIMITS.items():
        for key in keys.split():
            _check(config, key, least, most, says)
    for what, (least, most, keys) in ALERT_LIMITS.items():
        for key in keys.split():
            says = f"out of range; set a number {what}, or null for none"
            _check(config, f"health.alerts.{key}", least, most, says)


def _check(config: Config, key: str, least: float, most: float, says: str) -> None:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name) if value is not None else None
    if value is not None and not least <= value <= most:
        raise UserError(f"{key}={value}: {says}")
