"""Octet and Megatron-core in one call: the same shape, tokens, optimizer and number of steps, one table.

    python scripts/bench/rivals/compare.py                  one GPU: Moonlight's shape, 5 blocks, 8 x 4,096 tokens
    python scripts/bench/rivals/compare.py --gpus 2 --ours bf16,fp8_delayed --theirs bf16,delayed
    python scripts/bench/rivals/compare.py model.num_layers=9 model.vocab_size=102400

Each contestant runs in its own processes, one after the other, in the order of the table, and again in each of
`--repeat` passes; the median counts. A step is forward, backward, clipping, AdamW and the work of the casts; tokens are
on the GPU. Experts get equal numbers of tokens on both sides. Master weights, moments and gradients are FP32, compute
weights BF16, both without recomputation. Several GPUs share masters and moments: Octet by FSDP, Megatron-core by its
distributed optimizer. KEY=VALUE changes our config, and theirs as far as the model goes.

    tokens/s      of a GPU, waiting for all ranks
    TF/s          by Octet's formula (docs/benchmarks.md) for both
    x their best  times the tokens/s of the fastest Megatron-core run in the table
    loss          of the first and the last step: both memorise the same tokens

Megatron-core: pip install --no-deps megatron-core==0.19.2, and Transformer Engine 2.20.2; `megatron_core.py` lists its
enabled options.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from precision.errors import RunError, UserError

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # shared by all benches

import frame  # noqa: E402
import measure  # noqa: E402
import torch  # noqa: E402
from work import WORK, Work  # noqa: E402

from trainer.launch.command_line import Parser, guarded  # noqa: E402

OURS, THEIRS = ("bf16", "fp8_delayed", "fp8_jit", "fp8_block"), ("bf16", "delayed", "blockwise", "tensorwise")
SHAPE = ["model=moonlight_16b", "model.num_layers=5", "model.vocab_size=32768", "model.force_balanced_routing=true"]
GIB = 2**30


def run() -> None:
    """Read the command line, measure each contestant, print the table."""
    parser = Parser(__doc__)
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="as for train.py")
    parser.add_argument("--gpus", type=int, default=1, help="of this node (1)")
    parser.add_argument("--ours", default="bf16,fp8_delayed", help=f"some of {','.join(OURS)} (bf16,fp8_delayed)")
    parser.add_argument("--theirs", default="bf16,delayed", help=f"some of {','.join(THEIRS)} (bf16,delayed)")
    parser.add_argument("--sequences", type=int, default=8, help="of a GPU and step (8)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence (4096)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the first that counts (5)")
    parser.add_argument("--steps", type=int, default=15, help="steps in a row, none waited for (15)")
    parser.add_argument("--rounds", type=int, default=3, help="of --steps steps in one start (3)")
    parser.add_argument("--repeat", type=int, default=1, help="passes over all contestants (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    options = parser.parse_intermixed_args()
    frame.check_positive(options, "gpus", "sequences", "length", "warm_up", "steps", "rounds", "repeat")
    if torch.cuda.is_available() and options.gpus > torch.cuda.device_count():
        raise UserError(f"--gpus {options.gpus}: this node has {torch.cuda.device_count()}; name as many or fewer")
    contestants = [("octet", name) for name in _names("--ours", options.ours, OURS)]
    contestants += [("megatron-core", name) for name in _names("--theirs", options.theirs, THEIRS)]
    facts = measure.header()
    facts |= {name: _version(name) for name in ("megatron-core", "transformer_engine")}
    measure.say("   ".join(f"{name} {facts[name]}" for name in ("megatron-core", "transformer_engine")))
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(options.repeat):
        for contestant in contestants:
            for found in measure.attempt(" ".join(contestant), lambda c=contestant: [one(*c, options)]):
                results.setdefault(contestant, []).append(found)
                speed, took = found["tokens_per_second"], found["took"]
                measure.say(f"{' '.join(contestant)}: {speed:,.0f} tokens/s, {took:.0f} s with its start")
    if not results:
        raise RunError("no contestant ran to the end; the lines above say why")
    medians = {name: statistics.median(each["tokens_per_second"] for each in found) for name, found in results.items()}
    best = max((speed for (who, _), speed in medians.items() if who == "megatron-core"), default=None)
    measure.say(measure.table([row(name, found, medians[name], best) for name, found in results.items()]))
    flat = [{"who": who, "precision": what, **each} for (who, what), found in results.items() for each in found]
    measure.write_json(options.json, facts, flat)


def one(who: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start a contestant's processes and return their measurements."""
    if who == "megatron-core" and "missing" in (_version("megatron-core"), _version("transformer_engine")):
        raise RunError("it wants megatron-core 0.19.2 and Transformer Engine 2.20.2; pip install them")
    overrides = our_overrides(precision if who == "octet" else "bf16", options)
    with tempfile.TemporaryDirectory() as room:
        work, result = work_of(overrides, precision, options, Path(room) / "result.json")
        work.write(Path(room) / "work.json")
        script, words = ("octet.py", overrides) if who == "octet" else ("megatron_core.py", [])
        began = time.perf_counter()
        found = frame.torchrun(options.gpus, HERE / script, words, result, {WORK: str(Path(room) / "work.json")})
    tokens = work.sequences * work.length
    return {
        **found,
        "tokens_per_second": tokens / found["seconds"],
        "flops": tokens / found["seconds"] * work.flops_per_token,
        "took": time.perf_counter() - began,
    }


