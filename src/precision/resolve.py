"""The choice of a backend for each row of the plan, and of BF16 where FP8 is slower.

    `precision.backend`   BF16 and FP8 rows                                          FP32 and FP16 rows
    reference             reference                                                  reference
    cuda                  cuda; refused off sm_90, or where its kernels are wrong     reference; FP16 refused
    transformer_engine    transformer_engine; refused where it is missing            reference; FP16 refused
    auto                  the fastest that can serve here, by the measured rates     reference

Without measured rates for this GPU or kind of op, `auto` keeps the recipe and uses cuda on sm_90, Transformer Engine on
newer GPUs where it is installed, else reference; the plan has a note about it. BF16 rows use that same default: the
rates compare FP8. Transformer Engine's modules return BF16, so rows with another result (the router's FP32) stay with
reference.

`precision.never_slower`: where the best FP8 backend was measured to be slower than BF16, the row stays in BF16.

Where the self-test found the products of linears or of experts wrong (`precision.proof`), `auto` assigns these rows to
reference, with a note, and `cuda` refuses them. The same holds for BF16 experts whose features are not multiples of 8.

The choice is saved with the run (`saved`) and used again on resume, as long as GPU and settings are the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precision.backends.availability import cuda_problem, te_problem, te_scaling, wrong_kernels
from precision.config import Accumulation, BackendChoice, Granularity, Precision, PrecisionConfig
from precision.errors import UserError
from precision.formats import BF16, Format
from precision.hardware import HOPPER, Gpu
from precision.proof import EXPERTS, FP8_ATTENTION, GEMMS
from precision.rates import Entry, RateTable, load_rates
from precision.rows import CUDA, REFERENCE, TE

HEAD = "lm_head"
NEVER_SLOWER = "never_slower"
GROUPED_MULTIPLE = 8  # BF16 numbers in 16 bytes
WIDEST_HEAD = 256
FAR = math.log(8.0)  # log distance beyond which a measured shape is a poor estimate
FAR_NOTE = "is judged by the measurement of a distant shape"
CORE_IN_FP32 = "accumulation=fast has no effect on attn.core with backend=reference: its sums are in FP32"
ROUNDED = "and all others of its kind: the cuda backend's kernels round results to BF16 before they are FP32"


@dataclass(frozen=True)
class Gemm:
    """The properties of a GEMM that its backend depends on. groups: 1 for a linear. rows None: the tokens of a call are
    not known. accumulation: of its products, if it runs in FP8. is_core: an attention core; its features
    are the head sizes of values and of queries."""

    name: str
    out_features: int
    in_features: int
    groups: int
    rows: int | None
    output: Format
    accumulation: Accumulation = Accumulation.fp32
    is_core: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether it is of experts, of which there may be one."""
        return self.groups > 1 or ".experts." in self.name

    @property
    def kind(self) -> str:
        """Its kind in the rate table."""
        return "core" if self.is_core else "grouped" if self.is_grouped else "linear"


@dataclass(frozen=True)
class Choice:
    """A resolved row. precision may be lower than requested (never_slower); why: the reason, else None."""

    precision: Precision
    backend: str
    why: str | None = None


