"""Linear layers: forward and backward, casts included, against BF16, Transformer Engine and the limit.

    python scripts/bench/linear.py                                           16384 x 8192 x 2048
    python scripts/bench/linear.py --shape 32768x2048x5632 --variants torch bf16 fp8_delayed
    python scripts/bench/linear.py --model moonlight_16b --tokens 32768      every shape that its plan puts in FP8
    python scripts/bench/linear.py --accumulation fp32 fast                  ours with both sums of FP8 products
    python scripts/bench/linear.py --model moonlight_16b --table             lines for the table behind backend=auto

A shape is M x N x K: M rows (tokens), N out features, K in features; y [M, N] = x [M, K] w [N, K]^T.

    torch        three torch.mm in BF16: also the limit of BF16
    fp8 limit    three torch._scaled_mm, E4M3, one scale a tensor, fast accumulation, operands cast before: no casts
    bf16 fp8_*   ours: precision.Linear built from the recipe's plan; x and dy come in BF16, dw leaves in FP32
    te_*         te.Linear: bf16, DelayedScaling, Float8CurrentScaling, Float8BlockScaling

Columns "ms" and "sustained" are for a microbatch with prepared weights (made once a step and used by many
microbatches); "ms +w" includes making the weights, as in a step of one microbatch. TF/s count the 6 M N K
multiplications and additions; casts count only as time. "x bf16", "x te" and "of limit" are short / sustained.
"""

import argparse
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import frame
import measure
import torch
from layers import (
    OURS,
    TE,
    TransformerEngine,
    add_arguments,
    check_table,
    plan_of,
    plan_of_model,
    rated,
    ready,
    settle,
    summed,
    transformer_engine,
)
from limits import linear_bf16, linear_fp8, random
from measure import Timing, Variant, both, show

from precision import Linear, begin_step
from precision.errors import UserError
from precision.rates import record
from trainer.launch.command_line import Parser, guarded

Shape = tuple[int, int, int]
LIMIT, WITH_WEIGHTS = "fp8 limit", " +w"


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--shape", action="append", metavar="MxNxK", help="may be given more than once")
    parser.add_argument("--model", help="a model of configs/model: all its FP8 linear shapes")
    parser.add_argument("--tokens", type=int, default=32768, help="rows with --model (default: 32768)")
    add_arguments(parser, ("torch", "limit"))
    measure.add_arguments(parser)
    options = parser.parse_args()
    frame.check_positive(options, "rounds", "repeat")
    shapes = {parse_shape(text): "" for text in options.shape or ()}
    if options.model:
        shapes |= shapes_of(options.model, options.tokens)
    check_table(options)
    facts = measure.header()
    te = transformer_engine(options.variants)
    results: list[dict[str, Any]] = []
    for shape, used_by in (shapes or {(16384, 8192, 2048): ""}).items():
        measure.release()
        measure.say(f"\n{' x '.join(map(str, shape))}   {used_by}".rstrip())
        timings = measure.measure(variants(shape, options, te), options)
        measure.say(report(shape, timings))
        if options.table:
            measure.say("\n".join(entries(shape, timings)))
        results += [{"shape": shape, **asdict(timing)} for timing in timings.values()]
    measure.write_json(options.json, facts, results)


def parse_shape(text: str) -> Shape:
    """Parse a shape: 16384x8192x2048 -> M, N, K."""
    try:
        m, n, k = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise UserError(f"--shape {text}: want MxNxK, rows, out features, in features: 16384x8192x2048") from None
    if min(m, n, k) < 16 or n % 16 or k % 16:
        raise UserError(f"--shape {text}: FP8 wants N and K in multiples of 16, and at least 16 rows")
    return m, n, k


