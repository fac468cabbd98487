"""Where the time of recorded steps went: a trace of profile.steps in a page of text.

    python scripts/summarise_trace.py runs/NAME                     the newest trace of a run, of rank 0
    python scripts/summarise_trace.py runs/NAME/profile/trace_step10-12.json.gz --rows 40

Milliseconds are per step. For a GPU: its time with arithmetic (and copies), with messages to other ranks, with messages
and no arithmetic (their cost, if nothing else waited), and idle, when it mostly waited for the host. A message lasts
until the last rank arrives: with slow hosts, that is most of it. Then come the GPU's kernels, the longest first, with
their stream; then the functions of the host's threads, each without the functions that it called. Recording slows the
host down: a step that is limited by it looks worse than it is.
"""

import gzip
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from precision.errors import UserError, counted
from trainer.launch.command_line import Parser, guarded

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver")
NAME = 100  # characters of a name

Event = dict[str, Any]


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("trace", type=Path, metavar="RUN | FILE", help="a run folder, or a trace in one")
    parser.add_argument("--rows", type=int, default=20, help="rows of a table (20)")
    options = parser.parse_args()
    if options.rows < 1:
        raise UserError(f"--rows {options.rows}: set 1 or more")
    path = find(options.trace)
    events = read(path)
    spans = [e for e in events if e.get("cat") == "user_annotation" and re.match(r"step \d+$", e["name"])]
    steps = len(spans)  # a step that a rewind repeats counts twice
    print(f"{path}: {counted(steps, 'step')}")
    on_gpu = [e for e in events if e.get("cat") in ON_GPU]
    if on_gpu:
        print("\n".join(["", *gpu(on_gpu, max(steps, 1)), "", *kernels(on_gpu, max(steps, 1), options.rows)]))
    print("\n".join(["", *host([e for e in events if e.get("cat") in ON_HOST], max(steps, 1), options.rows)]))


def find(path: Path) -> Path:
    """Return the trace that `path` means. Raises UserError without one."""
    if path.is_file():
        return path
    found = list((path / "profile").glob("trace_*.json.gz"))
    if not found:
        raise UserError(f"{path}: no trace there; train with profile.steps=[10,12], and give the run's folder")
    firsts = [file for file in found if not re.search(r"_rank[1-9]", file.name)]
    return max(firsts or found, key=lambda file: file.stat().st_mtime)


def read(path: Path) -> list[Event]:
    """Return the events of a trace that take time."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return [event for event in json.load(file)["traceEvents"] if _takes_time(event)]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: no trace of torch's profiler ({error})") from error


def _takes_time(event: Any) -> bool:
    times = (event.get("ts"), event.get("dur")) if isinstance(event, dict) else (None,)
    return all(isinstance(time, int | float) for time in times) and isinstance(event.get("name"), str)


def gpu(events: list[Event], steps: int) -> list[str]:
    """Return a GPU's activities, a line each."""
    messages = [e for e in events if "nccl" in e["name"].lower()]
    rest = [e for e in events if "nccl" not in e["name"].lower()]
    whole = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    busy, arithmetic = covered(events), covered(rest)
    parts = {
        "from the first kernel to the last": whole,
        "at work": busy,
        "arithmetic": arithmetic,
        "messages": covered(messages),
        "messages alone": busy - arithmetic,
        "idle": whole - busy,
    }
    return [f"{micro / 1e3 / steps:10.2f} ms  {name}" for name, micro in parts.items()]


def covered(events: Iterable[Event]) -> float:
    """Return the microseconds in which any of them ran."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        total += max(stop - max(begin, end), 0.0)
        end = max(end, stop)
    return total


def kernels(events: list[Event], steps: int, rows: int) -> list[str]:
    found: dict[tuple[str, Any], list[float]] = defaultdict(list)
    for e in events:
        found[e["name"][:NAME], e.get("args", {}).get("stream", "")].append(e["dur"])
    lines = [f"{'ms':>10} {'calls':>8} {'stream':>6}  kernel"]
    for (name, stream), times in sorted(found.items(), key=lambda item: -sum(item[1]))[:rows]:
        lines.append(f"{sum(times) / 1e3 / steps:10.2f} {len(times) / steps:8.6g} {stream:>6}  {name}")
    return lines


def host(events: list[Event], steps: int, rows: int) -> list[str]:
    """Return the functions of the host's threads, each without the functions that it called."""
    own: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    threads: dict[Any, list[Event]] = defaultdict(list)
    for e in events:
        threads[e.get("pid"), e.get("tid")].append(e)
    for thread in threads.values():
        around: list[Event] = []
        for e in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= e["ts"]:
                around.pop()
            if around:
                own[around[-1]["name"]] -= e["dur"]
            own[e["name"]] += e["dur"]
            calls[e["name"]] += 1
            around.append(e)
    lines = [f"{'ms':>10} {'calls':>8} {'':>6}  host"]
    for name, micro in sorted(own.items(), key=lambda item: -item[1])[:rows]:
        lines.append(f"{micro / 1e3 / steps:10.2f} {calls[name] / steps:8.6g} {'':>6}  {name[:NAME]}")
    return lines


if __name__ == "__main__":
    sys.exit(guarded(run))
