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

from collections.abc import Callable

from trainer.config.health import AlertsConfig
from trainer.health.alerts import Rule
from trainer.health.rules.curves import GradNormSpike, LossPlateau, LossRise, ShadowCosine, ShadowLossGap
from trainer.health.rules.power import GpuCelsius, GpuMemoryCelsius, GpuMemoryErrors, Throttled
from trainer.health.rules.resources import AllocatorRetries, MemoryFull, MemoryGrowth, Straggler, ThroughputDrop
from trainer.health.rules.tensors import (
    ExpertEntropy,
    ExpertLoad,
    Kurtosis,
    MaxLogit,
    Saturated,
    ScaleDrop,
    ScaleRise,
    Underflown,
)


def training_rules(config: AlertsConfig, card_gib: float | None) -> list[Rule]:
    """The rules that have a threshold. card_gib: memory of the GPU; None: not known, and no rule about it."""
    kinds: dict[str, Callable[[float], Rule]] = {
        "grad_norm_spike": GradNormSpike,
        "loss_rise": LossRise,
        "loss_plateau": LossPlateau,
        "scale_drop": ScaleDrop,
        "scale_rise": ScaleRise,
        "saturated": Saturated,
        "underflown": Underflown,
        "max_logit": MaxLogit,
        "kurtosis_power": Kurtosis,
        "shadow_loss_gap": ShadowLossGap,
        "shadow_cosine": ShadowCosine,
        "expert_load": ExpertLoad,
        "expert_entropy": ExpertEntropy,
        "throughput_drop": ThroughputDrop,
        "straggler": Straggler,
        "memory_growth": lambda threshold: MemoryGrowth(threshold, card_gib),
        "memory_full": lambda threshold: MemoryFull(threshold, card_gib),
        "allocator_retries": AllocatorRetries,
        "throttled": Throttled,
        "gpu_celsius": GpuCelsius,
        "gpu_memory_celsius": GpuMemoryCelsius,
        "gpu_memory_errors": GpuMemoryErrors,
    }
    thresholds = {name: getattr(config, name) for name in kinds}
    return [kind(thresholds[name]) for name, kind in kinds.items() if thresholds[name] is not None]
