"""The GPU in use; the choice of backends depends on it."""

from dataclasses import dataclass

import torch

HOPPER = 9, 0  # compute capability
KNOWS_FP8 = 8, 9  # of the first GPUs with FP8


@dataclass(frozen=True)
class Gpu:
    """A GPU. name: from the driver (`NVIDIA H200`). capability: major and minor, (9, 0) for Hopper."""

    name: str
    capability: tuple[int, int]

    @property
    def sm(self) -> str:
        """The architecture as compilers write it, for example sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


def knows_bf16(device: torch.device) -> bool:
    """Return whether compilers can round to BF16 on this device: they refuse it for GPUs before sm_80."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def knows_fp8(device: torch.device) -> bool:
    """Return whether compilers can cast to E4M3 on this device: they refuse it for older GPUs."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= KNOWS_FP8


def detect(device: torch.device | str) -> Gpu | None:
    """Return the GPU behind a device; None for a CPU, and where torch sees no GPU."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return Gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
