"""Config of `recovery.*`. Values are in configs/train.yaml; what they do is in docs/recovery.md."""

from dataclasses import dataclass


@dataclass
class SpikesConfig:
    """Steps whose loss or gradient norm jumps up are dropped too."""

    enabled: bool
    """Whether they are."""
    window: int
    """The last committed steps, so many of them, say what is usual."""
    min_steps: int
    """Committed steps that have to be seen before anything is dropped; at most window."""
    threshold: float
    """What lies further above the median is a spike, in robust standard deviations of the logarithm."""


@dataclass
class RewindConfig:
    """Back to a checkpoint, and over the data that broke the run."""

    max: int
    """Rewinds for the same trouble; then the run stops. 0: it stops without any."""
    margin: int
    """Batches that are left out before and after those of the dropped steps."""
    lr_factor: float
    """The learning rate is multiplied by this after a rewind, above 0 and at most 1."""
    lr_steps: int
    """For so many committed steps beyond the place of the trouble."""


@dataclass
class RecoveryConfig:
    """What happens to a step that goes bad, and to a run whose steps do."""

    max_consecutive_skips: int
    """More dropped steps in a row than this rewind the run, or stop it."""
    spikes: SpikesConfig
    """Statistical spikes."""
    rewind: RewindConfig
    """Back to a checkpoint."""
