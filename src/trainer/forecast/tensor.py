"""Ranks that share sequences, ahead of a run: what does not go with context and tensor parallelism, and what the latter
cuts, keeps and sends."""

import math
from typing import NamedTuple, NoReturn

from models.tensor import CUT
from precision import Plan
from precision.errors import UserError
from precision.rows import GemmRow
from trainer.config import Config, Recompute
from trainer.forecast.once import once
from trainer.parallel.mesh import Degrees

READ = ("attn.q", "attn.q_b", "attn.kv_b")  # what the tensor group gathers
WIDTH = 16  # numbers: what a GEMM in FP8 reads at a time


def parts(row: GemmRow, degrees: Degrees) -> int:
    """Ranks that a weight's columns or rows are cut over by `parallel.tensor`."""
    return degrees.tensor if row.op in CUT else 1


def cut_parameters(plan: Plan) -> float:
    """Parameters that `parallel.tensor` cuts, without the embedding."""
    return _widths(plan).cut


def kept_bytes(config: Config, plan: Plan, degrees: Degrees) -> float:
    """Activations that a rank of a tensor group keeps besides those of its own positions, a token of its own: what its
    heads read of the others'. A block's, where they are computed again."""
    blocks = 1 if config.recompute is Recompute.none else config.model.num_layers + config.model.num_mtp_layers
    return (degrees.tensor - 1.0) * _widths(plan).kept / blocks


def gathered_bytes(plan: Plan, degrees: Degrees, hidden_size: int) -> float:
    """The largest message of a tensor group a token of its own, and its gradient in FP32: what q or the head reads."""
    width = max(hidden_size, *(row.in_features for row in plan.gemms.values() if row.op in READ))
    return degrees.tensor * width * (plan.tensors["residual"].format.bytes + 4.0)


def tensor_bytes(plan: Plan, degrees: Degrees, forwards: int) -> tuple[float, float]:
    """What a rank of a tensor group sends for a token of its own, in so many forward passes and a backward pass: beside
    GEMMs (what queries, keys and values read, and its gradient), and what is waited for (around o)."""
    of, others = _widths(plan), degrees.tensor - 1.0
    return others * (forwards * 2 + 4) * of.reads, others * (forwards * 2 + 2) * of.made


class _Widths(NamedTuple):
    """Over all blocks: parameters that are cut, bytes of a token that READ keeps, numbers of a token that queries, keys
    and values read, and that o makes."""

    cut: float
    kept: float
    reads: int
    made: int


@once
def _widths(plan: Plan) -> _Widths:
    rows = list(plan.gemms.values())
    return _Widths(
        cut=float(sum(row.in_features * row.out_features for row in rows if row.op in CUT)),
        kept=sum(row.in_features * row.recipe.input.bytes for row in rows if row.op in READ),
        reads=sum(row.in_features for row in rows if row.op in ("attn.q", "attn.q_b"))
        + sum(row.out_features for row in rows if row.op == "attn.kv_a"),
        made=sum(row.out_features for row in rows if row.op == "attn.o"),
    )


def check_context(config: Config, degrees: Degrees) -> None:
    """UserError, naming key, value and fix, for what does not go with `degrees.context` ranks."""
    lengths = {"model.num_heads": config.model.num_heads, "trainer.sequence_length": config.trainer.sequence_length}
    for key, value in lengths.items():
        if value % degrees.context:
            fits = math.gcd(*lengths.values())
            fix = f"set {next(n for n in range(degrees.context, 0, -1) if fits % n == 0)}, or another divisor"
            _refuse("parallel.context", degrees.context, f"it does not divide {key}={value}", fix)


def check_tensor(config: Config, degrees: Degrees) -> None:
    """UserError, naming key, value and fix, for what does not go with `degrees.tensor` ranks."""
    t, m = degrees.tensor, config.model
    if t == 1:
        return
    off = "set parallel.tensor=1"
    together = degrees.sequence
    fix = "set a divisor" if degrees.context == 1 else f"with parallel.context={degrees.context}; lower one of them"
    for key, value, ranks in (
        ("model.num_heads", m.num_heads, together),
        ("trainer.sequence_length", config.trainer.sequence_length, together),
        ("model.vocab_size", m.vocab_size, t),
    ):
        if value % ranks:
            by = "" if ranks == t else f" as {ranks} ranks"
            _refuse("parallel.tensor", t, f"it does not divide {key}={value}{by}", fix)
    heads = m.num_heads // t
    widths = {
        "qk_nope_head_dim + model.qk_rope_head_dim": m.qk_nope_head_dim + m.qk_rope_head_dim,
        "v_head_dim": m.v_head_dim,
    }
    for key, width in widths.items():
        if heads * width % WIDTH:
            why = f"a rank's {heads} heads of model.{key}={width} are no multiple of {WIDTH} features"
            _refuse("parallel.tensor", t, why, f"set a smaller divisor, or {off.removeprefix('set ')}")
    if config.health.shadow_every:
        why = f"its passes know no parallel.tensor={t}"
        _refuse("health.shadow_every", config.health.shadow_every, why, f"set health.shadow_every=0, or {off}")


def _refuse(key: str, value: object, why: str, fix: str) -> NoReturn:
    raise UserError(f"{key}={value}: {why}; {fix}")
