"""The precision plan: op -> precision. The only place where a precision is decided.

`PrecisionConfig` decides per op; `Plan` resolves it for one model. While the model is built, each GEMM asks for its row
by name and gets a `GemmRow` with everything its layer needs. So the plan describes the model that exists, and no layer
asks "if fp8". `finish()` then checks that every rule matched something. A dry run prints the plan, and the run folder
holds it.

A row has three GEMMs, for y = x w^T:

    fprop  y  = x w^T       x and w in `input` format
    dgrad  dx = dy w        dy in `grad` format, w as above
    wgrad  dw = dy^T x      dy as above, x as it was `saved`

`accumulation` sets how products are summed: in FP32, except in FP8 rows whose `precision.accumulation` is `fast`.
Results have the residual stream's format (the router's FP32). Weight gradients are added to FP32 sums.
"""

import copy
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from precision.backends.availability import te_scaling
from precision.config import (
    Accumulation,
    Granularity,
    Method,
    Precision,
    PrecisionConfig,
    RulesException,
    check_scaling,
)
from precision.errors import UserError, counted
from precision.formats import BF16, BY_NAME, E4M3, E5M2, FP16, FP32, Format, static_scale
from precision.hardware import Gpu
from precision.report import plan_text
from precision.resolve import Gemm, Resolver
from precision.rows import REFERENCE, TE, CoreRow, GemmRecipe, GemmRow, TensorRow

GEMM_OPS = (
    *("attn.kv_a", "attn.q_a", "attn.q", "attn.q_b", "attn.kv_b", "attn.o"),
    *("ffn", "moe.shared", "moe.router", "moe.experts", "mtp.proj", "lm_head"),
)
TENSOR_OPS = ("embed", "norm", "residual", "attn.core", "moe.dispatch", "moe.combine", "moe.accumulate")
SWIGLU = "swiglu"  # its input as saved for backward: fp8, or as GEMMs return it
TRAINER_OPS = ("grad.accumulate", "grad.reduce", "optim.master", "optim.moments")
FP8_OPS = {*GEMM_OPS, "moe.dispatch", "attn.core"} - {"moe.router"}
RULED_OPS = {*GEMM_OPS, "moe.dispatch"}  # exceptions apply to these, and to a core in FP8; mtp.* excludes norms
UNBOUNDED = (
    "attn.core=fp8 without model.qk_norm: nothing bounds queries and keys, and models like this diverge with attention "
    "in FP8 (arXiv 2505.20524, table 2); take a fog_* model, or precision.table.attn.core=bf16"
)
BLOCKS_PROMOTE = "accumulation=fast has no effect with granularity=block: its sums of 128 products must be in FP32"
FP8_MULTIPLE = 16  # in and out features of an FP8 GEMM, for the tensor cores' layouts

Decision = TypeVar("Decision", Precision, Accumulation)


@dataclass
class _Rule:
    text: str
    pattern: re.Pattern[str]
    precision: Precision | None
    fp8_only: bool
    accumulation: Accumulation | None = None
    hits: int = field(default=0)


