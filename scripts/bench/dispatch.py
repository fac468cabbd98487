"""Experts' tokens between GPUs of one node: three ways, first checked against each other, then timed.

    torchrun --nproc_per_node=2 scripts/bench/dispatch.py                    Moonlight's layer, 16,384 and 32,768 tokens
    torchrun --nproc_per_node=2 scripts/bench/dispatch.py --skip-symmetric   without other GPUs' memory
    torchrun --nproc_per_node=2 scripts/bench/dispatch.py --skip-times       checks only
    torchrun --nproc_per_node=2 scripts/bench/dispatch.py --tokens 64 --hidden 32 --width 16 --experts 8 --chosen 2

It runs a norm and the layer of experts behind it, shared experts included, forward and backward, on each GPU's own
tokens; experts are spread over all GPUs. Recipes are bf16 (tokens travel in BF16) and fp8_delayed (tokens and their
gradients travel in FP8, results in BF16).

    all_to_all   models.dispatch: exact numbers of rows, which the host waits for
    slots        models.slots over collectives of equal parts: fixed sizes, no host waits
    symmetric    models.slots over memory that the GPUs share: only rows in use, overlapped with the shared experts
    silent       slots whose messages stay in the GPU: the time without any transfer
    * graph      the same as one CUDA graph

Checks, of each recipe: result, all gradients and amaxes are those of all_to_all bit for bit, repeated, with random
routing and with all tokens for the first half of the experts; a lack of room is noticed on its rank, and cured by more
room; no call waits for the host; a CUDA graph replays the same bits. Each check prints `ok` or `DIFFERS` in a line; the
exit code is 1 if one differs. A hanging check ends within a minute (several for the first, which compiles), and reports
where.

    ms           medians, of the slowest GPU, forward and backward
    exposed      ms more than `silent`
    x            times as fast as all_to_all

Messages alone are timed, too: a hidden row in BF16 of each token to each GPU (there: copied out of the inbox; back:
not).
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import frame
import measure
import torch
import torch.distributed as dist
from dispatch_layer import FIRST, LIMIT, Layer, Silent, graph_of, phase
from torch import Tensor

from models.dispatch import AllToAllDispatcher
from models.slots import SlotDispatcher, Slots
from models.transport import EqualSplits, SymmetricMemory, Transport, shares_memory
from precision import begin_step
from precision.errors import RunError, UserError
from trainer.launch.command_line import Parser, guarded

RECIPES = {"bf16": "BF16", "fp8_delayed": "FP8"}
SHAPE = {"hidden": 2048, "width": 1408, "experts": 64, "chosen": 6}
WAIT = 40.0  # timeout of a GPU for another one
ROOM = 1.25


class Checks:
    """Prints lines of ok and DIFFERS. failed: whether a check differed."""

    failed = False

    def note(self, name: str, problems: list[str]) -> None:
        """Report a check, which is ok if it is on all processes. A collective."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, problems)
        bad = [f"rank {rank}: {', '.join(each[:4])}" for rank, each in enumerate(found) if each]
        self.failed |= bool(bad)
        if dist.get_rank() == 0:
            measure.say(f"{'DIFFERS' if bad else 'ok     '} {name}{'; ' * bool(bad)}{'; '.join(bad)}")


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return what is not equal bit for bit, and by how much."""
    bad = []
    for name, value in theirs.items():
        if name not in ours or not torch.equal(ours[name], value):
            off = float((ours[name].double() - value.double()).abs().max()) if name in ours else torch.nan
            bad.append(f"{name} (off by {off:.2e})")
    return bad


def check(o: argparse.Namespace, transports: dict[str, Transport], checks: Checks, device: torch.device) -> None:
    """Check every way against all_to_all."""
    group = dist.group.WORLD
    assert group is not None
    tokens = min(o.tokens[0], 4096) + 5
    for recipe in RECIPES:
        with phase(f"{recipe}, all_to_all, which compiles", FIRST):
            layer = Layer(o, recipe, tokens, group, device)
            whole = layer.block.moe.dispatcher
            fresh = layer.step()
            layer.commit()
            plain = layer.step()
        for name, transport in transports.items():
            slots = Slots(transport, ROOM, torch.zeros((), device=device))
            with phase(f"{recipe}, {name}, first pass", FIRST if name == "slots" else LIMIT):
                layer.through(SlotDispatcher(slots, o.experts))
                checks.note(f"{recipe} {name}: the numbers of all_to_all", differing(layer.step(), plain))
            with phase(f"{recipe}, {name}, repeated"):
                bad = [each for _ in range(o.repeat) for each in differing(layer.step(), plain)]
                checks.note(f"{recipe} {name}: {o.repeat} times", bad)
            with phase(f"{recipe}, {name}, host"):
                checks.note(f"{recipe} {name}: the host does not wait", waits(layer, device))
            with phase(f"{recipe}, {name}, too little room"):
                slots.fill.zero_()
                slots.capacity = 0.5
                crowded = layer.step()
                bad = [n for n, value in crowded.items() if not torch.isfinite(value).all()]
                fill = reviewed(slots)
                bad += [] if fill > 1 else [f"fill is {fill:.2f}"]
                while slots.observing:  # by all_to_all, until slots are used again
                    bad += differing(layer.step(), plain)
                    reviewed(slots)
                bad += differing(layer.step(), plain)
                bad += [] if slots.fill <= 1 else [f"fill after it {float(slots.fill):.2f}"]
                checks.note(f"{recipe} {name}: too little room is noticed, and grows", bad)
            if name == "symmetric" and not o.skip_graph:
                with phase(f"{recipe}, {name}, graph"):
                    checks.note(f"{recipe} {name}: as a CUDA graph", graph_differs(layer, plain))
        with phase(f"{recipe}, skewed", FIRST):
            layer.bias[o.experts // 2 :] = -10.0
            layer.through(whole)
            theirs = layer.step()
        for name, transport in transports.items():
            with phase(f"{recipe}, {name}, skewed"):
                slots = Slots(transport, 2.0 * dist.get_world_size(), torch.zeros((), device=device))
                layer.through(SlotDispatcher(slots, o.experts))
                checks.note(f"{recipe} {name}: all tokens for half of the experts", differing(layer.step(), theirs))
        layer.bias.zero_()
        layer.arena.history.zero_()
        layer.arena.scale.zero_()
        for name, transport in transports.items() if recipe == "fp8_delayed" else ():
            with phase(f"{recipe}, {name}, no history"):
                slots = Slots(transport, ROOM, torch.zeros((), device=device))
                layer.through(SlotDispatcher(slots, o.experts))
                checks.note(f"{recipe} {name}: without a history", differing(layer.step(), fresh))


def reviewed(slots: Slots) -> float:
    """Review the room as a run does: return the largest `fill` of all processes, and begin again at 0."""
    fill = slots.fill.clone()
    dist.all_reduce(fill, dist.ReduceOp.MAX)
    slots.fill.zero_()
    slots.fit(float(fill))
    return float(fill)


def waits(layer: Layer, device: torch.device) -> list[str]:
    """Return where a pass synchronises, as far as torch knows."""
    if device.type == "cpu":
        return []
    layer.begin()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.run()
    except RuntimeError as error:
        return [str(error).splitlines()[0]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return []


def graph_differs(layer: Layer, plain: dict[str, Tensor]) -> list[str]:
    """Return what differs after a replay, or why there is no graph."""
    try:
        graph, y = graph_of(layer)
    except RuntimeError as error:
        first: BaseException = error
        while first.__context__ is not None:  # the end of a capture that failed raises, too
            first = first.__context__
        return [str(first).splitlines()[0]]
    bad = []
    for _ in range(5):
        layer.arena.amax.zero_()
        begin_step(layer.model, layer.arena)
        graph.replay()
        bad += differing(layer.results(y), plain)
    return bad


def timed(
    run: Callable[[], object], before: Callable[[], object], o: argparse.Namespace, device: torch.device
) -> float:
    """Return the median seconds of a call, of the slowest process."""
    seconds = []
    for _ in range(3 + o.repeat):
        before()
        dist.barrier()
        seconds.append(measure.clock(run)[0])
    middle = torch.tensor(statistics.median(seconds[3:]), device=device)
    dist.all_reduce(middle, dist.ReduceOp.MAX)
    return float(middle)


def times(o: argparse.Namespace, transports: dict[str, Transport], device: torch.device) -> list[dict[str, Any]]:
    """Return milliseconds of a layer, all ways."""
    group, out = dist.group.WORLD, []
    assert group is not None
    for tokens in o.tokens:
        for recipe, payload in RECIPES.items():
            with phase(f"{tokens} tokens, {recipe}", FIRST):
                layer = Layer(o, recipe, tokens, group, device)
                layer.step()
                layer.commit()
            ways: dict[str, Any] = {"all_to_all": AllToAllDispatcher(group, o.experts)}
            for name, transport in {"silent": Silent(group), **transports}.items():
                slots = Slots(transport, ROOM, torch.zeros((), device=device))
                ways[name] = SlotDispatcher(slots, o.experts)
            for name, way in ways.items():
                layer.through(way)
                with phase(f"{tokens} tokens, {recipe}, {name}, warm", LIMIT if name == "symmetric" else FIRST):
                    layer.step()
                with phase(f"{tokens} tokens, {recipe}, {name}"):
                    forward = timed(layer.forward, layer.begin, o, device)
                    both = timed(layer.run, layer.begin, o, device)
                line = {"tokens": tokens, "payload": payload, "way": name, "forward": forward, "both": both}
                out.append(line)
                if name in ("symmetric", "silent") and device.type == "cuda" and not o.skip_graph:
                    with phase(f"{tokens} tokens, {recipe}, {name}, graph"):
                        graph, _ = graph_of(layer)
                        both = timed(graph.replay, lambda: None, o, device)
                        out.append({**line, "way": f"{name} graph", "forward": None, "both": both})
                        del graph
            del layer, ways
            measure.release()
    return out


def messages(o: argparse.Namespace, transports: dict[str, Transport], device: torch.device) -> list[dict[str, str]]:
    """Time messages alone: as many rows in BF16 to each process as it has tokens."""
    out, P = [], dist.get_world_size()
    for tokens in o.tokens:
        slots = -(-tokens // 16) * 16
        x = torch.zeros(P * slots, o.hidden, dtype=torch.bfloat16, device=device)
        used = torch.full((P,), tokens, device=device)
        for name, transport in transports.items():
            for keep in (True, False):
                with phase(f"{tokens} tokens, {name}, messages"):
                    seconds = timed(partial(transport.exchange, (x,), used, used, keep), lambda: None, o, device)
                sent = tokens * o.hidden * 2 * (P - 1)
                line = {"tokens, way": f"{tokens} {name} {'there' if keep else 'back'}", "ms": f"{seconds * 1e3:.3f}"}
                out.append(line | {"GB/s to others": f"{sent / seconds / 1e9:.0f}"})
    return out


def rows(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    made = []
    for one in results:
        same = {r["way"]: r["both"] for r in results if (r["tokens"], r["payload"]) == (one["tokens"], one["payload"])}
        silent = same["silent graph" if one["way"].endswith("graph") else "silent"]
        made.append(
            {
                "tokens, payload, way": f"{one['tokens']} {one['payload']} {one['way']}",
                "forward ms": measure.show(one["forward"], ".2f", 1e3),
                "forward + backward ms": measure.show(one["both"], ".2f", 1e3),
                "exposed ms": measure.show(one["both"] - silent, ".2f", 1e3),
                "x": measure.show(measure.ratio(same["all_to_all"], one["both"]), ".3f"),
            }
        )
    return made


def arguments() -> argparse.Namespace:
    """Parse the options. Raises UserError for incompatible ones."""
    parser, gpu = Parser(__doc__), torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768] if gpu else [64], help="of a GPU")
    for name, width in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=width, help=f"({width}, Moonlight's)")
    parser.add_argument("--repeat", type=int, default=20, help="calls that are checked, and timed (20)")
    parser.add_argument("--skip-symmetric", action="store_true", help="leave other GPUs' memory alone")
    parser.add_argument("--skip-graph", action="store_true", help="no CUDA graphs")
    parser.add_argument("--skip-times", action="store_true", help="checks only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2:
        raise UserError("one process keeps its tokens: start torchrun --nproc_per_node=2 scripts/bench/dispatch.py")
    for name, value in {"tokens": min(options.tokens), "repeat": options.repeat}.items():
        if value < 1:
            raise UserError(f"--{name} {value}: set 1 or more")
    if options.experts % ranks:
        raise UserError(f"--experts {options.experts}: {ranks} processes cannot share them; set a multiple of {ranks}")
    return options


def main() -> int:
    code = guarded(run)
    if code and dist.is_initialized():  # others may wait in a message for this process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def run() -> None:
    """Read the command line, check, measure, print on rank 0."""
    options, device = arguments(), frame.own_device()
    with phase("start", FIRST):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
        )
        group = dist.group.WORLD
        assert group is not None
        transports: dict[str, Transport] = {"slots": EqualSplits(group)}
        if not options.skip_symmetric and shares_memory(group, device):
            transports["symmetric"] = SymmetricMemory(group, device, WAIT)
        first = dist.get_rank() == 0
        facts = measure.header() if first else {}
    checks, results, alone = Checks(), [], []
    if first and "symmetric" not in transports:
        measure.say("symmetric memory is left out" + ("" if options.skip_symmetric else ": these processes share none"))
    check(options, transports, checks, device)
    if not options.skip_times:
        alone, results = messages(options, transports, device), times(options, transports, device)
    if first:
        if results:
            measure.say("\n" + measure.table(rows(results)))
            measure.say("\n" + measure.table(alone))
        measure.write_json(options.json, facts, results)
    dist.barrier()
    dist.destroy_process_group()
    if checks.failed:
        raise RunError("a way differs from all_to_all, see above")


if __name__ == "__main__":
    sys.exit(main())
