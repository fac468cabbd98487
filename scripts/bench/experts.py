"""Experts: a mixture-of-experts FFN from permutation to weighted sum, forward and backward, casts included.

    python scripts/bench/experts.py                            16,384 tokens, top-6 of 64, 2048 -> 2 x 1408 -> 2048
    python scripts/bench/experts.py --tokens 32768 --variants a2 bf16 fp8_delayed
    python scripts/bench/experts.py --gradients fp32 bf16      ours with weight gradients in both formats
    python scripts/bench/experts.py --accumulation fp32 fast   ours with both sums of FP8 products
    python scripts/bench/experts.py --table                    lines for the table behind backend=auto

Routing is random, like an untrained router's: equal groups would favour variants that pad. Backward gives the gradients
of the input, of both weights and of the router's weights.

    a2           plain code, BF16: torch._grouped_mm, the project's Triton gather, SwiGLU and combine (on a CPU: torch)
    bf16 fp8_*   ours: precision.expert_ffn with layers built from the recipe's plan; x and dy come in BF16
    * fast       FP8 products summed by the tensor cores alone (`precision.accumulation`)
    * dw16       the same with weights that autograd sees in BF16, so with weight gradients in BF16
    te_*         two te.GroupedLinear; permutation by index_select, compiled SwiGLU, row counts as a list on the host
    * graph      the same with row counts that the host knew before: its GPU's work without its Python. A training step
                 cannot do that, as routing changes; ours are graphs everywhere
    * fp32       the same with all three GEMMs promoted to FP32, as ours are; te_* by default promotes both gradients'
    bf16 limit, fp8 limit    the six grouped GEMMs with prepared operands, weight gradients in BF16 and in FP32

Weight gradients: a2 and te_* give BF16, ours FP32, as training does, on one GPU and on many: masters are FP32, and so
are the sums and the exchange between ranks. FP32 is twice the bytes to write; `--gradients bf16` removes the difference
from a comparison.

"ms +w" includes making the weights, as in a step of one microbatch; elsewhere they are prepared. TF/s count the GEMMs'
multiplications and additions of existing rows; casts and padding count only as time. "x a2", "x te" (from Python, by
its own defaults), "x te graph" (with our accumulation) and "of limit" are short / sustained. Memory saved for backward:
"kept" by autograd, each storage once, without the weights; "grown" is the allocator's growth in a forward pass, without
its result.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import frame
import layers
import limits
import measure
import torch
from layers import OURS, TE, TransformerEngine
from measure import Timing, Variant, both, show
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from precision import Feed, GroupedLinear, begin_step, combine_rows, expert_ffn, gather_rows
from precision.errors import UserError
from precision.permutation import permutation
from precision.rates import record
from trainer.launch.command_line import Parser, guarded

WITH_WEIGHTS, FORWARD, IN_BF16, GRAPH, PROMOTED = " +w", " forward", " dw16", " graph", " fp32"
FPROP_IN_TENSOR_CORES = ("te_delayed", "te_current")  # by default; blocks are promoted, BF16 is summed in FP32
MIB = 2**20
_grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


class Problem:
    """Shapes and data. T tokens, E experts, K chosen of a token, D hidden, F expert width, R = T K rows."""

    def __init__(self, options: argparse.Namespace):
        self.T, self.E, self.K = options.tokens, options.experts, options.chosen
        self.D, self.F = options.hidden, options.width
        torch.manual_seed(2)
        device = measure.device()
        self.x, self.dy = limits.random(self.T, self.D), limits.random(self.T, self.D, scale=1e-3)
        score_TE = torch.rand(self.T, self.E, device=device)
        chosen = score_TE.topk(self.K)
        self.expert_TK = chosen.indices
        self.weight_TK = chosen.values / chosen.values.sum(1, keepdim=True)
        self.backend, self.accumulation = options.backend, options.accumulation

    @property
    def flops(self) -> float:
        return 6.0 * self.T * self.K * self.D * 3 * self.F

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Return the input and the router's weights, as leaves with gradients."""
        return self.x.detach().requires_grad_(), self.weight_TK.detach().requires_grad_()