class Plan:
    """Resolved precision of one model. Build the model with it, then call `finish()`.

    gpu (None: a CPU) and tokens of a microbatch (None: not known) determine the backends. saved: `backends()` of the
    plan with which the run began, to choose the same again.
    """

    def __init__(
        self,
        config: PrecisionConfig,
        num_layers: int,
        gpu: Gpu | None = None,
        tokens: int | None = None,
        saved: Mapping[str, Any] | None = None,
    ):
        check_scaling(config.scaling)
        self._resolver = Resolver(config, gpu, tokens, saved)
        self.config, self.num_layers = config, num_layers
        self.gemms: dict[str, GemmRow] = {}
        self.tensors: dict[str, TensorRow] = {}
        self.cores: dict[str, CoreRow] = {}
        self._rules = _rules(config, num_layers)
        self._recipes: dict[tuple[Precision, Format, str, Accumulation], GemmRecipe] = {}
        for op in TRAINER_OPS:
            precision = self._table(op, op)
            built = (Precision.fp32, Precision.bf16) if op == "optim.moments" else (Precision.fp32,)
            if precision not in built:
                only = " and ".join(each.value for each in built)
                raise UserError(f"precision.table.{op}={precision.value}: only {only} is built; set it to fp32")
            self.tensors[op] = TensorRow(op, op, BY_NAME[precision.value], "table")
        if config.table.swiglu is not None:
            self._save_swiglu(config.table.swiglu)

    def _save_swiglu(self, precision: Precision) -> None:
        """Register SwiGLU's saved input if it is in FP8."""
        residual, key = self._table("residual", SWIGLU), f"precision.table.swiglu={precision.value}"
        if precision not in (Precision.fp8, residual):
            raise UserError(f"{key}: it is saved as GEMMs return it, or in fp8; set {residual.value} or fp8")
        if precision is Precision.fp8:
            if residual is not Precision.bf16:
                raise UserError(f"{key}: only BF16 is cast, and residual={residual.value}; set {residual.value}")
            self.tensors[SWIGLU] = TensorRow(SWIGLU, SWIGLU, E4M3, "table")

    @property
    def delayed(self) -> bool:
        """Whether FP8 tensors use delayed scales."""
        return self.config.scaling.method is Method.delayed

    def gemm(
        self, name: str, op: str, in_features: int, out_features: int, groups: int = 1, rows_per_token: float = 1.0
    ) -> GemmRow:
        """Register one GEMM and return its row. UserError if it is undecided, decided twice, or cannot run in FP8."""
        if op not in GEMM_OPS:
            raise ValueError(f"{name}: {op!r} is not a GEMM op of the precision table; ops are {', '.join(GEMM_OPS)}")
        precision, why = self._decide(name, op)
        if precision is Precision.fp8:
            if op not in FP8_OPS:
                raise _not_in_fp8(name, op, why)
            for label, size in (("in", in_features), ("out", out_features)):
                if size % FP8_MULTIPLE:
                    raise UserError(
                        f"{name} [{in_features} -> {out_features}] cannot run in FP8: its {label} features are "
                        f"not a multiple of {FP8_MULTIPLE}; change the model's size, or set "
                        f"'precision.rules.exceptions=[{_exceptions_with(self.config.rules.exceptions, name)}]'"
                    )
        output = FP32 if op == "moe.router" else BY_NAME[self._table("residual", name).value]
        rows = None if self._resolver.tokens is None else max(1, round(self._resolver.tokens * rows_per_token))
        sums = self._accumulation(name) if precision is Precision.fp8 else Accumulation.fp32
        choice = self._resolver.choose(Gemm(name, out_features, in_features, groups, rows, output, sums), precision)
        recipe = self._recipe(choice.precision, output, choice.backend, sums)
        row = GemmRow(name, op, in_features, out_features, groups, rows_per_token, recipe, choice.why or why)
        self._register(name)
        self.gemms[name] = row
        return row

    def tensor(self, name: str, op: str) -> Format:
        """Register a tensor or op that is not a GEMM, and return its format."""
        if op not in TENSOR_OPS:
            raise ValueError(
                f"{name}: {op!r} is not a tensor op of the precision table; ops are {', '.join(TENSOR_OPS)}"
            )
        precision, why = self._decide(name, op)
        if op == "norm" and precision is not Precision.fp32:
            raise UserError(f"precision.table.norm={precision.value}: norms compute in fp32; set it to fp32")
        if precision is Precision.fp8 and op not in FP8_OPS:
            raise _not_in_fp8(name, op, why)
        if op == "moe.dispatch" and precision is Precision.fp8:
            stem = name.removesuffix("dispatch") + "experts"
            experts = self.gemms.get(f"{stem}.gate_up") or self.gemms.get(f"{stem}.up")
            if experts is not None and not experts.recipe.reads_fp8:  # the receiving end does not read FP8
                precision, why = Precision.bf16, "follows moe.experts"
        return self._tensor(name, op, precision, why)

    def _tensor(self, name: str, op: str, precision: Precision, why: str) -> Format:
        fp8 = BY_NAME[self.config.scaling.forward.value]
        fmt = fp8 if precision is Precision.fp8 else BY_NAME[precision.value]
        self._register(name)
        self.tensors[name] = TensorRow(name, op, fmt, why)
        return fmt

    def core(
        self, name: str, num_heads: int, qk_head_dim: int, v_head_dim: int, qk_bound: float | None = None
    ) -> CoreRow:
        """Register an attention core and return its row. qk_bound: of queries and keys, if they are normed."""
        precision, why = self._decide(name, "attn.core")
        sums, backend = Accumulation.fp32, REFERENCE
        if precision is Precision.fp8:
            sums = self._accumulation(name, blocks=False)
            core = Gemm(name, v_head_dim, qk_head_dim, 1, None, BF16, sums, is_core=True)
            choice = self._resolver.choose_core(core)
            precision, backend, why = choice.precision, choice.backend, choice.why or why
            sums = Accumulation.fp32 if backend == REFERENCE else sums  # it does not emulate others for attention
        fmt = self._tensor(name, "attn.core", precision, why)
        scaling = replace(self.config.scaling, granularity=Granularity.tensor)
        grad = E5M2 if fmt.is_fp8 else fmt
        recipe = GemmRecipe(fmt, grad, fmt, BF16 if fmt.is_fp8 else fmt, scaling, backend, sums)
        static = static_scale(qk_bound, fmt.max) if qk_bound is not None and fmt.is_fp8 else None
        if fmt.is_fp8 and qk_bound is None:
            self._resolver.note(UNBOUNDED)
        decided_by = self.tensors[name].decided_by
        self.cores[name] = CoreRow(name, num_heads, qk_head_dim, v_head_dim, static, recipe, decided_by)
        return self.cores[name]

    def finish(self) -> None:
        """Check the complete plan. UserError for a rule that matched nothing."""
        for rule in self._rules:
            if not rule.hits:
                only_fp8 = rule.fp8_only or rule.precision is None
                kind = "that is FP8" if only_fp8 else "that rules decide (GEMMs, dispatches)"
                raise UserError(
                    f"precision.rules: {rule.text} matches nothing in this plan {kind}; correct or remove it "
                    "(dry_run=true prints the rows)"
                )
        narrow = any(row.recipe.swiglu.is_fp8 for name, row in self.gemms.items() if name.endswith(".gate_up"))
        if self.config.table.swiglu is Precision.fp8 and not narrow:
            what = "no gated feed-forward layer multiplies in FP8"
            self._resolver.note(f"precision.table.swiglu=fp8 has no effect: {what}")
        formats = {name: (row.op, row.recipe.input) for name, row in self.gemms.items()}
        formats |= {name: (row.op, row.format) for name, row in self.tensors.items() if row.op not in TRAINER_OPS}
        others = [each for each in formats.items() if each[1][1] not in (FP16, FP32)]
        if self.is_fp16 and others:
            name, (op, fmt) = others[0]
            raise UserError(
                f"precision.table.{op}={'fp8' if fmt.is_fp8 else fmt.name}: others are in FP16, with which {name} "
                "can only be in FP16 or FP32; set it to fp16 or fp32, also in precision.rules.exceptions"
            )

    @property
    def is_fp16(self) -> bool:
        """Whether anything computes in FP16, so that the loss must be scaled."""
        rows = [row.recipe.input for row in self.gemms.values()] + [row.format for row in self.tensors.values()]
        return FP16 in rows

    @property
    def has_fp8(self) -> bool:
        """Whether any GEMM or attention core computes in FP8."""
        return any(row.recipe.is_fp8 for row in (*self.gemms.values(), *self.cores.values()))

    def backends(self) -> dict[str, Any]:
        """Return the backend of each GEMM and the machine it was chosen for, as plain values saved with the run."""
        return self._resolver.state()

    def served_by(self, backend: str) -> bool:
        """Return whether any GEMM uses that backend."""
        return any(row.recipe.backend == backend for row in self.gemms.values())

    @property
    def notes(self) -> list[str]:
        """Notes for the user about the choice of backends, one per line."""
        return self._resolver.notes

    @property
    def kernels(self) -> str:
        """Backend of the ops that are not GEMMs: norms with their casts."""
        return self._resolver.kernels

    @property
    def fp8_share(self) -> float:
        """Share of the model's GEMM FLOPs that runs in FP8, without attention's core."""
        return _fp8_shares(self.gemms.values())[0]

    @property
    def blocks_fp8_share(self) -> float:
        """The same for the GEMMs inside blocks, without the head."""
        return _fp8_shares(self.gemms.values())[1]

    def fp8_shares_at(self, sequence_length: int) -> tuple[float, float]:
        """Return `fp8_share` and `blocks_fp8_share` with attention's core counted, at this sequence length."""
        cores = [(row.flops_per_token(sequence_length), row.recipe.is_fp8) for row in self.cores.values()]
        return _fp8_shares(self.gemms.values(), cores)

    def of_blocks(self, layers: Collection[int], last: bool) -> "Plan":
        """Return the rows of these blocks of the main model and of everything outside the blocks. With `last` also the
        rows of MTP; without it the head has width 0."""

        def own(name: str) -> bool:
            kind, _, rest = name.partition(".")
            return int(rest.partition(".")[0]) in layers if kind == "layers" else last or kind != "mtp"

        found = copy.copy(self)
        found.gemms = {name: row for name, row in self.gemms.items() if own(name)}
        found.tensors = {name: row for name, row in self.tensors.items() if own(name)}
        found.cores = {name: row for name, row in self.cores.items() if own(name)}
        if not last:
            found.gemms["lm_head"] = replace(self.gemms["lm_head"], out_features=0, rows_per_token=0)
        return found

    def to_text(self) -> str:
        """Return the plan as a table, with equal rows of consecutive blocks on one line."""
        shares = self.fp8_share, self.blocks_fp8_share
        return plan_text(self.config, self.gemms, self.tensors, self.cores, self.notes, shares)

    def _register(self, name: str) -> None:
        if name in self.gemms or name in self.tensors:
            raise ValueError(f"{name} asked for a row of the precision plan twice; names must be unique")

    def _table(self, op: str, name: str) -> Precision:
        cell: object = self.config.table
        for part in op.split("."):
            cell = getattr(cell, part)
        if not isinstance(cell, Precision):
            most = "fp32, bf16, fp16 or fp8" if op in FP8_OPS else "fp32 or bf16"
            those = "fp32" if op in ("norm", *TRAINER_OPS) else most
            raise UserError(f"precision.table.{op} has no value, and {name} needs one; set it to {those}")
        return cell

    def _decide(self, name: str, op: str) -> tuple[Precision, str]:
        table = self._table(op, name)
        ruled = op in RULED_OPS or (op == "attn.core" and table is Precision.fp8)
        rules = [rule for rule in self._rules if (table is Precision.fp8 if rule.fp8_only else ruled)]
        return _by_rules(name, name, [(rule, rule.precision) for rule in rules]) or (table, "table")

    def _accumulation(self, name: str, blocks: bool = True) -> Accumulation:
        """Return how the products of an FP8 GEMM are summed. blocks: whether it has scales of blocks, if the recipe
        has."""
        decided = _by_rules(name, f"the accumulation of {name}", [(rule, rule.accumulation) for rule in self._rules])
        accumulation = self.config.accumulation if decided is None else decided[0]
        if accumulation is Accumulation.fast and blocks and self.config.scaling.granularity is Granularity.block:
            self._resolver.note(BLOCKS_PROMOTE)
            return Accumulation.fp32
        return accumulation

    def _recipe(self, precision: Precision, output: Format, backend: str, accumulation: Accumulation) -> GemmRecipe:
        """Return the recipe of a kind of GEMM; equal layers share one object."""
        accumulation = accumulation if precision is Precision.fp8 else Accumulation.fp32
        key = precision, output, backend, accumulation
        if key not in self._recipes:
            scaling = te_scaling(self.config.scaling) if backend == TE else self.config.scaling
            if precision is Precision.fp8:
                forward, grad = BY_NAME[scaling.forward.value], BY_NAME[scaling.backward.value]
            else:
                forward = grad = BY_NAME[precision.value]
            narrow = precision is Precision.fp8 and self.config.table.swiglu is Precision.fp8
            kept = E4M3 if narrow else output
            self._recipes[key] = GemmRecipe(forward, grad, forward, output, scaling, backend, accumulation, kept)
        return self._recipes[key]


