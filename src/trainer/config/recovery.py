"""Config of `recovery.*`. Values are in configs/train.yaml; docs/recovery.md explains them."""

from dataclasses import dataclass


@dataclass
class SpikesConfig:
    """Spikes: steps whose loss or gradient norm jumps."""

    enabled: bool
    """Skip such steps."""
    window: int
    """Number of the last committed steps whose median and spread define the usual range."""
    min_steps: int
    """Committed steps required before any step is skipped; at most window."""
    threshold: float
    """Distance above the median at which a step is a spike, in robust standard deviations of the logarithm."""


@dataclass
class RewindConfig:
    """Rewinding to a checkpoint, and leaving out the data that broke the run."""

    max: int
    """Rewinds for the same trouble before the run stops. 0: it stops at once."""
    margin: int
    """Batches that are left out before and after those of the skipped steps."""
    lr_factor: float
    """Factor of the learning rate after a rewind, above 0 and at most 1."""
    lr_steps: int
    """Committed steps beyond the place of the trouble for which lr_factor holds."""


@dataclass
class RecoveryConfig:
    """Reactions to bad steps."""

    max_consecutive_skips: int
    """More skipped steps in a row than this rewind the run, or stop it."""
    spikes: SpikesConfig
    """Statistical spikes."""
    rewind: RewindConfig
    """Rewinds."""
