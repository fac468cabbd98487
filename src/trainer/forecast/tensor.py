"""Context and tensor parallelism before a run: what they do not support, and sizes of parts and messages."""

import math
from typing import NamedTuple

from models import ModelConfig
from models.tensor import CUT
from precision import Plan
from precision.config import Precision
from precision.errors import counted, refuse
from precision.rows import GemmRow
from trainer.config import Config, Recompute
from trainer.forecast.plan_cache import cached_per_plan
from trainer.parallel.mesh import Degrees, divisor_near

READ = ("attn.q", "attn.q_b", "attn.kv_b")  # what the tensor group gathers
WIDTH = 16  # elements that an FP8 GEMM reads at a time
_IN_FP8 = f"for a head in FP8 not a multiple of {WIDTH}"


def parts(row: GemmRow, degrees: Degrees) -> int:
    """Return the number of ranks over which a weight's experts, columns or rows are spread for computing."""
    if row.op == "moe.experts":
        return degrees.expert
    return degrees.tensor if row.op in CUT else 1


def cut_parameters(plan: Plan, model: ModelConfig) -> float:
    """Return the number of parameters that `parallel.tensor` cuts."""
    return _widths(plan).cut + model.vocab_size * model.hidden_size


def kept_bytes(config: Config, plan: Plan, degrees: Degrees) -> float:
    """Return the bytes of activations, per token of its own, that a rank of a tensor group keeps for other ranks'
    positions: the inputs of its heads. With recomputation, of one block."""
    blocks = 1 if config.recompute is Recompute.none else config.model.num_layers + config.model.num_mtp_layers
    return (degrees.tensor - 1.0) * _widths(plan).kept / blocks


def gathered_bytes(plan: Plan, degrees: Degrees, hidden_size: int) -> float:
    """Return the bytes, per own token, of the largest message of a tensor group and its FP32 gradient: the input of q
    or of the head."""
    width = max(hidden_size, *(row.in_features for row in plan.gemms.values() if row.op in READ))
    return degrees.tensor * width * (plan.tensors["residual"].format.bytes + 4.0)


def tensor_bytes(plan: Plan, degrees: Degrees, forwards: int) -> tuple[float, float]:
    """Return the bytes that a rank of a tensor group sends per own token in `forwards` forward passes and a backward
    pass: those that overlap with GEMMs (inputs of queries, keys and values, and their gradient), and those waited for
    (around o)."""
    of, others = _widths(plan), degrees.tensor - 1.0
    return others * (forwards * 2 + 4) * of.reads, others * (forwards * 2 + 2) * of.made


class _Widths(NamedTuple):
    """Sums over all blocks: parameters that are cut; per token, bytes kept of the inputs of READ, and the widths of the
    inputs of queries, keys and values, and of the outputs of o."""

    cut: float
    kept: float
    reads: int
    made: int


@cached_per_plan
def _widths(plan: Plan) -> _Widths:
    rows = list(plan.gemms.values())
    return _Widths(
        cut=float(sum(row.num_weights for row in rows if row.op in CUT)),
        kept=sum(row.in_features * row.recipe.input.bytes for row in rows if row.op in READ),
        reads=sum(row.in_features for row in rows if row.op in ("attn.q", "attn.q_b"))
        + sum(row.out_features for row in rows if row.op == "attn.kv_a"),
        made=sum(row.out_features for row in rows if row.op == "attn.o"),
    )


def check_context(config: Config, degrees: Degrees) -> None:
    """Raise UserError, naming key, value and fix, if the config does not support `degrees.context` ranks."""
    lengths = {"model.num_heads": config.model.num_heads, "trainer.sequence_length": config.trainer.sequence_length}
    for key, value in lengths.items():
        if value % degrees.context:
            fits = math.gcd(*lengths.values())
            fix = divisor_near(degrees.context, math.gcd(fits, degrees.stage))
            why = f"it does not divide {key}={value}"
            refuse("parallel.context", degrees.context, why, f"set {fix}")


def check_tensor(config: Config, degrees: Degrees) -> None:
    """Raise UserError, naming key, value and fix, if the config does not support `degrees.tensor` ranks."""
    t = degrees.tensor
    if (why := _why_not(config, degrees, t)) is not None:
        left = degrees.stage // degrees.context
        fits = next(n for n in range(t - 1, 0, -1) if not left % n and _why_not(config, degrees, n) is None)
        narrow = ", or precision.table.lm_head=bf16" if why.endswith(_IN_FP8) else ""
        refuse("parallel.tensor", t, why, f"set {fits}{narrow}")
    if t > 1 and config.health.shadow_every:
        why, fix = f"it does not support parallel.tensor={t}", "set health.shadow_every=0, or parallel.tensor=1"
        refuse("health.shadow_every", config.health.shadow_every, why, fix)


def _why_not(config: Config, degrees: Degrees, t: int) -> str | None:
    """Return why `t` ranks cannot share the heads and words of a model, None if they can."""
    m = config.model
    if t == 1:
        return None
    together = degrees.context * t
    for key, value, ranks in (
        ("model.num_heads", m.num_heads, together),
        ("trainer.sequence_length", config.trainer.sequence_length, together),
        ("model.vocab_size", m.vocab_size, t),
    ):
        if value % ranks:
            by = f" as {ranks} ranks with parallel.context={degrees.context}" if ranks != t else ""
            return f"it does not divide {key}={value}{by}"
    heads = m.num_heads // t
    widths = {
        "qk_nope_head_dim + model.qk_rope_head_dim": m.qk_nope_head_dim + m.qk_rope_head_dim,
        "qk_nope_head_dim + model.v_head_dim": m.qk_nope_head_dim + m.v_head_dim,
        "v_head_dim": m.v_head_dim,
    }
    for key, width in widths.items():
        if heads * width % WIDTH:
            return f"a rank has {counted(heads, 'head')} of model.{key}={width}, not a multiple of {WIDTH} features"
    if config.precision.table.lm_head is Precision.fp8 and m.vocab_size // t % WIDTH:
        return f"a rank has {m.vocab_size // t} words of model.vocab_size, {_IN_FP8}"
    return None
