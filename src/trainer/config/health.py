"""Config of `health.*`. Values are in configs/health/default.yaml."""

import math
from dataclasses import dataclass

from precision.errors import UserError
from trainer.config.schema import Switch


@dataclass
class PowerConfig:
    """Power and heat of the GPUs, by NVML. See docs/health.md."""

    enabled: Switch
    """true: metered, or the run does not start; auto: where there are a GPU and NVML; false: not."""
    seconds: float
    """Between two samples, 0.1 or more; a thread of its own takes them."""


@dataclass
class AlertsConfig:
    """When an alert is raised. Each threshold names its rule; null: that rule is off. What each means and what to do:
    docs/health.md."""

    enabled: bool
    """Watch what is logged; alerts go to the console, events.jsonl, W&B, and the two below."""
    repeat: int | None
    """Steps after which a lasting alert is raised again; null: not before it has cleared."""
    webhook: str | None
    """http(s) address that gets a POST of JSON for every alert, rewind and failure; null: none."""
    command: str | None
    """Program that gets the same on its standard input and as OCTET_ALERT_* in its environment; null: none."""
    grad_norm_spike: float | None
    """Gradient norm, in medians of its last lines."""
    loss_rise: float | None
    """Nats by which the loss is above the lowest that it has been, for three lines on end."""
    loss_plateau: int | None
    """Steps without progress of the loss and with a gradient norm that does not fall; a quarter of the run, if that is
    more."""
    scale_drop: float | None
    """A tensor's scale falls by this factor within a few lines."""
    scale_rise: float | None
    """A tensor's scale rises by this factor within a few lines."""
    saturated: float | None
    """Share of a tensor that its cast to FP8 clips, in two looks on end."""
    underflown: float | None
    """Share of a tensor that its cast to FP8 makes zero, in two looks on end."""
    kurtosis_power: float | None
    """p, where kurtosis grows as step^p."""
    shadow_loss_gap: float | None
    """Loss above BF16's, as a share of the loss."""
    shadow_cosine: float | None
    """Cosine of a module's gradient to BF16's: below this."""
    expert_load: float | None
    """Tokens of the fullest expert over the mean, for a hundred steps on end."""
    expert_entropy: float | None
    """Entropy of the experts' load over that of an even one: below this, for a hundred steps on end."""
    throughput_drop: float | None
    """Tokens per second: below this share of their median, for three lines on end and half a minute."""
    memory_growth: float | None
    """Share by which the memory held between steps has crept up."""
    memory_full: float | None
    """Share of the GPU's memory in use at the peak."""
    allocator_retries: float | None
    """Times a step that the allocator finds no whole piece of memory, for three lines on end: more than this."""
    throttled: float | None
    """Share of the time in which heat or its own protection slows a GPU; being at the power limit is neither."""
    gpu_celsius: float | None
    """Temperature of the hottest core."""
    gpu_memory_celsius: float | None
    """Temperature of the hottest memory."""
    gpu_memory_errors: int | None
    """Errors in GPU memory that ECC could not correct: more than this."""
    max_logit: float | None = None
    """Largest attention logit of a block, in two lines on end: above this."""
    straggler: float | None = None
    """Share by which a rank's GPU is slower than the others' median, or of a step for which it waits longer for data,
    for five lines on end."""


@dataclass
class HealthConfig:
    """Metrics beside the loss, and when they raise an alert."""

    every: int | None
    """Steps between looks inside: the step is sampled and shows what its casts and activations do; null: with every
    logged line, 0: never. Such a step is logged independently of logging.every."""
    shadow_every: int
    """Steps between BF16 shadows: a microbatch runs aside in the run's precision and in BF16, and loss and gradients
    are compared; 0: never. Such a step is logged, too."""
    dashboard: bool
    """Write dashboard.html into the run folder when the run ends, however it ends."""
    power: PowerConfig
    """Power and heat."""
    alerts: AlertsConfig
    """When an alert is raised."""


def check_power(power: PowerConfig, gpu: bool) -> None:
    """UserError for a config that cannot be. gpu: whether the run has one."""
    if not power.seconds >= 0.1:
        why = "a sample takes some milliseconds itself"
        raise UserError(f"health.power.seconds={power.seconds}: {why}; set 0.1 or more")
    if power.enabled is Switch.true and not gpu:
        raise UserError("health.power.enabled=true: this run has no GPU to meter; set health.power.enabled=auto")


def check_alerts(alerts: AlertsConfig) -> None:
    """UserError for a threshold that could not be one."""
    shares = (
        "saturated",
        "underflown",
        "shadow_cosine",
        "expert_entropy",
        "throughput_drop",
        "memory_full",
        "throttled",
    )
    above_one = ("grad_norm_spike", "scale_drop", "scale_rise", "expert_load")
    above_zero = (
        "repeat",
        "loss_rise",
        "loss_plateau",
        "kurtosis_power",
        "shadow_loss_gap",
        "memory_growth",
        "straggler",
    )
    above_zero += ("max_logit", "allocator_retries", "gpu_celsius", "gpu_memory_celsius")
    for keys, low, high, what in (
        (shares, 0.0, 1.0, "above 0 and up to 1"),
        (above_one, 1.0, math.inf, "above 1"),
        (above_zero, 0.0, math.inf, "above 0"),
    ):
        for key in keys:
            value = getattr(alerts, key)
            if value is not None and not (low < value <= high and math.isfinite(value)):
                raise UserError(f"health.alerts.{key}={value}: out of range; set a number {what}, or null for none")


def check_looks(health: HealthConfig, fp8: bool, transformer_engine: bool) -> None:
    """UserError for looks and shadows that cannot be. fp8: whether any GEMM computes in it; transformer_engine:
    whether its modules do."""
    for key in ("every", "shadow_every"):
        value = getattr(health, key)
        if value is not None and value < 0:
            also = ", or null for every logged line" if key == "every" else ""
            raise UserError(f"health.{key}={value}: out of range; set 0 or more{also}")
    shadow = f"health.shadow_every={health.shadow_every}"
    if health.shadow_every and transformer_engine:
        why = "Transformer Engine's modules compute in the precision they were made for"
        raise UserError(f"{shadow}: {why}; set health.shadow_every=0, or precision.backend=auto")
    if health.shadow_every and not fp8:
        raise UserError(f"{shadow}: nothing computes in FP8, its shadow is the run; set health.shadow_every=0")
