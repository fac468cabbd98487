"""Common code of the benches: variants in turn in one process, short and sustained, watts, and a table.

A variant is a function that does one unit of work. All variants run in turn (A, B, C, A, B, C, ...), so that heat,
clocks and neighbours affect them alike; the median over rounds is reported.

    short       the card is cool: some idle time, then a few repetitions timed one by one, caches cold
    sustained   back to back for `hold` seconds after `hold` seconds of warm-up: the card is at its power limit, as in
                training; the energy counter is read

On a GPU a variant is captured as a CUDA graph and replayed, which times the GPU's work and not Python's. If capture
fails (a variant may refuse it) it is launched from Python; the column "launch" shows which. Watts come from NVML's
energy counter (trainer.health.nvml), read in a thread beside the work. On a CPU both are wall-clock times, and there
are no watts.
"""

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from precision.errors import RunError, UserError
from trainer.forecast.words import aligned
from trainer.health.nvml import Gpu, GpuLost, Unavailable, find

ROOT = Path(__file__).resolve().parents[2]
NONE = "n/a"
Result = TypeVar("Result")
COMMAND = " ".join(["python", *sys.argv])  # as given: composing a config changes sys.argv


@dataclass
class Variant:
    """A variant. run: a unit of work, without arguments. graph: whether it may be captured (no host work in it)."""

    name: str
    run: Callable[[], object]
    graph: bool = True
    sustained: bool = True


@dataclass
class Timing:
    """Medians over rounds, seconds a unit; None if not measured. launch: graph, python or cpu."""

    name: str
    launch: str
    short: float = math.nan
    sustained: float | None = None
    watts: float | None = None
    megahertz: float | None = None
    rounds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def joules(self) -> float | None:
        """Energy of one unit under sustained load."""
        return None if self.watts is None or self.sustained is None else self.watts * self.sustained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every bench."""
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all variants in turn (default: 3)")
    parser.add_argument("--repeat", type=int, default=10, help="short: timed repetitions a round (default: 10)")
    parser.add_argument("--hold", type=float, default=0.5, help="sustained: seconds; 0: leave it out (default: 0.5)")
    parser.add_argument("--no-graph", action="store_true", help="launch from Python what could be a CUDA graph")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")


def device() -> torch.device:
    """Return the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def say(*words: object) -> None:
    """Print a line at once: benches are watched."""
    print(*words, flush=True)


def header() -> dict[str, str]:
    """Return the facts to quote with every figure, and print them."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    facts = {
        "command": COMMAND,
        "commit": _commit(),
        "machine": gpu,
        "torch": torch.__version__,
    }
    say("   ".join(f"{key}: {value}" for key, value in facts.items()))
    return facts


def _commit() -> str:
    """Return the commit of the checkout, or n/a."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return NONE
    return done.stdout.strip() or NONE


def attempt(name: str, make: Callable[[], list]) -> list:
    """Return what `make` returns, or nothing, with a line about it, if a library or a kernel refuses. The others are
    still measured."""
    try:
        return make()
    except Exception as error:  # any error of a library
        kind = "" if isinstance(error, UserError | RunError) else f", {type(error).__name__}"
        say(f"{name}: left out{kind}: {' '.join(str(error).split())[:300]}")
        return []


def measure(variants: Iterable[Variant], options: argparse.Namespace) -> dict[str, Timing]:
    """Time all variants in turn. One that fails is reported in a line and left out."""
    prepared: list[tuple[Variant, Callable[[], object]]] = []
    timings: dict[str, Timing] = {}
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None
    pool: Any = None  # shared by all graphs, on one stream: results are not read, so the next graph may overwrite them
    for variant in variants:
        for run in attempt(variant.name, lambda v=variant, p=pool: [_prepare(v, not options.no_graph, stream, p)]):
            timings[variant.name] = Timing(variant.name, "python" if torch.cuda.is_available() else "cpu")
            if isinstance(run, torch.cuda.CUDAGraph):
                timings[variant.name].launch, pool, run = "graph", run.pool(), run.replay
            prepared.append((variant, run))
    meter = Meter()
    for _ in range(options.rounds):
        for variant, run in prepared:
            timing = timings[variant.name]
            _note(timing, "short", short(run, options.repeat))
            if options.hold > 0 and variant.sustained:
                for key, value in sustained(run, timing.rounds["short"][-1], options.hold, meter).items():
                    _note(timing, key, value)
    for timing in timings.values():
        for key, values in timing.rounds.items():
            setattr(timing, key, statistics.median(values))
    return timings


def _note(timing: Timing, key: str, value: float | None) -> None:
    if value is not None:
        timing.rounds.setdefault(key, []).append(value)


def _prepare(
    variant: Variant, graphs: bool, stream: torch.cuda.Stream | None, pool: Any
) -> "Callable[[], object] | torch.cuda.CUDAGraph":
    """Warm up and return the function that launches it, or its graph. pool: memory for a graph on `stream`."""
    if stream is None:  # no GPU
        variant.run()
        return variant.run
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            variant.run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    if not (graphs and variant.graph):
        return variant.run
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            variant.run()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        say(f"{variant.name}: no CUDA graph ({' '.join(str(error).split())[:120]}); launched from Python")
        torch.cuda.synchronize()
        variant.run()
        return variant.run
    return graph


_flush: list[torch.Tensor] = []


