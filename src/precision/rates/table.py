"""The table behind `precision.backend=auto` and `precision.never_slower`: one YAML file per GPU, in this folder.

    gpu: NVIDIA H200                 the name that torch.cuda.get_device_name() gives
    measured:                        what measured the entries of a kind, and at which commit; only: these times
      - {kind: linear, commit: 1234567, command: python scripts/bench/linear.py --table}
    entries:
      - {kind: linear, scaling: delayed/tensor, accumulation: fp32, shape: [N, K, groups], rows: R, ms: {bf16: a, ...}}

| key | what |
| --- | --- |
| `kind` | linear (one weight), grouped (one a group of rows) or core (attention, causal) |
| `scaling` | method/granularity of `precision.scaling`: delayed/tensor, current/tensor, current/row, current/block |
| `accumulation` | fp32 or fast, as `precision.accumulation` has it |
| `shape` | out features, in features, groups (1 for a linear); head sizes of values and queries, 1 |
| `rows` | rows of x in one call: tokens of a microbatch; for experts tokens times the number chosen; positions |
| `ms` | milliseconds of one forward and backward, casts counted in, by what ran: `bf16`, `cuda`, `transformer_engine` |

Transformer Engine's linears are excluded. Alone they are as fast as `cuda` (5 % faster in blocks, slower where they are
small). But a model that contains one is not compiled, and its norms and activations cannot write FP8 for it.

Only entries of the same kind and scaling are compared, and of the same accumulation if there are any. An unmeasured
shape uses the nearest measured one: the least sum of |log ratio| over out features, in features, groups and rows (rows
only where they are known). The first of equals wins.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from precision.errors import UserError

FOLDER = Path(__file__).parent
KINDS = ("linear", "grouped", "core")
SCALINGS = ("delayed/tensor", "current/tensor", "current/row", "current/block")
ACCUMULATIONS = ("fp32", "fast")
RUNS = ("bf16", "cuda", "transformer_engine")


@dataclass(frozen=True)
class Entry:
    """One measured GEMM layer; see the module docstring. ms: milliseconds by backend."""

    kind: str
    scaling: str
    accumulation: str
    shape: tuple[int, int, int]
    rows: int
    ms: Mapping[str, float]

    def __post_init__(self) -> None:
        for key, value, known in (
            ("kind", self.kind, KINDS),
            ("scaling", self.scaling, SCALINGS),
            ("accumulation", self.accumulation, ACCUMULATIONS),
        ):
            if value not in known:
                raise UserError(f"{key}={value}: no {key} of the rate table; use {', '.join(known)}")
        if len(self.shape) != 3 or min(*self.shape, self.rows) < 1:
            raise UserError(f"shape={list(self.shape)}, rows={self.rows}: want [N, K, groups] and rows, 1 or more")
        unknown = sorted(set(self.ms) - set(RUNS))
        if unknown or not self.ms:
            raise UserError(f"ms={dict(self.ms)}: want milliseconds of {', '.join(RUNS)}, of one at least")
        if not all(0 < value < math.inf for value in self.ms.values()):
            raise UserError(f"ms={dict(self.ms)}: a time is a number above 0")

    def distance(self, shape: tuple[int, int, int], rows: int | None) -> float:
        """Return the distance of a shape from this one; 0: the same. rows None: not compared."""
        pairs = [*zip(self.shape, shape, strict=True), *([(self.rows, rows)] if rows is not None else [])]
        return sum(abs(math.log(a / b)) for a, b in pairs)


class RateTable:
    """The entries of one GPU."""

    def __init__(self, entries: Collection[Entry]):
        self._entries = list(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def runs(self) -> set[str]:
        """Everything that was measured: some of bf16, cuda, transformer_engine."""
        return {run for entry in self._entries for run in entry.ms}

    def beats(self, run: str, other: str) -> bool:
        """Return whether `run` was faster than `other`, or measured alone, in any entry."""
        return any(run in entry.ms and entry.ms[run] < entry.ms.get(other, math.inf) for entry in self._entries)

    def nearest(
        self,
        kind: str,
        scaling: str,
        accumulation: str,
        shape: tuple[int, int, int],
        rows: int | None,
        runs: Collection[str],
    ) -> Entry | None:
        """Return the nearest entry of that kind and scaling that has a time for one of `runs`, and of that accumulation
        if there is one; None if there is none."""
        same = [
            entry
            for entry in self._entries
            if (entry.kind, entry.scaling) == (kind, scaling) and any(run in entry.ms for run in runs)
        ]
        same = [entry for entry in same if entry.accumulation == accumulation] or same
        return min(same, key=lambda entry: entry.distance(shape, rows), default=None)


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where PyYAML has it: ten times as fast


@cache
def load_rates(gpu: str, folder: Path = FOLDER) -> RateTable:
    """Return the table of a GPU by its name, without entries if it was not measured. UserError for an invalid file."""
    for path in sorted(folder.glob("*.yaml")):
        content = yaml.load(path.read_text(), _Loader)
        if content.get("gpu") == gpu:
            return RateTable([_entry(raw, path) for raw in content["entries"]])
    return RateTable([])


def record(
    kind: str, scaling: str, accumulation: str, shape: tuple[int, int, int], rows: int, ms: Mapping[str, float]
) -> str:
    """Return the line of a measurement, for `entries`. Times have four digits. UserError if it is invalid."""
    times = {run: float(f"{ms[run]:.4g}") for run in sorted(ms, key=lambda run: RUNS.index(run) if run in RUNS else 99)}
    entry = Entry(kind, scaling, accumulation, (shape[0], shape[1], shape[2]), rows, times)
    words = ", ".join(f"{run}: {value}" for run, value in entry.ms.items())
    n, k, groups = entry.shape
    head = f"kind: {kind}, scaling: {scaling}, accumulation: {accumulation}"
    return f"  - {{{head}, shape: [{n}, {k}, {groups}], rows: {rows}, ms: {{{words}}}}}"


def _entry(raw: dict, path: Path) -> Entry:
    try:
        return Entry(raw["kind"], raw["scaling"], raw["accumulation"], tuple(raw["shape"]), raw["rows"], raw["ms"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path.name}: {raw}: {error}; correct the entry") from error
