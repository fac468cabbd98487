"""Collectives: bandwidth of all-reduce, all-gather, reduce-scatter and all-to-all, by size.

    torchrun --nproc_per_node=8 scripts/bench/allreduce.py
    torchrun --nproc_per_node=2 scripts/bench/allreduce.py --sizes 1M 64M --what all_to_all --json links.json

NCCL between GPUs, gloo between CPUs. Size is that of the larger of a rank's input and output. With n ranks:

    algorithm GB/s   size / time
    bus GB/s         what a rank sends over its link: size / time times (n - 1) / n, twice that for all-reduce.
                     Comparable between collectives, numbers of ranks, and with a link's data sheet (NCCL's convention)

The largest bus figures are the --node-link (one node) and --network (several) of scripts/plan_parallelism.py. Times are
medians over --repeat calls, each from a barrier until the slowest rank has finished.
"""

import importlib
import os
import re
import statistics
import sys
import warnings
from collections.abc import Callable

import frame
import measure
import torch
import torch.distributed as dist
from torch import Tensor

from precision.errors import UserError
from trainer.launch.command_line import Parser, guarded

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
TWICE = {"all_reduce": 2.0}


def run() -> None:
    parser = Parser(__doc__)
    sizes = ["64K", "1M", "16M", "64M", "256M", "1G"]
    parser.add_argument("--sizes", nargs="+", default=sizes, help=f"bytes, with K, M or G ({' '.join(sizes)})")
    parser.add_argument("--what", nargs="+", default=list(COLLECTIVES), choices=list(COLLECTIVES), help="all four")
    parser.add_argument("--repeat", type=int, default=10, help="timed calls (10)")
    parser.add_argument("--json", type=measure.Path, metavar="FILE", help="also write everything measured to FILE")
    options = parser.parse_args()
    wanted = [in_bytes(text) for text in options.sizes]
    frame.check_positive(options, "repeat")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UserError(
            "one process sends nothing: start several, torchrun --nproc_per_node=8 scripts/bench/allreduce.py"
        )
    warnings.filterwarnings("ignore", message=".*reduce_scatter_tensor.* is deprecated")  # torch 2.11 has no other name
    with frame.process_group() as device:
        results = [one for name in options.what for one in bandwidths(name, wanted, device, options.repeat)]
        if dist.get_rank() == 0:
            facts = measure.header()
            measure.say(f"\n{dist.get_world_size()} ranks, {dist.get_backend()}\n{topology()}")
            measure.say(measure.table([row(one) for one in results]))
            measure.write_json(options.json, facts, results)


def in_bytes(text: str) -> int:
    """Parse a size: 64M -> 67108864. Raises UserError for other text."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if found is None or int(found[1]) == 0:
        raise UserError(f"--sizes {text}: want a number of bytes, as 64K, 16M or 1G")
    return int(found[1]) * UNITS[found[2]]


def all_reduce(whole: Tensor, part: Tensor) -> None:
    dist.all_reduce(whole)


def all_gather(whole: Tensor, part: Tensor) -> None:
    dist.all_gather_into_tensor(whole, part)


def reduce_scatter(whole: Tensor, part: Tensor) -> None:
    dist.reduce_scatter_tensor(part, whole)


def all_to_all(whole: Tensor, part: Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(whole), whole)


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], None]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}


def bandwidths(name: str, sizes: list[int], device: torch.device, repeat: int) -> list[dict]:
    """Measure one collective at all sizes: seconds of the slowest rank, and bytes a second. A collective."""
    n, out = dist.get_world_size(), []
    for size in sizes:
        elements = max(size // 2 // n, 1) * n
        whole = torch.zeros(elements, dtype=torch.bfloat16, device=device)
        part = torch.zeros(elements // n, dtype=torch.bfloat16, device=device)
        seconds = timed(lambda name=name, whole=whole, part=part: COLLECTIVES[name](whole, part), repeat, device)
        speed = 2 * elements / seconds
        bus = speed * (n - 1) / n * TWICE.get(name, 1.0)
        out.append({"name": name, "bytes": 2 * elements, "seconds": seconds, "algorithm": speed, "bus": bus})
    return out


def timed(call: Callable[[], None], repeat: int, device: torch.device) -> float:
    """Return the median over calls of the slowest rank's seconds."""
    times = []
    for i in range(repeat + 2):  # two to warm up
        dist.barrier()
        spent = torch.tensor(measure.clock(call)[0], device=device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        if i >= 2:
            times.append(float(spent))
    return statistics.median(times)


def row(one: dict) -> dict[str, str]:
    return {
        "collective": one["name"],
        "MiB": f"{one['bytes'] / 2**20:.4g}",
        "us": f"{1e6 * one['seconds']:.1f}",
        "algorithm GB/s": f"{one['algorithm'] / 1e9:.2f}",
        "bus GB/s": f"{one['bus'] / 1e9:.2f}",
    }


def topology() -> str:
    """Return the links of this node's GPUs: NVLink lanes and their speed, or PCIe."""
    if not torch.cuda.is_available():
        return "no GPUs"
    try:
        pynvml = importlib.import_module("pynvml")  # nvidia-ml-py
        pynvml.nvmlInit()
        lanes = [nvlinks(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        return "NVLink lanes of each GPU: " + ", ".join(map(str, lanes)) + peers()
    except Exception as error:  # without the package or the rights: report it and continue
        return f"NVLink unknown ({type(error).__name__})" + peers()


def nvlinks(nvml: object, index: int) -> int:
    """Return the number of active NVLink lanes of a GPU."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    active = 0
    for lane in range(nvml.NVML_NVLINK_MAX_LINKS):  # type: ignore[attr-defined]
        try:
            active += nvml.nvmlDeviceGetNvLinkState(handle, lane)  # type: ignore[attr-defined]
        except Exception:  # there is no such lane
            break
    return active


def peers() -> str:
    """Return whether all GPUs of the node reach each other's memory, in words."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    reach = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    return f"; {reach} of {len(pairs)} pairs reach each other's memory" if pairs else ""


if __name__ == "__main__":
    sys.exit(guarded(run))
