"""Metrics of a step: collected on the device, copied once at the logging interval.

Keys are grouped by slashes (`loss/lm`, `optim/grad_norm`, `perf/tokens_per_second`, ...). Device metrics are 0-d
tensors and leave in one copy; host metrics (time, memory) are added here.
"""

import re
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from precision import ScalingArena, gemm_layers

# Dense BF16 peak in FLOP/s, from data sheets, without sparsity: the denominator of perf/mfu in every precision; the
# first entry that is found in a GPU's name counts.
BF16_PEAK = {
    "H100 PCIe": 756e12, "H800 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "GB200": 2500e12,
    "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12,
}  # fmt: skip


def bf16_peak(device: torch.device) -> float | None:
    """Return the GPU's BF16 peak in FLOP/s, or None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in BF16_PEAK.items() if re.search(rf"{key}(?!\d)", name)), None)  # no RTX A1000


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def allocated_memory_gib(device: torch.device) -> float:
    """Return the current memory in GiB: of tensors on a GPU, of the process on a CPU (its peak, if the current value is
    hidden)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return peak_memory_gib(device)
    return int(pages.read_text().split()[1]) * resource.getpagesize() / 2**30


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the memory metrics of a line, in GiB, and on a GPU the number of allocation retries so far: the
    allocator found no contiguous block, freed its cache, and the GPU had to be waited for."""
    memory = {"memory/peak_gib": peak_memory_gib(device), "memory/allocated_gib": allocated_memory_gib(device)}
    if device.type == "cuda":
        memory["memory/allocator_retries"] = torch.cuda.memory_stats(device)["num_alloc_retries"]
    return memory


def state_bytes(model: nn.Module, optimizer_state: dict[str, dict[str, Tensor]]) -> int:
    """Return the bytes that stay between steps: masters, buffers, compute weights, moments (gradients are freed)."""
    kept = [*(p for p in model.parameters() if not p.is_meta), *model.buffers()]
    kept += [t for layer in gemm_layers(model) if layer.operand is not None for t in layer.operand if t is not None]
    kept += [t for state in optimizer_state.values() for t in state.values() if not t.is_meta]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in kept}.values())


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Copy tensors of one device, of any shape, to the host at once, as numbers or nested lists."""
    if not tensors:
        return {}
    alike: dict[torch.dtype, list[str]] = {}  # concatenated by dtype first: fewer launches
    for key, tensor in tensors.items():
        alike.setdefault(tensor.dtype, []).append(key)
    order = [key for keys in alike.values() for key in keys]
    groups = [torch.cat([tensors[key].detach().flatten() for key in keys]).double() for keys in alike.values()]
    parts = torch.cat(groups).cpu().split([tensors[key].numel() for key in order])
    found = {key: part.view(tensors[key].shape).tolist() for key, part in zip(order, parts, strict=True)}
    return {key: found[key] for key in tensors}


def load_metrics(load: Tensor) -> dict[str, Tensor]:
    """Return largest over mean load, the mean and the maximum over blocks. load: [blocks, E], tokens of each expert."""
    if load.numel() == 0:
        return {}
    ratio = load.amax(dim=1).double() / load.double().mean(dim=1)
    return {"moe/load_max_over_mean": ratio.mean(), "moe/load_max_over_mean_worst": ratio.max()}


def fp8_metrics(arena: ScalingArena) -> dict[str, Tensor]:
    """Return the range of the scales and the largest amax over FP8 tensors of the current step; empty without FP8."""
    if not arena.num_scaled:
        return {}
    used = arena.scaled & (arena.scale > 0)
    return {
        "fp8/amax_max": torch.where(arena.scaled, arena.amax, 0.0).max(),
        "fp8/scale_max": torch.where(used, arena.scale, 0.0).max(),
        "fp8/scale_min": torch.where(used, arena.scale, torch.inf).min(),
    }


class Throughput:
    """Tokens per second between readings. Time under `paused()` (evaluation, saving) does not count.

    flops_per_token: of the next step.
    """

    def __init__(self, flops_per_token: float, device: torch.device):
        self.flops_per_token, self._device, self._peak = flops_per_token, device, bf16_peak(device)
        self._rates: list[float] = []
        self.is_paused = False
        self.latest: tuple[int, float, int] = 0, 0.0, 0
        """Tokens, seconds and steps between the last two readings."""
        self._restart()

    def _restart(self) -> None:
        self._began, self._paused, self._tokens, self._flops, self._steps = time.perf_counter(), 0.0, 0, 0.0, 0

    @contextmanager
    def paused(self, wait: bool) -> Iterator[None]:
        """Exclude the time spent inside. wait: something takes time there. Steps that a GPU has not finished do count,
        so it first waits for them."""
        if wait and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        began, self.is_paused = time.perf_counter(), True
        yield
        self.is_paused = False
        self._paused += time.perf_counter() - began

    def step(self, tokens: int) -> None:
        """Count a finished step with this many tokens."""
        self._tokens += tokens
        self._flops += tokens * self.flops_per_token
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Return the rates since the last reading. The caller has waited for the device."""
        seconds = time.perf_counter() - self._began - self._paused
        self.latest = self._tokens, seconds, self._steps
        rate, flops = self._tokens / seconds, self._flops / seconds
        self._rates.append(rate)
        metrics = {
            "perf/tokens_per_second": rate,
            "perf/step_seconds": seconds / max(self._steps, 1),
            "perf/tflops_per_gpu": flops / 1e12,
        }
        if self._peak is not None:
            metrics["perf/mfu"] = flops / self._peak
        self._restart()
        return metrics

    @property
    def median(self) -> float:
        """Median over the readings after the first, which includes compilation; the first if it is the only one."""
        return statistics.median(self._rates[1:] or self._rates or [0.0])