def _by_rules(name: str, what: str, rules: Iterable[tuple[_Rule, Decision | None]]) -> tuple[Decision, str] | None:
    """Return the decision that rules make for a row, and which rule makes it. UserError if they make two."""
    decided: dict[Decision, str] = {}
    for rule, decision in rules:
        if decision is not None and rule.pattern.fullmatch(name):
            rule.hits += 1
            decided.setdefault(decision, rule.text)
    if len(decided) > 1:
        by = " and ".join(f"{text} ({decision.value})" for decision, text in decided.items())
        raise UserError(f"precision.rules: {what} is decided twice, by {by}; keep one")
    return next(iter(decided.items()), None)


def _module_in_all_blocks(name: str) -> str:
    """Return a glob for the module of a GEMM in all blocks: `layers.1.ffn.down` -> `*.ffn.*`, `mtp.0.proj` -> `*.proj`;
    `layers.1.moe.shared.down` -> `*.moe.*.*`: all experts, but not `layers.1.moe.router`."""
    parts = name.split(".")
    return f"*.{parts[2]}{'.*' * (len(parts) - 3)}" if len(parts) > 2 else name


def _exceptions_with(exceptions: list[RulesException], name: str) -> str:
    """Return the exceptions of a run and one that keeps a GEMM's module in BF16, as the command line takes them."""
    entries = []
    for each in (*exceptions, RulesException(_module_in_all_blocks(name), Precision.bf16)):
        how = [(key, getattr(each, key)) for key in ("precision", "accumulation")]
        entries.append(f'{{match: "{each.match}"' + "".join(f", {k}: {v.value}" for k, v in how if v is not None) + "}")
    return ", ".join(entries)


