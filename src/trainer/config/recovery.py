"""Config of `recovery.*`. Values are in configs/train.yaml; what they do is in docs/recovery.md."""

from dataclasses import dataclass


@dataclass
class SpikesConfig:
    """Spikes: steps whose loss or gradient norm jumps."""

    enabled: bool
    """Drop such steps."""
    window: int
    """Number of the last committed steps whose median and spread are the usual range."""
    min_steps: int
    """Committed steps that have to be seen before anything is dropped; at most window."""
    threshold: float
    """Distance above the median from which a step is a spike, in robust standard deviations of the logarithm."""


@dataclass
class RewindConfig:
    """Rewinding to a checkpoint, and skipping the data that broke the run."""

    max: int
    """Rewinds for the same trouble; then the run stops. 0: it stops without any."""
    margin: int
    """Batches that are left out before and after those of the dropped steps."""
    lr_factor: float
    """The learning rate is multiplied by this after a rewind, above 0 and at most 1."""
    lr_steps: int
    """Committed steps beyond the place of the trouble for which lr_factor holds."""


@dataclass
class RecoveryConfig:
    """Reactions to bad steps."""

    max_consecutive_skips: int
    """More dropped steps in a row than this rewind the run, or stop it."""
    spikes: SpikesConfig
    """Statistical spikes."""
    rewind: RewindConfig
    """Rewinds."""
