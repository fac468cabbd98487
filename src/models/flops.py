"""The size of a model and its cost per token: parameters, FLOPs, and the bytes that a forward pass saves for backward.

Training FLOPs of a token = 6 * active parameters + 3 * blocks * heads * (d_qk + d_v) * S

A parameter that multiplies a token costs 2 FLOPs forward and 4 backward. Active parameters are the chosen experts and
everything else except the embedding table (a lookup); MTP's blocks, projections and further uses of the head count. The
second term is attention's core: 2 S d FLOPs forward for each of QK^T and PV, halved by the causal mask, times 3 for
backward. Recomputation never counts.

Everything here follows from the config alone, in closed form; the tests compare it with the model that is built.
"""

from dataclasses import dataclass
from math import comb
from typing import NamedTuple

from models.config import Activation, ModelConfig, NormPosition
from models.layers import first_gemm
from models.slots import room
from precision import Plan
from precision.ffn import is_fused
from precision.head import is_chunked
from precision.permutation import rows_in_tiles


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model. `active`: those that multiply one token, with the head, without the embedding table."""

    main: int
    main_active: int
    mtp: int
    mtp_active: int
    embedding: int

    @property
    def total(self) -> int:
        """All trained parameters."""
        return self.main + self.mtp

    @property
    def active(self) -> int:
        """Active parameters of the main model and MTP; the head, which MTP uses again, counts once."""
        return self.main_active + self.mtp_active


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Return the exact numbers for the model that `DeepSeek(config)` builds."""
    c, D = config, config.hidden_size
    matrices, trained = 3 if c.activation is Activation.swiglu else 2, 2 * (c.activation is Activation.xielu)
    expert = matrices * D * c.moe_intermediate_size + trained
    attention = _attention(c) + 2 * D
    dense_block = attention + matrices * D * c.intermediate_size + trained
    moe_block = attention + c.num_experts * D + c.num_shared_experts * (expert - trained) + trained
    moe_block += c.num_experts * expert
    idle = (c.num_experts - c.num_experts_per_token) * expert
    num_moe = c.num_layers - c.num_dense_layers
    table = c.vocab_size * D
    pre = c.norm_position is NormPosition.pre
    main = 2 * table + D * pre + c.num_dense_layers * dense_block + num_moe * moe_block
    mtp_block = moe_block + 2 * D * D + (3 * D if pre else D)
    return ParameterCount(
        main=main,
        main_active=main - table - num_moe * idle,
        mtp=c.num_mtp_layers * mtp_block,
        mtp_active=c.num_mtp_layers * (mtp_block - idle),
        embedding=table,
    )


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Return the FLOPs of training on one token, forward and backward."""
    count = count_parameters(config)
    active = count.active + config.num_mtp_layers * config.vocab_size * config.hidden_size
    blocks = config.num_layers + config.num_mtp_layers
    core = 3.0 * blocks * config.num_heads * (config.qk_head_dim + config.v_head_dim) * sequence_length
    return 6.0 * active + core


def kept_bytes_per_token(
    config: ModelConfig,
    plan: Plan,
    selective: bool = False,
    spread: int = 1,
    tokens: int | None = None,
    capacity: float | None = None,
) -> dict[str, float]:
    """Return the bytes that one token's forward pass saves for backward, by category.

    Categories: gemm: inputs of the GEMMs, in the plan's saved format. norm: inputs of the norms. attention: q, k, v and
    result of the core. swiglu: the activation's input. head: the gradient of its input, or of its logits if it is not
    computed in chunks. Not counted: indices and row statistics, a few bytes each, and `head_gradient_bytes`.

    plan: the model's. selective: attention saves only its sublayer's input (its norm's) and the core's result, and no
    rows of BF16 experts; the rest is recomputed. spread: number of processes that share the experts (`arriving`).
    tokens: in a process's microbatch, to count the padding of experts' rows to tiles where kernels save them; None: not
    counted. capacity: of slots that tokens travel in (`models.slots`); None: there are as many rows as arrive.
    """
    c, head = config, plan.gemms["lm_head"]
    stream = plan.tensors["residual"].format.bytes
    gemm, swiglu = _kept_by_gemms(c, plan, selective, spread, _expert_rows(c, spread, tokens, capacity))
    norms = [n for n, row in plan.tensors.items() if row.op == "norm" and not (selective and ".attn." in n)]
    cores = [n for n, row in plan.tensors.items() if row.op == "attn.core"]
    return {
        "gemm": gemm,
        "norm": sum(_norm_width(c, plan, name) for name in norms) * stream,
        "attention": sum(_kept_by_core(c, plan, name, selective) for name in cores),
        "swiglu": swiglu,
        "head": (head.in_features if is_chunked(head.recipe) else head.out_features) * head.rows_per_token * stream,
    }


class _ExpertRows(NamedTuple):
    """Rows of the experts, per token: those that arrive at a process, and those that its experts compute, in tiles."""

    arrive: float
    computed: float


def _expert_rows(c: ModelConfig, spread: int, tokens: int | None, capacity: float | None) -> _ExpertRows:
    arrive, choices = arriving(c, spread), float(c.num_experts_per_token)
    if capacity is not None and spread > 1:
        many = tokens or 2**20
        slots, room_for = room(capacity, many, c.num_experts_per_token, spread, c.num_experts // spread)
        arrive, choices = spread * slots / many, room_for / many
    return _ExpertRows(arrive, choices + (rows_in_tiles(0, c.num_experts // spread) / tokens if tokens else 0.0))


def _kept_by_gemms(
    c: ModelConfig, plan: Plan, selective: bool, spread: int, experts: _ExpertRows
) -> tuple[float, float]:
    """Return the bytes of the GEMMs' inputs, each saved once, and of the activations' inputs."""
    inputs, activations, gemms = 0.0, 0.0, plan.gemms
    first, _ = first_gemm(c.activation, 0)
    same_input = {"attn.kv_a": ("attn.q", "attn.q_a"), "moe.router": (f"moe.shared.{first}",)}
    for name, row in gemms.items():
        if row.op == "lm_head" and is_chunked(row.recipe):
            continue
        ffn, _, kind = name.rpartition(".")
        fused = kind in ("gate_up", "down") and c.activation is Activation.swiglu
        fused = fused and is_fused(gemms[f"{ffn}.gate_up"].recipe, gemms[f"{ffn}.down"].recipe)
        if fused and kind == "down":
            continue  # its input is recomputed
        others = [gemms.get(name.removesuffix(row.op) + other) for other in same_input.get(row.op, ())]
        if f"{name}_norm" in plan.tensors:  # the router's, with its own input
            others = []
        in_tiles = rows = experts.computed if fused and row.op == "moe.experts" else row.rows_per_token
        if fused and row.op == "moe.experts" and (selective or row.recipe.is_fp8):  # rows are gathered again
            layer = ffn.removesuffix("experts")
            rows = experts.arrive
            if spread == 1 and plan.tensors[f"{layer}dispatch"].format.is_fp8 == row.recipe.is_fp8:
                shares = [f"{layer}router", f"{layer}shared.{first}"]
                others = [gemms[other] for other in shares if f"{other}_norm" not in plan.tensors]
        again = selective and row.op.startswith("attn.")
        if not again and not any(other and other.recipe.saved is row.recipe.saved for other in others):  # saved once
            inputs += row.in_features * rows * row.recipe.saved.bytes
        if kind == first:
            narrow = c.activation is Activation.swiglu and row.recipe.swiglu.is_fp8
            width = 1 + 4 / 128 if narrow else row.recipe.output.bytes  # a scale for each 128
            activations += row.out_features * in_tiles * width
    return inputs, activations


def _norm_width(c: ModelConfig, plan: Plan, name: str) -> int:
    """Return the elements that a norm saves of a token."""
    match name.rpartition(".")[2]:
        case "q_norm":
            return c.q_lora_rank or 0
        case "kv_norm":
            return c.kv_lora_rank + c.qk_rope_head_dim
        case "q_head_norm" | "k_head_norm":
            return c.num_heads * c.qk_head_dim
        case "router_norm":  # the shared experts' input, where that is saved unquantised
            first, _ = first_gemm(c.activation, 0)
            shared = plan.gemms[f"{name.removesuffix('router_norm')}shared.{first}"].recipe.saved
            return c.hidden_size if shared.is_fp8 else 0
        case _:
            return c.hidden_size


def _kept_by_core(c: ModelConfig, plan: Plan, name: str, selective: bool) -> float:
    """Return the bytes of q, k, v (v is a view of kv_b's output, unless it is quantised) and of the core's result."""
    format, result = plan.tensors[name].format, plan.cores[name].recipe.output.bytes * c.v_head_dim
    v = c.v_head_dim if format.is_fp8 else c.qk_nope_head_dim + c.v_head_dim
    operands = 0 if selective else (2 * c.qk_head_dim + v) * format.bytes
    return c.num_heads * (result + operands)


def arriving(config: ModelConfig, spread: int) -> float:
    """Return how many tokens each of `spread` processes receives for its experts, per token of one process, if choices
    are even.

    A token is sent once to each process that has one of its chosen experts, from `num_groups_per_token` groups.
    """
    groups, kept, chosen = config.num_expert_groups, config.num_groups_per_token, config.num_experts_per_token
    if spread % groups == 0:  # a process has a part of one group
        return spread * kept / groups * (1 - (1 - groups / (kept * spread)) ** chosen)
    if groups % spread:
        return spread * (1 - (1 - 1 / spread) ** chosen)
    own = groups // spread
    ways = {n: comb(own, n) * comb(groups - own, kept - n) / comb(groups, kept) for n in range(kept + 1)}
    return spread * sum(share * (1 - (1 - n / kept) ** chosen) for n, share in ways.items())


def head_gradient_bytes(plan: Plan) -> float:
    """Return the bytes that the head saves for backward independently of the number of tokens: in chunks, the FP32
    gradient of its weight, one per use of the head."""
    head = plan.gemms["lm_head"]
    return 4.0 * head.in_features * head.out_features * head.rows_per_token * is_chunked(head.recipe)


def _attention(c: ModelConfig) -> int:
    """Return the parameters of MLA, the gains of its latents' norms included."""
    q_out, gain = c.num_heads * c.qk_head_dim, 0 if c.qk_norm else 1
    q = c.hidden_size * q_out if c.q_lora_rank is None else (c.hidden_size + gain + q_out) * c.q_lora_rank
    kv_a = c.hidden_size * (c.kv_lora_rank + c.qk_rope_head_dim) + gain * c.kv_lora_rank
    kv_b = c.kv_lora_rank * c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
    return q + kv_a + kv_b + c.num_heads * c.v_head_dim * c.hidden_size