def run() -> None:
    parser = Parser(__doc__)
    for name, default in {"tokens": 16384, "hidden": 2048, "width": 1408, "experts": 64, "chosen": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument(
        "--gradients", nargs="+", choices=("fp32", "bf16"), default=["fp32"], help="of weights, ours (default: fp32)"
    )
    layers.add_arguments(parser, ("a2", "limit"))
    measure.add_arguments(parser)
    options = parser.parse_args()
    frame.check_positive(options, "tokens", "rounds", "repeat")
    if not 1 <= options.chosen <= options.experts:
        raise UserError(f"--chosen {options.chosen}: a token chooses 1 to --experts {options.experts}")
    for name in ("hidden", "width"):
        if getattr(options, name) < 16 or getattr(options, name) % 16:
            raise UserError(f"--{name} {getattr(options, name)}: FP8 wants multiples of 16")
    layers.check_table(options)
    if options.table and "fp32" not in options.gradients:
        raise UserError("--table: the table of rates is of training, whose gradients are FP32; add --gradients fp32")
    facts = measure.header()
    problem = Problem(options)
    least, most = (int(n) for n in torch.bincount(problem.expert_TK.flatten(), minlength=problem.E).aminmax())
    measure.say(
        f"\n{problem.T} tokens, top-{problem.K} of {problem.E} ({least} to {most} rows each), "
        f"{problem.D} -> 2 x {problem.F} -> {problem.D}, {problem.flops / 1e12:.3g} TFLOP"
    )
    kept: dict[str, dict[str, float]] = {}
    te = layers.transformer_engine(options.variants)
    timings = measure.measure(variants(problem, options.variants, options.gradients, te, kept), options)
    measure.say(report(problem, timings, kept))
    if options.table:
        measure.say("\n".join(entries(problem, timings)))
    results = [{**asdict(timing), **kept.get(timing.name, {})} for timing in timings.values()]
    measure.write_json(options.json, facts, results)


def variants(
    problem: Problem, names: list[str], gradients: list[str], te: TransformerEngine | None, kept: dict
) -> list[Variant]:
    """Return the variants to run in turn; what each saves for backward goes to `kept`."""
    out: list[Variant] = []
    for name in names:
        if name == "limit":
            out += measure.attempt(name, lambda: limit(problem))
        elif name == "a2":
            out += measure.attempt(name, lambda: contestant(problem, "a2", *plain(problem), kept))
        elif name in OURS:
            for label, sums in layers.summed(name, problem.accumulation):
                for bf16 in (each == "bf16" for each in dict.fromkeys(gradients)):
                    out += measure.attempt(label, partial(ours, problem, name, kept, bf16, label, sums))
        elif te is not None:
            out += measure.attempt(name, lambda name=name: theirs(problem, te, name, kept))
    return out


def limit(problem: Problem) -> list[Variant]:
    expert, E = problem.expert_TK, problem.E
    shapes = (2 * problem.F, problem.D), (problem.D, problem.F)
    out = [Variant("bf16 limit", _all([limits.grouped_bf16(expert, E, *shape) for shape in shapes]))]
    if measure.device().type == "cuda":
        out.append(Variant("fp8 limit", _all([limits.grouped_fp8(expert, E, *shape) for shape in shapes])))
    return out


def _all(works: list[Callable[[], object]]) -> Callable[[], object]:
    return lambda: [work() for work in works]


def contestant(
    problem: Problem,
    name: str,
    weights: list[Tensor],
    call: Callable[[Tensor, Tensor], Tensor],
    kept: dict,
    known: list[Tensor] | None = None,
    graph: bool = True,
) -> list[Variant]:
    """Return both passes, and forward alone, of call(x, router's weights) -> y."""
    x, weight_TK = problem.leaves()

    def both_ways() -> None:
        for leaf in (x, weight_TK, *weights):
            leaf.grad = None
        call(x, weight_TK).backward(problem.dy)

    both_ways()
    kept[name] = bytes_kept(lambda: call(x, weight_TK), [*weights, *(known or [])])
    return [
        Variant(name, both_ways, graph),
        Variant(name + FORWARD, lambda: call(x, weight_TK), graph, sustained=False),
    ]


def bytes_kept(forward: Callable[[], Tensor], known: list[Tensor]) -> dict[str, float]:
    """Return what a forward pass saves; see the module docstring. known: weights and tensors made from them."""
    weights = {t.untyped_storage().data_ptr() for t in known}
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    measure.synchronize()
    cuda = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if cuda else 0
    with saved_tensors_hooks(pack, lambda t: t):
        y = forward()
    grown = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes() if cuda else float("nan")
    return {"kept": sum(storages.values()), "grown": grown}


class _Ours(nn.Module):
    def __init__(self, plan: Any, problem: Problem):
        super().__init__()
        p = problem
        name, op = "layers.0.moe.experts", "moe.experts"
        self.gate_up = GroupedLinear(plan.gemm(f"{name}.gate_up", op, p.D, 2 * p.F, p.E, p.K))
        self.down = GroupedLinear(plan.gemm(f"{name}.down", op, p.F, p.D, p.E, p.K))
        self.rows_feed, self.down_feed = Feed(self.gate_up), Feed(self.down)


def ours(problem: Problem, recipe: str, kept: dict, bf16: bool, label: str, accumulation: str) -> list[Variant]:
    """Return precision.expert_ffn of a recipe, with its weights prepared, and with making them. bf16: gradients of
    weights in BF16; then making weights is not timed, as there are no masters."""
    plan = layers.plan_of(recipe, measure.device(), problem.T, problem.backend, accumulation)
    module, arena = layers.ready(_Ours(plan, problem), plan, measure.device())
    assert isinstance(module, _Ours)
    nothing = torch.zeros_like(problem.x)  # a model adds the shared experts' output here

    def call(x: Tensor, weight_TK: Tensor) -> Tensor:
        return expert_ffn(
            x, problem.expert_TK, weight_TK, module.gate_up, module.down,
            down_feed=module.down_feed, rows_feed=module.rows_feed,
            combine=torch.bfloat16, accumulate=torch.float32, add=nothing,
        )  # fmt: skip

    both = module.gate_up, module.down
    for layer in both if bf16 else ():
        layer.weight = nn.Parameter(layer.weight.detach().bfloat16())
    made = [t for layer in both if layer.operand is not None for t in layer.operand if t is not None]
    name = label + IN_BF16 if bf16 else label
    out = contestant(problem, name, [layer.weight for layer in both], call, kept, made)
    layers.settle(module, arena)
    if bf16:
        return out

    def with_weights() -> None:
        begin_step(module, arena)
        out[0].run()

    return [*out, Variant(label + WITH_WEIGHTS, with_weights, sustained=False)]


def plain(problem: Problem) -> tuple[list[Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Return A2: a good BF16 implementation without layers or plans."""
    w1 = limits.random(problem.E, 2 * problem.F, problem.D, scale=0.02).requires_grad_()
    w2 = limits.random(problem.E, problem.D, problem.F, scale=0.02).requires_grad_()
    if not torch.cuda.is_available():
        return [w1, w2], lambda x, weight_TK: plain_torch(problem, x, weight_TK, w1, w2)
    return [w1, w2], lambda x, weight_TK: _A2.apply(x, problem.expert_TK, weight_TK, w1, w2)


def plain_torch(problem: Problem, x: Tensor, weight_TK: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Compute the same on any device."""
    order_R, index_R, inverse_TK, ends = permutation(problem.expert_TK, problem.E)
    y1 = _grouped_mm(x.index_select(0, index_R), w1.mT, offs=ends)
    h = swiglu_rows(y1, weight_TK.flatten().index_select(0, order_R))
    return _grouped_mm(h, w2.mT, offs=ends).index_select(0, inverse_TK.flatten()).view(problem.T, -1, problem.D).sum(1)


def swiglu_rows(y1: Tensor, weight_R: Tensor) -> Tensor:
    """Return silu(gate) up, times the router's weight of each row."""
    gate, up = y1.chunk(2, -1)
    return (F.silu(gate.float()) * up * weight_R[:, None]).to(y1.dtype)


class _A2(torch.autograd.Function):
    """BF16 grouped GEMMs of torch between the project's kernels; saves x's rows and the first GEMM's result."""

    @staticmethod
    def forward(ctx, x: Tensor, expert_TK: Tensor, weight_TK: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        from precision.kernels.route import combine, gather, route
        from precision.kernels.swiglu import swiglu

        to = route(expert_TK, weight_TK, w1.shape[0], 16)
        rows, _ = gather(x, None, to, None)
        y1 = _grouped_mm(rows, w1.mT, offs=to.ends)
        unused = torch.empty(1, device=x.device)
        h, *_ = swiglu(y1, to.weight, to.ends, unused, unused, None)
        ctx.save_for_backward(rows, y1, w1, w2, *to)
        return combine(_grouped_mm(h, w2.mT, offs=to.ends), to)[0]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        from precision.kernels.route import Route, combine, gather
        from precision.kernels.swiglu import swiglu_backward_rows

        rows, y1, w1, w2, *routing = ctx.saved_tensors
        to = Route(*routing)
        dy, _ = gather(grads[0].contiguous(), None, to, None)
        dh = _grouped_mm(dy, w2, offs=to.ends)
        unused = torch.empty(1, device=dy.device)
        d1, h, _, parts = swiglu_backward_rows(dh, y1, to.weight, to.ends, None, unused, None, None)
        dw2 = _grouped_mm(dy.t(), h, offs=to.ends)
        dx, dweight = combine(_grouped_mm(d1, w1, offs=to.ends), to, partial=parts)
        return dx, None, dweight, _grouped_mm(d1.t(), rows, offs=to.ends), dw2


def theirs(problem: Problem, te: TransformerEngine, name: str, kept: dict) -> list[Variant]:
    """Return Transformer Engine's grouped linears; rows of each expert are padded as its FP8 needs."""
    p, new = problem, {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    gate_up = te.pytorch.GroupedLinear(p.E, p.D, 2 * p.F, **new)
    down = te.pytorch.GroupedLinear(p.E, p.F, p.D, **new)
    fp8 = name != "te_bf16"
    pad, unpad = te.pytorch.Fp8Padding(p.E), te.pytorch.Fp8Unpadding(p.E)
    activate = torch.compile(swiglu_rows)

    known = torch.bincount(p.expert_TK.flatten(), minlength=p.E).tolist()

    def call(first: bool, x: Tensor, weight_TK: Tensor, promoted: bool = False, counted: bool = False) -> Tensor:
        order_R, index_R, inverse_TK, ends = permutation(p.expert_TK, p.E)
        splits = known if counted else torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        weight_R = weight_TK.flatten().index_select(0, order_R)
        rows, sizes = gather_rows(x, index_R, inverse_TK), splits
        assert isinstance(rows, Tensor)
        with te.autocast(name, promoted):
            if fp8:
                rows, sizes = pad(rows, splits)
            h = gate_up(rows, sizes, is_first_microbatch=first)
            if fp8:
                h = unpad(h, splits)
            h = activate(h, weight_R)
            if fp8:
                h, sizes = pad(h, splits)
            y = down(h, sizes, is_first_microbatch=first)
            if fp8:
                y = unpad(y, splits)
        return combine_rows(y, index_R, inverse_TK, torch.float32).to(x.dtype)

    call(True, *problem.leaves())
    weights = [*gate_up.parameters(), *down.parameters()]
    out = contestant(problem, name, weights, lambda x, weight_TK: call(False, x, weight_TK), kept, graph=False)
    again = contestant(problem, name, weights, lambda x, weight_TK: call(True, x, weight_TK), {}, graph=False)
    out.append(Variant(name + WITH_WEIGHTS, again[0].run, graph=False, sustained=False))
    for promoted in (False, True) if name in FPROP_IN_TENSOR_CORES else (False,):
        for counted in (False, True):
            if promoted or counted:
                label = name + PROMOTED * promoted + GRAPH * counted

                def run(x: Tensor, weight_TK: Tensor, promoted: bool = promoted, counted: bool = counted) -> Tensor:
                    return call(False, x, weight_TK, promoted, counted)

                out += contestant(problem, label, weights, run, {}, graph=counted)
    return out


def report(problem: Problem, timings: dict[str, Timing], kept: dict[str, dict[str, float]]) -> str:
    base = timings.get("a2", timings.get("bf16"))
    rows = []
    for name, timing in timings.items():
        if name.endswith((WITH_WEIGHTS, FORWARD)):
            continue
        low = name.split()[0] in ("a2", "bf16", "te_bf16")
        ahead, made = timings.get(name + FORWARD), timings.get(name + WITH_WEIGHTS)
        row = measure.columns(timing, problem.flops)
        row["fwd"] = show(ahead.short if ahead else None, ".3f", 1e3)
        row["bwd"] = show(timing.short - ahead.short if ahead else None, ".3f", 1e3)
        row["ms +w"] = show(made.short if made else None, ".3f", 1e3)
        row["x a2"] = both(base, timing)
        rival = TE.get(name.removesuffix(IN_BF16))
        row["x te"] = both(timings.get(rival), timing) if rival else ""
        alike = timings.get(f"{rival}{PROMOTED}{GRAPH}", timings.get(f"{rival}{GRAPH}"))
        row["x te graph"] = both(alike, timing) if rival else ""
        row["of limit"] = (
            "" if name.endswith("limit") else measure.share(timings.get(f"{'bf16' if low else 'fp8'} limit"), timing)
        )
        for key in ("kept", "grown"):
            row[f"{key} MiB"] = show(kept.get(name, {}).get(key), ".4g", 1 / MIB)
        rows.append(row)
    return measure.table(rows)


def entries(problem: Problem, timings: dict[str, Timing]) -> list[str]:
    """Return lines for the table of measured rates. The layer's two GEMMs are measured as one, so each gets its share
    of the time by its share of the FLOPs: two thirds and one."""
    parts = ((2 * problem.F, problem.D, problem.E), 2 / 3), ((problem.D, problem.F, problem.E), 1 / 3)
    return [
        record("grouped", *key, shape, problem.T * problem.K, {run: part * value for run, value in times.items()})
        for key, times in layers.rated(timings).items()
        for shape, part in parts
    ]


if __name__ == "__main__":
    sys.exit(guarded(run))
