"""Config of `health.*`. Values are in configs/health/default.yaml."""

from dataclasses import dataclass

from trainer.schema import Switch


@dataclass
class PowerConfig:
    """Power and heat of the GPUs, by NVML. See docs/health.md."""

    enabled: Switch
    """true: metered, or the run does not start; auto: where there are a GPU and NVML; false: not."""
    seconds: float
    """Between two samples, 0.1 or more; a thread of its own takes them."""


@dataclass
class HealthConfig:
    """What is watched beside the loss, and when somebody is told."""

    every: int
    """Steps between looks inside: one sequence runs aside, off the record, and shows what casts and activations do; 0:
    never."""
    power: PowerConfig
    """Power and heat."""


def check_power(power: PowerConfig, gpu: bool) -> None:
    """ValueError for a config that cannot be. gpu: whether the run has one."""
    if not power.seconds >= 0.1:
        why = "a sample takes some milliseconds itself"
        raise ValueError(f"health.power.seconds={power.seconds}: {why}; set 0.1 or more")
    if power.enabled is Switch.true and not gpu:
        raise ValueError("health.power.enabled=true: this run has no GPU to meter; set health.power.enabled=auto")
