"""The machine of a forecast: this one, or a GPU by name (`dry_run=true gpu=h200` on a login node).

Memory is torch's `total_memory` of the GPU, which is less than its name suggests.
"""

from dataclasses import dataclass

from precision.hardware import Gpu, detect
from trainer.config import Config, GpuChoice
from trainer.forecast.memory import GIB, total_memory
from trainer.launch.device import host_memory, pick_device


@dataclass(frozen=True)
class Target:
    """The device of a run's ranks. gpu: None on a CPU. memory: bytes of a GPU, or of the host with all of its ranks."""

    gpu: Gpu | None
    memory: float

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "this host" if self.gpu is None else self.gpu.name

    @property
    def gpu_memory(self) -> float | None:
        """Bytes of a GPU; None on a CPU."""
        return None if self.gpu is None else self.memory


KNOWN = {
    GpuChoice.h200: Target(Gpu("NVIDIA H200", (9, 0)), 139.8 * GIB),
    GpuChoice.h100: Target(Gpu("NVIDIA H100 80GB HBM3", (9, 0)), 79.1 * GIB),
    GpuChoice.a100: Target(Gpu("NVIDIA A100-SXM4-80GB", (8, 0)), 79.1 * GIB),
    GpuChoice.rtx4090: Target(Gpu("NVIDIA GeForce RTX 4090", (8, 9)), 23.5 * GIB),
}


def target(config: Config) -> Target:
    """Return the GPU that `gpu` names; for auto the device that this process would train on."""
    if config.gpu is not GpuChoice.auto:
        return KNOWN[config.gpu]
    device = pick_device(config.trainer.device)
    return Target(detect(device), total_memory(device) or host_memory())