def our_overrides(recipe: str, options: argparse.Namespace) -> list[str]:
    """Return the arguments of train.py for this work."""
    layout = ["parallel=fsdp"] if options.gpus > 1 else []
    sizes = [
        f"trainer.sequence_length={options.length}",
        f"trainer.microbatch_size={options.sequences}",
        f"trainer.global_batch_size={options.sequences * options.gpus}",
    ]
    steady = ["optim.lr=1e-5", "optim.warmup_steps=0", "optim.decay_fraction=0"]  # the same in each step, as theirs
    return [f"+recipe={recipe}", *SHAPE, *sizes, *layout, *steady, *options.overrides]


def work_of(overrides: list[str], precision: str, options: argparse.Namespace, result: Path) -> tuple[Work, Path]:
    """Return the work of a contestant, with the shape of our config, and the path of its result."""
    from models.flops import flops_per_token

    model = frame.composed(overrides).model
    shape = {key: value.value if isinstance(value, Enum) else value for key, value in asdict(model).items()}
    flops = flops_per_token(model, options.length)
    counts = options.warm_up, options.steps, options.rounds
    return Work(shape, precision, options.sequences, options.length, *counts, flops, str(result)), result


def row(name: tuple[str, str], found: list[dict[str, Any]], speed: float, best: float | None) -> dict[str, str]:
    first = found[0]
    return {
        "system": name[0],
        "precision": name[1],
        "tokens/s": f"{speed:,.0f}",
        "of runs": " ".join(f"{each['tokens_per_second']:,.0f}" for each in found) if len(found) > 1 else "",
        "ms": measure.show(statistics.median(each["seconds"] for each in found), ".1f", 1e3),
        "TF/s": measure.show(statistics.median(each["flops"] for each in found), ".0f", 1e-12),
        "x their best": measure.NONE if best is None else f"{speed / best:.2f}",
        "peak GiB": measure.show(max(each["peak"] for each in found), ".1f", 1 / GIB),
        "loss": " -> ".join(f"{loss:.2f}" for loss in first["losses"]),
    }


def _names(option: str, given: str, known: tuple[str, ...]) -> list[str]:
    names = [name for name in given.split(",") if name]
    if wrong := [name for name in names if name not in known]:
        raise UserError(f"{option} {given}: no {wrong[0]} here; name some of {','.join(known)}, with commas between")
    return names


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(guarded(run))