def short(run: Callable[[], object], repeat: int) -> float:
    """Return the median seconds of single units with cold caches, after a short rest."""
    if not torch.cuda.is_available():
        return statistics.median(clock(run)[0] for _ in range(repeat))
    if not _flush:
        _flush.append(torch.empty(256 << 20, dtype=torch.int8, device="cuda"))  # several times the L2 cache
    torch.cuda.synchronize()
    time.sleep(0.1)
    run()
    pairs = []
    for _ in range(repeat):
        _flush[0].zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def sustained(run: Callable[[], object], unit: float, hold: float, meter: "Meter") -> dict[str, float | None]:
    """Return seconds a unit back to back for `hold` seconds after a warm-up of equal length, with watts and clock.

    unit: approximate seconds of one.
    """
    count = max(math.ceil(hold / unit), 1)
    for _ in range(count):
        run()
    synchronize()
    with meter:
        began = time.perf_counter()
        for _ in range(count):
            run()
        synchronize()
        seconds = (time.perf_counter() - began) / count
    return {"sustained": seconds, "watts": meter.watts, "megahertz": meter.megahertz}


def release() -> None:
    """Free the memory of an earlier measurement's variants."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock(run: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds of a call, waiting for the GPU, and its result."""
    synchronize()
    began = time.perf_counter()
    result = run()
    synchronize()
    return time.perf_counter() - began, result


class Meter:
    """Average power of the first GPU inside a `with`; None without a GPU or without NVML.

    The energy counter updates every 20 to 100 ms. A thread notes the updates, and the power is computed between the
    first and the last one: whole steps of the counter, whatever the length of the window.
    """

    def __init__(self) -> None:
        self.watts: float | None = None
        self.megahertz: float | None = None
        self._gpu: Gpu | None = None
        if torch.cuda.is_available():
            try:
                gpu = find(torch.device("cuda", 0))
                if gpu.joules() is None:
                    raise Unavailable("this GPU has no energy counter")
                self._gpu = gpu
            except (Unavailable, GpuLost) as error:
                say(f"no watts: {error}")

    def __enter__(self) -> "Meter":
        self.watts = self.megahertz = None
        if self._gpu is not None:
            self._moves: list[tuple[float, float]] = []
            self._note_energy(self._gpu)
            self._clocks: list[int] = []
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._watch, args=[self._gpu], daemon=True)
            self._thread.start()
        return self

    def _watch(self, gpu: Gpu) -> None:
        while not self._stop.wait(0.004):
            self._note_energy(gpu)
            if (clock := gpu.sm_mhz()) is not None:
                self._clocks.append(clock)

    def _note_energy(self, gpu: Gpu, moved: bool = True) -> None:
        """Record the counter if it has changed."""
        now, energy = time.perf_counter(), gpu.joules()
        if energy is not None and not (moved and self._moves and energy == self._moves[-1][1]):
            self._moves.append((now, energy))

    def __exit__(self, *_: object) -> None:
        if self._gpu is None:
            return
        self._stop.set()
        self._thread.join()
        ends = self._moves if len(self._moves) < 3 else self._moves[1:]  # the first is the start, not an update
        if len(ends) < 2:
            self._note_energy(self._gpu, moved=False)
            ends = self._moves
        if len(ends) < 2:  # NVML did not answer
            return
        (t0, e0), (t1, e1) = ends[0], ends[-1]
        self.watts = (e1 - e0) / (t1 - t0)
        self.megahertz = statistics.median(self._clocks) if self._clocks else None


def show(value: float | None, form: str, scale: float = 1.0, unit: str = "") -> str:
    """Return a cell of a table."""
    return NONE if value is None or math.isnan(value) else f"{value * scale:{form}}{unit}"


def ratio(base: float | None, value: float | None) -> float | None:
    """Return how many times as fast as the base it is; None if one of them is missing."""
    return None if base is None or value is None else base / value


def table(rows: list[dict[str, str]]) -> str:
    """Return aligned columns; the first to the left, the others to the right."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    return "\n".join(aligned([head, *([row.get(key, "") for key in head] for row in rows)]))


def columns(timing: Timing, flops: float) -> dict[str, str]:
    """Return the common columns of a timing. flops: useful work of a unit; casts cost time but do not count as work."""
    return {
        "variant": timing.name,
        "launch": timing.launch,
        "ms": show(timing.short, ".3f", 1e3),
        "sustained": show(timing.sustained, ".3f", 1e3),
        "TF/s": show(flops / timing.short, ".3g", 1e-12),
        "sust. TF/s": show(ratio(flops, timing.sustained), ".3g", 1e-12),
        "W": show(timing.watts, ".0f"),
        "MHz": show(timing.megahertz, ".0f"),
        "J": show(timing.joules, ".3g"),
    }


def both(base: Timing | None, timing: Timing) -> str:
    """Return how many times as fast as `base` it is, short / sustained."""
    if base is None:
        return NONE
    return f"{show(ratio(base.short, timing.short), '.2f')} / {show(ratio(base.sustained, timing.sustained), '.2f')}"


def share(limit: Timing | None, timing: Timing) -> str:
    """Return the share of the limit that it reaches, short / sustained."""
    if limit is None:
        return NONE
    shares = limit.short / timing.short, ratio(limit.sustained, timing.sustained)
    return " / ".join(show(part, ".0%") for part in shares)


def write_json(path: Path | None, facts: dict[str, str], results: list[dict[str, Any]]) -> None:
    """Write all measurements, if a file was requested."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
