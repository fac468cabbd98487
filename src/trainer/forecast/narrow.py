"""How much slower a FLOP is than in the model of `cost.RATES`, by an account of a model's operators on one H200.

The rates were measured in steps of Moonlight's shape: 2,048 wide, experts of 1,408, 4,096 tokens a sequence. In a
narrower model GEMMs are less of a step, and FP8 is less of the GEMMs; with longer sequences attention's core is more of
it. The account adds up, for a token and both passes,

    core       FLOPs of attention's core, at the rate that long sequences add to a step
    GEMMs      6 N K FLOPs a row of the plan, at the rate that its format reached in GEMMs alone
    memory     bytes that other operators read and write (`_moved_bytes`), at the bandwidth
    optimizer  34 bytes a parameter and step (gradient twice; master, two moments, read and written; weight written)

A step reaches neither the rates of GEMMs alone nor the bandwidth: all but the core takes `OVERHEAD` times as long, so
that the account is right for the model of `RATES`. The time to launch kernels is not in it.
"""

from models.config import ModelConfig
from models.flops import count_parameters
from precision import Plan
from trainer.forecast.cost import RATES

CORE = 443e12
"""FLOP/s of attention's core: of Moonlight's, from 16,384 to 32,768 tokens a sequence (docs/benchmarks.md)."""
GEMM = {False: 719e12, True: 1434e12}
"""FLOP/s of GEMMs alone, in BF16 and FP8: the `limit` of Moonlight's step there, without its core (2.65 ms a block)."""
BANDWIDTH = 4.8e12
"""Bytes a second, according to NVIDIA."""
OVERHEAD = {False: 1.189, True: 1.290}
"""In BF16 and FP8."""


def slowdown(model: ModelConfig, plan: Plan, length: int, tokens: float) -> float:
    """Return the time of a FLOP over that in the model of `cost.RATES`, 1 or more. tokens: of a step, on all GPUs:
    they share the optimizer's work."""
    core, others, flops = account(model, plan, length, tokens)
    fp8 = any(row.recipe.is_fp8 for row in plan.gemms.values())
    return max((core + OVERHEAD[fp8] * others) / flops * 1e12 * RATES[fp8], 1.0)


def account(model: ModelConfig, plan: Plan, length: int, tokens: float) -> tuple[float, float, float]:
    """Return seconds of the core and of all else, and FLOPs, of a token in sequences of `length`."""
    core = 3.0 * len(plan.cores) * model.num_heads * (model.qk_head_dim + model.v_head_dim) * length
    flops, others = core, (_moved_bytes(model, plan) + 34 * count_parameters(model).total / tokens) / BANDWIDTH
    for row in plan.gemms.values():
        work = 3 * row.flops_per_token
        flops, others = flops + work, others + work / GEMM[row.recipe.is_fp8]
    return core / CORE, others, flops


def _moved_bytes(model: ModelConfig, plan: Plan) -> float:
    """Return the bytes a token that norms, residual sums, rotation, activations, experts' rows, casts and the loss read
    and write, in BF16; casts write FP8."""
    c, blocks = model, len(plan.cores)
    numbers = 8.0 * (2 * blocks + 1) * c.hidden_size  # norm: x, y; sum: two read, one written; backward: x, dy, dx
    numbers += 8.0 * blocks * 2 * c.num_heads * c.qk_head_dim  # q and k, read and written, in both passes
    numbers += 8.0 * c.num_moe_blocks * c.num_experts_per_token * c.hidden_size  # gathered, summed, and both backward
    numbers += 2.0 * c.vocab_size * (1 + c.num_mtp_layers)  # logits read, their gradient written
    moved = 2 * numbers
    for name, row in plan.gemms.items():
        outputs, layer = row.out_features * row.rows_per_token, name.rpartition(".")[2]
        if layer == "gate_up":  # outputs 2 I; SwiGLU reads 2 I, writes I; backward reads 3 I, writes 3 I (in FP8 5 I)
            moved += (8 if row.recipe.is_fp8 else 9) * outputs
        elif row.recipe.is_fp8:  # dy in BF16 read, and written in two layouts
            moved += 4 * outputs
        if layer == "up":  # without a gate: x read, h written; backward x and dh read, dx written
            moved += 10 * outputs
    return moved