def _fp8_shares(rows: Iterable[GemmRow], cores: Sequence[tuple[float, bool]] = ()) -> tuple[float, float]:
    """Return the share of FLOPs in FP8, of all and without the head. cores: FLOPs of each, and whether it is in FP8."""
    every = [(row.flops_per_token, row.recipe.is_fp8, row.op == "lm_head") for row in rows]
    every += [(flops, is_fp8, False) for flops, is_fp8 in cores]

    def share(part: list[tuple[float, bool, bool]]) -> float:
        return sum(flops for flops, is_fp8, _ in part if is_fp8) / (sum(flops for flops, *_ in part) or 1.0)

    return share(every), share([each for each in every if not each[2]])


def _not_in_fp8(name: str, op: str, decided_by: str) -> UserError:
    if decided_by == "table":
        return UserError(f"precision.table.{op}=fp8: {name} cannot be in FP8; set it to bf16 or fp32")
    return UserError(f"precision.rules.exceptions: {decided_by} takes {name}, which cannot be in FP8; match less")


def _rules(config: PrecisionConfig, num_layers: int) -> list[_Rule]:
    rules = []
    for key in ("first_blocks", "last_blocks"):
        count = getattr(config.rules, key)
        if not 0 <= count <= num_layers:
            has = f"the model has {counted(num_layers, 'block')}"
            raise UserError(f"precision.rules.{key}={count}: {has}; set 0 to {num_layers}")
        if count:
            blocks = range(count) if key == "first_blocks" else range(num_layers - count, num_layers)
            pattern = rf"layers\.({'|'.join(map(str, blocks))})\..*"
            rules.append(_Rule(f"{key}: {count}", re.compile(pattern), Precision.bf16, fp8_only=True))
    for exception in config.rules.exceptions:
        if not exception.match:
            raise UserError("precision.rules.exceptions: an entry has no match; write {match: GLOB, precision: bf16}")
        pattern = re.compile(fnmatch.translate(exception.match))
        precision = exception.precision
        if precision is None and exception.accumulation is None:
            precision = Precision.bf16
        text = f"match: {exception.match}"
        rules.append(_Rule(text, pattern, precision, fp8_only=False, accumulation=exception.accumulation))
    return rules
