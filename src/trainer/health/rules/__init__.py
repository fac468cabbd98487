"""The training rules and what each compares. Windows are in logged lines, thresholds in `health.alerts`.

    grad_norm_spike   the gradient norm, against the median of its own last lines
    loss_rise         the loss, against its lowest value so far
    loss_plateau      no progress of the loss in this many steps, while the gradient norm does not fall either
    scale_drop        a tensor's scale falls within a few lines: its amax explodes, NaN is ahead
    scale_rise        ... rises: its amax collapses, and values underflow when it comes back
    saturated         share of a tensor's elements that a cast clips
    underflown        share of its non-zero elements that a cast makes zero
    max_logit         the largest attention logit of a block, in two consecutive lines
    kurtosis_power    p in kurtosis ~ step^p, where it grows: above 1 is faster than linear (`Kurtosis`)
    shadow_loss_gap   loss in the run's precision against BF16, as a share of the loss
    shadow_cosine     the gradient's angle to BF16's
    expert_load       the fullest expert against the mean, in consecutive lines
    expert_entropy    entropy of the load over ln E, in consecutive lines
    throughput_drop   tokens per second, against the median of this process's own lines
    straggler         a rank for which all others wait: its GPU, or its data
    memory_growth     memory held between steps creeps up
    memory_full       the peak approaches the card's size
    allocator_retries    the card's memory is fragmented
    throttled         heat or hardware slows a GPU for this share of the time
    gpu_celsius       temperature of the hottest core
    gpu_memory_celsius   ... of the hottest memory
    gpu_memory_errors    errors in GPU memory that ECC could not correct

Rules use medians and median absolute deviations, not means and standard deviations: one spike does not move them.
"""

from typing import Any

from precision.config import ScalingConfig
from trainer.config.health import AlertsConfig
from trainer.health.alerts import Rule
from trainer.health.rules import curves, power, resources, tensors

RULES: tuple[Any, ...] = (
    *(curves.GradNormSpike, curves.LossRise, curves.LossPlateau),
    *(tensors.ScaleDrop, tensors.ScaleRise, tensors.Saturated, tensors.Underflown, tensors.MaxLogit, tensors.Kurtosis),
    *(curves.ShadowLossGap, curves.ShadowCosine, tensors.ExpertLoad, tensors.ExpertEntropy),
    *(resources.ThroughputDrop, resources.Straggler, resources.MemoryGrowth, resources.MemoryFull),
    *(resources.AllocatorRetries, power.Throttled, power.GpuCelsius, power.GpuMemoryCelsius, power.GpuMemoryErrors),
)


def training_rules(config: AlertsConfig, card_gib: float | None, scaling: ScalingConfig | None = None) -> list[Rule]:
    """Return the rules that have a threshold. card_gib: memory of the GPU. scaling: of the plan. None: unknown."""
    more = dict.fromkeys((resources.MemoryGrowth, resources.MemoryFull), (card_gib,))
    more |= dict.fromkeys((tensors.Saturated, tensors.Underflown), (scaling,))
    return [rule(at, *more.get(rule, ())) for rule in RULES if (at := getattr(config, rule.name)) is not None]
