"""Config of `health.*`. Values are in configs/health/default.yaml."""

from dataclasses import dataclass


@dataclass
class HealthConfig:
    """What is watched beside the loss, and when somebody is told."""

    every: int
    """Steps between looks inside: one sequence runs aside, off the record, and shows what casts and activations do; 0:
    never."""
