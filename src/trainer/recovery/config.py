"""Config of `recovery.*`. Values are in configs/train.yaml."""

from dataclasses import dataclass


@dataclass
class RecoveryConfig:
    """What happens when a step is not finite: it is dropped, whole."""

    max_consecutive_skips: int
    """More dropped steps in a row than this stop the run."""
