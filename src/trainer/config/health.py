"""Config of `health.*`. Values are in configs/health/default.yaml."""

from dataclasses import dataclass

from precision.errors import UserError
from trainer.config.schema import Switch


@dataclass
class PowerConfig:
    """Power and heat of the GPUs, from NVML. See docs/health.md."""

    enabled: Switch
    """true: required, or the run does not start; auto: if there are a GPU and NVML; false: off."""
    seconds: float
    """Seconds between two samples, 0.1 to 3600; a separate thread takes them."""


@dataclass
class AlertsConfig:
    """When an alert is raised. Each threshold names its rule; null: that rule is off. See docs/health.md for
    remedies."""

    enabled: bool
    """Watch logged metrics; alerts go to the console, events.jsonl, W&B, and the two below."""
    repeat: int | None
    """Steps after which a lasting alert is raised again; null: only after it has cleared."""
    webhook: str | None
    """http(s) address that receives a POST of JSON for every alert, rewind and failure; null: none."""
    command: str | None
    """Program that receives the same on its standard input and as OCTET_ALERT_* in its environment; null: none."""
    grad_norm_spike: float | None
    """Gradient norm over the median of its last lines."""
    loss_rise: float | None
    """Nats by which the loss exceeds its lowest value, for three consecutive lines."""
    loss_plateau: int | None
    """Steps in which neither the loss nor the gradient norm falls; half of the run or 100 lines, if that is more."""
    scale_drop: float | None
    """A tensor's scale falls by this factor within a few lines."""
    scale_rise: float | None
    """A tensor's scale rises by this factor within a few lines."""
    saturated: float | None
    """Share of a tensor that its cast to FP8 clips, in two consecutive sampled steps."""
    underflown: float | None
    """Share of a tensor that its cast to FP8 makes zero, in two consecutive sampled steps."""
    kurtosis_power: float | None
    """Exponent p in kurtosis ~ step^p."""
    shadow_loss_gap: float | None
    """Loss above BF16's, as a share of the loss."""
    shadow_cosine: float | None
    """Cosine of a module's gradient to BF16's: an alert below this."""
    expert_load: float | None
    """Tokens of the fullest expert over the mean, for a hundred consecutive steps."""
    expert_entropy: float | None
    """Entropy of the experts' load over that of an even one: an alert below this, for a hundred consecutive steps."""
    throughput_drop: float | None
    """Tokens per second over their median: an alert below this, for three consecutive lines and half a minute."""
    memory_growth: float | None
    """Share by which the memory held between steps has crept up."""
    memory_full: float | None
    """Share of the GPU's memory in use at the peak."""
    allocator_retries: float | None
    """Times a step that the allocator finds no contiguous block of memory, for three consecutive lines."""
    throttled: float | None
    """Share of the time in which heat or its own protection slows a GPU; the power limit does not count."""
    gpu_celsius: float | None
    """Temperature of the hottest core."""
    gpu_memory_celsius: float | None
    """Temperature of the hottest memory."""
    gpu_memory_errors: int | None
    """Uncorrectable ECC errors in GPU memory: an alert above this."""
    max_logit: float | None = None
    """Largest attention logit of a block, in two consecutive lines."""
    straggler: float | None = None
    """Share by which a rank's GPU is slower than the others' median, or share of a step for which it waits longer for
    data, for five consecutive lines."""


@dataclass
class HealthConfig:
    """Metrics beside the loss, and when they raise an alert."""

    every: int | None
    """Steps between sampled steps, which record casts and activations; null: with every logged line, 0: never. Sampled
    steps are logged independently of logging.every."""
    shadow_every: int
    """Steps between BF16 shadows: the first microbatch runs again in the run's precision and in BF16, and loss and
    gradients are compared; 0: never. Such a step is logged, too."""
    dashboard: bool
    """Write dashboard.html into the run folder when the run ends, for any reason."""
    power: PowerConfig
    """Power and heat."""
    alerts: AlertsConfig
    """When an alert is raised."""


TO_BF16 = "+recipe=bf16 health.shadow_every=0"
"""Keys that resume a run in BF16, which refuses shadows (`check_shadow`)."""


def check_power(power: PowerConfig, gpu: bool) -> None:
    """Raise UserError if a meter is required and there is none. gpu: whether the run has one."""
    if power.enabled is Switch.true and not gpu:
        raise UserError("health.power.enabled=true: this run has no GPU to meter; set health.power.enabled=auto")


def check_shadow(health: HealthConfig, fp8: bool, transformer_engine: bool) -> None:
    """Raise UserError for impossible shadows. fp8: whether anything computes in FP8; transformer_engine: whether its
    modules serve GEMMs."""
    shadow = f"health.shadow_every={health.shadow_every}"
    if health.shadow_every and transformer_engine:
        why = "Transformer Engine's modules compute in the precision they were made for"
        raise UserError(f"{shadow}: {why}; set health.shadow_every=0, or precision.backend=auto")
    if health.shadow_every and not fp8:
        raise UserError(f"{shadow}: nothing computes in FP8 that it could be compared with; set health.shadow_every=0")