class Resolver:
    """Chooses backends for one model on one machine. UserError at once if the configured backend cannot serve here.

    tokens: of a microbatch. saved: `state()` from the run's start. notes: for the user, one per line.
    """

    def __init__(
        self,
        config: PrecisionConfig,
        gpu: Gpu | None,
        tokens: int | None = None,
        saved: Mapping[str, Any] | None = None,
        rates: RateTable | None = None,
    ):
        self._config, self._gpu, self.tokens = config, gpu, tokens
        self.notes: list[str] = []
        self._rows: dict[str, tuple[Choice, Accumulation]] = {}
        if config.never_slower and config.backend is BackendChoice.reference:
            raise UserError(
                "precision.never_slower=true: backend=reference is for checking and has no measured speed; "
                "set precision.never_slower=false or precision.backend=auto"
            )
        self._scaling = f"{config.scaling.method.value}/{config.scaling.granularity.value}"
        self._rates = rates if rates is not None else load_rates(gpu.name) if gpu is not None else RateTable([])
        self._candidates, self._default = self._auto() if config.backend is BackendChoice.auto else self._fixed()
        self._saved = self._usable(saved)

    def _fixed(self) -> tuple[list[str], str]:
        """Return the one backend that the config names."""
        name = self._config.backend.value
        problem = cuda_problem(self._gpu) if name == CUDA else None
        if name == TE:
            problem = self._te_problem()
        if problem is not None:
            raise UserError(f"precision.backend={name}: {problem}; or set precision.backend=auto or reference")
        return [] if name == REFERENCE else [name], name

    def _auto(self) -> tuple[list[str], str]:
        """Return the backends worth considering here, and the one to use without measured rates."""
        if cuda_problem(self._gpu) is None:
            able = [CUDA]
            # asked first: importing Transformer Engine takes seconds
            if self._rates.beats(TE, CUDA) and te_problem(self._gpu, self._config.scaling) is None:
                able.append(TE)
            return able, CUDA
        newer = self._gpu is not None and self._gpu.capability > HOPPER
        measured = newer or TE in self._rates.runs
        able = [TE] if measured and self._te_problem() is None else []
        return able, TE if able and newer else REFERENCE

    def _te_problem(self) -> str | None:
        """Return why Transformer Engine cannot serve this scaling, or None."""
        asked = te_scaling(self._config.scaling)
        problem = te_problem(self._gpu, asked)
        if problem is None and asked != self._config.scaling:
            self.notes.append("Transformer Engine has no scales per row: it scales per tensor here")
        return problem

    def choose(self, gemm: Gemm, precision: Precision) -> Choice:
        """Return the backend of a row that the table and its rules put in `precision`."""
        if precision is Precision.fp16 and self._config.backend not in (BackendChoice.auto, BackendChoice.reference):
            name = self._config.backend.value
            raise UserError(
                f"precision.backend={name}: {gemm.name} is in FP16, for which it has no kernels; "
                "set precision.backend=auto or reference"
            )
        if precision in (Precision.fp32, Precision.fp16):
            choice = Choice(precision, REFERENCE)
        elif precision is Precision.bf16:
            choice = Choice(precision, self._bf16(gemm))
        else:
            choice = self._again(gemm) or self._fp8(gemm)
        in_blocks = choice.precision is Precision.fp8 and self._scaling.endswith(Granularity.block.value)
        rounds = choice.backend == CUDA and gemm.output is not BF16 and (gemm.is_grouped or in_blocks)
        if rounds and not any(ROUNDED in note for note in self.notes):
            self.notes.append(f"{gemm.name} {ROUNDED}")
        self._rows[gemm.name] = choice, gemm.accumulation
        return choice

    def choose_core(self, core: Gemm) -> Choice:
        """Return precision and backend of an attention core that the table puts in FP8. Without kernels on a Hopper GPU
        it stays in BF16; elsewhere reference emulates it."""
        problem = wrong_kernels(FP8_ATTENTION)
        if max(core.in_features, core.out_features) > WIDEST_HEAD:
            problem = f"its kernels support heads up to {WIDEST_HEAD} wide"
        if self.kernels == REFERENCE:
            choice = Choice(Precision.fp8, REFERENCE)
            if core.accumulation is Accumulation.fast:
                self.note(CORE_IN_FP32)
        elif problem is not None:
            choice = Choice(Precision.bf16, REFERENCE, "no FP8 kernel")
            self.note(f"attn.core stays in BF16: {problem}; precision.backend=reference emulates it in FP8")
        elif self._config.never_slower:
            choice = self._again(core) or self._fp8(core)
        else:
            choice = Choice(Precision.fp8, CUDA)
        self._rows[core.name] = choice, core.accumulation
        return choice

    @property
    def kernels(self) -> str:
        """Backend of ops that are not GEMMs: cuda where it serves GEMMs by default, else reference."""
        return CUDA if self._default == CUDA else REFERENCE

    def state(self) -> dict[str, Any]:
        """Return the choices and their conditions as plain values, for a file of the run."""
        rows = {
            name: {
                "precision": choice.precision.value,
                "backend": choice.backend,
                "accumulation": accumulation.value,
                "why": choice.why,
            }
            for name, (choice, accumulation) in self._rows.items()
        }
        return {**self._conditions(), "rows": rows}

    def _conditions(self) -> dict[str, Any]:
        return {
            "gpu": None if self._gpu is None else self._gpu.name,
            "backend": self._config.backend.value,
            NEVER_SLOWER: self._config.never_slower,
            "scaling": self._scaling,
        }

    def _usable(self, saved: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return the rows of an earlier start of this run; none if the machine or the settings differ."""
        if saved is None:
            return {}
        now = self._conditions()
        same = all(saved.get(key) == value for key, value in now.items())
        if self._config.backend is BackendChoice.auto and saved.get("gpu") != now["gpu"]:
            was, here = saved.get("gpu") or "a CPU", now["gpu"] or "a CPU"
            self.notes.append(f"backends are chosen again: the run was planned on {was}, this is {here}")
        return saved.get("rows", {}) if same else {}

    def _again(self, gemm: Gemm) -> Choice | None:
        """Return the choice of the run's start, if it is still valid."""
        row = self._saved.get(gemm.name)
        if row is None or row["backend"] not in (REFERENCE, *self._candidates):
            return None
        if CUDA in self._candidates and row["backend"] == REFERENCE:
            return None  # its kernels were wrong then: they may be right now
        if self._served(row["backend"], gemm) != row["backend"]:
            return None
        if row.get("accumulation") != gemm.accumulation.value:
            return None  # other rates apply
        precision, why = Precision(row["precision"]), row["why"]
        if precision is not Precision.fp8 and not str(why).startswith(NEVER_SLOWER):
            return None  # the table was different then
        return Choice(precision, row["backend"], why)

    def _fp8(self, gemm: Gemm) -> Choice:
        rated = self._config.never_slower or (self._config.backend is BackendChoice.auto and self._gpu is not None)
        if not rated:
            return Choice(Precision.fp8, self._served(self._default, gemm))
        candidates = [name for name in self._candidates if self._served(name, gemm) == name]
        if self._candidates and not candidates:  # no candidate is correct here
            return Choice(Precision.fp8, REFERENCE)
        kind = gemm.kind
        shape = (gemm.out_features, gemm.in_features, gemm.groups)
        entry = self._rates.nearest(kind, self._scaling, gemm.accumulation.value, shape, gemm.rows, candidates)
        if entry is None:
            where = "a CPU" if self._gpu is None else self._gpu.name
            note = f"no measured rates of {kind} GEMMs with {self._scaling} on {where}: FP8 rows keep their recipe, "
            note += f"served by {self._default}"
            self.note(note + "; precision.never_slower has no effect on them" * self._config.never_slower)
            return Choice(Precision.fp8, self._served(self._default, gemm))
        if entry.accumulation != gemm.accumulation.value:
            assert self._gpu is not None
            self.note(
                f"no measured rates of {kind} GEMMs with {self._scaling} and accumulation={gemm.accumulation.value} on "
                f"{self._gpu.name}: those with {entry.accumulation} are used instead"
            )
        best = min((name for name in candidates if name in entry.ms), key=lambda name: entry.ms[name])
        gain = entry.ms["bf16"] / entry.ms[best] if "bf16" in entry.ms else None
        if self._config.never_slower and entry.distance(shape, gemm.rows) > FAR:
            self._note_far(gemm, entry)
        if self._config.never_slower and gain is not None and gain < 1:
            return Choice(Precision.bf16, self._bf16(gemm), f"{NEVER_SLOWER}: {gain:.2f}x")
        return Choice(Precision.fp8, best)

    def _bf16(self, gemm: Gemm) -> str:
        """Return the backend of a row in BF16. The head does not use Transformer Engine: it processes tokens in
        chunks."""
        return REFERENCE if self._default == TE and gemm.name == HEAD else self._served(self._default, gemm)

    def _served(self, backend: str, gemm: Gemm) -> str:
        """Return the backend that serves the row if `backend` is preferred."""
        op, problem = EXPERTS if gemm.is_grouped else GEMMS, None
        if backend == CUDA and not gemm.is_core:  # `choose_core` has asked for its kernels
            problem = wrong_kernels(op) or (_narrow_rows(gemm) if gemm.is_grouped else None)
        if problem is not None:
            if self._config.backend is not BackendChoice.auto:
                raise UserError(f"precision.backend=cuda: {problem}; set precision.backend=auto or reference")
            self.note(f"{op} are served by reference instead of cuda: {problem}")
            return REFERENCE
        return REFERENCE if backend == TE and gemm.output is not BF16 else backend

    def _note_far(self, gemm: Gemm, entry: Entry) -> None:
        """Add a note about a distant measured shape, once."""
        if any(FAR_NOTE in note for note in self.notes):
            return
        rows = "" if gemm.rows is None else f", {gemm.rows} rows"
        (n, k, _), theirs = entry.shape, f", {entry.rows} rows" if rows else ""
        self.notes.append(
            f"precision.never_slower: {gemm.name} ({gemm.out_features} x {gemm.in_features}{rows}) {FAR_NOTE} "
            f"({n} x {k}{theirs}), and others may be, too: measure them with scripts/bench/linear.py --table"
        )

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def _narrow_rows(gemm: Gemm) -> str | None:
    """Return why torch's grouped product in BF16 cannot compute this GEMM, or None. (In FP8 features are multiples of
    16.)"""
    if not (gemm.in_features % GROUPED_MULTIPLE or gemm.out_features % GROUPED_MULTIPLE):
        return None
    shape = f"{gemm.in_features} -> {gemm.out_features}"
    return f"torch's grouped product in BF16 needs features in multiples of {GROUPED_MULTIPLE}, and a GEMM has {shape}"