def shapes_of(model: str, tokens: int) -> dict[Shape, str]:
    """Return every linear shape that the FP8 recipes put in FP8, with its rows of the plan."""
    if tokens < 16:
        raise UserError(f"--tokens {tokens}: rows of each linear; give at least 16")
    shapes: dict[Shape, str] = {}
    for row in plan_of_model(model).gemms.values():
        if row.recipe.is_fp8 and row.groups == 1:
            key = (tokens, row.out_features, row.in_features)
            part = row.name.split(".", 2)[-1]
            known = shapes.get(key, "").split()
            shapes[key] = " ".join(known if part in known else [*known, part])
    return shapes


def variants(shape: Shape, options: argparse.Namespace, te: TransformerEngine | None) -> list[Variant]:
    """Return the variants to run in turn. Backward needs the results of forward, so each variant runs both."""
    M, N, K = shape
    torch.manual_seed(1)
    x, dy = random(M, K), random(M, N, scale=1e-3)
    out: list[Variant] = []
    for name in options.variants:
        if name == "torch":
            out.append(Variant(name, linear_bf16(*shape)))
        elif name == "limit":
            out.append(Variant(LIMIT, linear_fp8(*shape)))
        elif name in OURS:
            for label, sums in summed(name, options.accumulation):
                make = partial(ours, name, x, dy, options.backend, label, sums)
                out += measure.attempt(label, make)
        elif te is not None:
            out += measure.attempt(name, lambda name=name: theirs(te, name, x, dy))
    return out


def ours(
    recipe: str, x: torch.Tensor, dy: torch.Tensor, backend: str | None, name: str, accumulation: str
) -> list[Variant]:
    """Return precision.Linear of a recipe, with its weights prepared, and with making them."""
    plan = plan_of(recipe, x.device, x.shape[0], backend, accumulation)
    layer = Linear(plan.gemm("layers.0.attn.o", "attn.o", x.shape[1], dy.shape[1]))
    module, arena = ready(layer, plan, x.device)
    x = x.detach().requires_grad_()

    def both_ways() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(dy)

    def with_weights() -> None:
        begin_step(module, arena)
        both_ways()

    both_ways()
    settle(module, arena)
    return [Variant(name, both_ways), Variant(name + WITH_WEIGHTS, with_weights, sustained=False)]


def theirs(te: TransformerEngine, name: str, x: torch.Tensor, dy: torch.Tensor) -> list[Variant]:
    """Return te.Linear. With `is_first_microbatch` the FP8 weights are made again. Launched from Python, as in use."""
    layer = te.pytorch.Linear(x.shape[1], dy.shape[1], bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = x.detach().requires_grad_()

    def both_ways(first: bool) -> None:
        x.grad = layer.weight.grad = None
        with te.autocast(name):
            y = layer(x, is_first_microbatch=first)
        y.backward(dy)

    both_ways(True)
    return [
        Variant(name, lambda: both_ways(False), graph=False),
        Variant(name + WITH_WEIGHTS, lambda: both_ways(True), graph=False, sustained=False),
    ]


def report(shape: Shape, timings: dict[str, Timing]) -> str:
    flops = 6.0 * shape[0] * shape[1] * shape[2]
    bf16 = timings.get("bf16", timings.get("torch"))
    rows = []
    for name, timing in timings.items():
        if name.endswith(WITH_WEIGHTS):
            continue
        low = name in ("torch", "bf16", "te_bf16")
        limit = timings.get("torch" if low else LIMIT)
        made = timings.get(name + WITH_WEIGHTS)
        row = measure.columns(timing, flops)
        row["ms +w"] = show(made.short if made else None, ".3f", 1e3)
        row["x bf16"] = both(bf16, timing)
        row["x te"] = both(timings.get(TE.get(name, "")), timing) if name in TE else ""
        row["of limit"] = "" if name in ("torch", LIMIT) else measure.share(limit, timing)
        rows.append(row)
    return measure.table(rows)


def entries(shape: Shape, timings: dict[str, Timing]) -> list[str]:
    """Return lines for the table of measured rates."""
    M, N, K = shape
    return [record("linear", *key, (N, K, 1), M, times) for key, times in rated(timings).items()]


if __name__ == "__main__":
    sys.exit(guarded(run))
