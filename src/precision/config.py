"""The precision section of the config tree: the table, its exceptions, the scaling.

One file of `configs/precision/*.yaml` fills it. Every cell of the table is a decision. A cell left at null is an error
as soon as the model needs it. `plan.py` resolves this into one row per GEMM.
"""

from dataclasses import dataclass, field
from enum import Enum

from precision.errors import UserError

LONGEST_HISTORY = 65536  # steps; 64 times Transformer Engine's own


class Precision(Enum):
    """Format that an op computes in. `fp8` is scaled by `precision.scaling`, which also sets its forward and backward
    formats."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Method(Enum):
    """Where an FP8 tensor's scale comes from: the amax of past steps, or the tensor itself (just in time)."""

    delayed = "delayed"
    current = "current"


class Granularity(Enum):
    """How much of a tensor shares one scale: the whole tensor, a row, or a block (1 x 128 of activations, 128 x 128 of
    weights)."""

    tensor = "tensor"
    row = "row"
    block = "block"


class Fp8Format(Enum):
    """The two FP8 formats; see `formats`."""

    e4m3 = "e4m3"
    e5m2 = "e5m2"


class Accumulation(Enum):
    """How the products of an FP8 GEMM are summed: in FP32, or by a Hopper GPU's tensor cores alone, in about 14
    bits. The latter loses 1 % of a sum over 2,048 numbers of one sign, and 43 % of one over 65,536
    (scripts/bench/sums.py)."""

    fp32 = "fp32"
    fast = "fast"


class BackendChoice(Enum):
    """Implementation of the GEMMs; the plan resolves `auto` per op."""

    auto = "auto"
    reference = "reference"
    cuda = "cuda"
    transformer_engine = "transformer_engine"


@dataclass
class AttentionTable:
    """Precision of the GEMMs and the core of multi-head latent attention."""

    kv_a: Precision | None = None
    """Compression to the key-value latent and the shared RoPE key."""
    q_a: Precision | None = None
    """Compression to the query latent (models with q_lora_rank)."""
    q: Precision | None = None
    """Direct query projection (models without q_lora_rank)."""
    q_b: Precision | None = None
    """Queries from their latent."""
    kv_b: Precision | None = None
    """Keys and values from their latent."""
    o: Precision | None = None
    """Output projection."""
    core: Precision | None = None
    """QK^T, softmax (FP32 inside) and PV."""


@dataclass
class MoeTable:
    """Precision of the mixture-of-experts layer."""

    shared: Precision | None = None
    """GEMMs of the shared experts."""
    router: Precision | None = None
    """Input of the router; its scores are always FP32."""
    experts: Precision | None = None
    """Grouped GEMMs of the routed experts."""
    dispatch: Precision | None = None
    """Tokens sent to the experts."""
    combine: Precision | None = None
    """Expert outputs sent back."""
    accumulate: Precision | None = None
    """Weighted sum over a token's experts."""


@dataclass
class MtpTable:
    """Precision of the GEMMs that multi-token prediction adds to a block."""

    proj: Precision | None = None
    """The projection M [2 D -> D], for D = model.hidden_size."""


@dataclass
class GradTable:
    """Precision of gradients on their way to the optimizer."""

    accumulate: Precision | None = None
    """Sum over microbatches."""
    reduce: Precision | None = None
    """Sum over ranks."""


@dataclass
class OptimTable:
    """Precision of optimizer state."""

    master: Precision | None = None
    """Weights that are updated."""
    moments: Precision | None = None
    """First and second moments of AdamW, momentum of Muon: fp32 or bf16 (DeepSeek-V3, section 3.3.3)."""


@dataclass
class Table:
    """One decision per op. The only place where a precision is chosen."""

    embed: Precision | None = None
    """Embedding output, MTP's too."""
    norm: Precision | None = None
    """Arithmetic and gain of every RMSNorm."""
    residual: Precision | None = None
    """The stream between blocks; also what GEMMs return."""
    attn: AttentionTable = field(default_factory=AttentionTable)
    """Attention."""
    ffn: Precision | None = None
    """GEMMs of the dense feed-forward layers."""
    swiglu: Precision | None = None
    """Input of SwiGLU as saved for its backward pass: fp8 in blocks of 1 x 128, where the layer's GEMMs are in FP8
    (DeepSeek-V3, section 3.3.3); null: as GEMMs return it."""
    moe: MoeTable = field(default_factory=MoeTable)
    """Mixture of experts."""
    mtp: MtpTable = field(default_factory=MtpTable)
    """Multi-token prediction."""
    lm_head: Precision | None = None
    """Logits; the loss is always FP32."""
    grad: GradTable = field(default_factory=GradTable)
    """Gradients."""
    optim: OptimTable = field(default_factory=OptimTable)
    """Optimizer."""


@dataclass
class RulesException:
    """Overrides the table for GEMMs (and dispatches) whose name matches a glob."""

    match: str = ""
    """Glob over row names, as the plan prints them: `mtp.*`, `layers.*.attn.o`, `layers.1.moe.experts.*`."""
    precision: Precision | None = None
    """Format they compute in; null: bf16, or the table's if `accumulation` is given."""
    accumulation: Accumulation | None = None
    """How their FP8 products are summed; null: as `precision.accumulation`."""


@dataclass
class Rules:
    """Exceptions to the table, by block and by name. A rule that matches nothing is an error."""

    first_blocks: int = 0
    """This many blocks at the start keep their FP8 GEMMs in BF16."""
    last_blocks: int = 0
    """This many blocks at the end (MTP's not counted) keep their FP8 GEMMs in BF16."""
    exceptions: list[RulesException] = field(default_factory=list)
    """Exceptions by name."""


@dataclass
class ScalingConfig:
    """How FP8 tensors are scaled."""

    method: Method = Method.delayed
    """delayed: scale from past steps; current: from the tensor itself."""
    granularity: Granularity = Granularity.tensor
    """What shares one scale: tensor, row or block."""
    history: int = 16
    """Steps that a delayed scale looks back."""
    max_jump: float = 16.0
    """An amax enters a delayed scale's history as at most this many times the largest that is there."""
    margin: int = 0
    """Powers of two left free between a tensor's amax and the format's largest value."""
    power_of_two: bool = False
    """Round scales down to powers of two, so that scaling adds no rounding error of its own."""
    forward: Fp8Format = Fp8Format.e4m3
    """Format of activations and weights."""
    backward: Fp8Format = Fp8Format.e5m2
    """Format of output gradients."""


@dataclass
class LossScaleConfig:
    """Dynamic loss scaling for a table that contains FP16, as in torch.amp.GradScaler: doubled after `interval` good
    steps in a row, halved after a bad one."""

    initial: float = 2.0**16
    """Initial factor of the loss; a power of two."""
    interval: int = 2000
    """Good steps in a row before the scale is doubled."""
    minimum: float = 1.0
    """Lower bound of the scale, a power of two. Non-finite gradients at this scale count as an ordinary bad step."""


@dataclass
class PrecisionConfig:
    """Everything that decides which op runs in which format."""

    name: str = "custom"
    """Name of the recipe, for the plan and the run folder."""
    backend: BackendChoice = BackendChoice.auto
    """Implementation of the GEMMs."""
    accumulation: Accumulation = Accumulation.fp32
    """How FP8 products are summed: fp32 (a Hopper GPU's partial sums are promoted every 128) or fast (its ~14 bits)."""
    never_slower: bool = False
    """Leave an op in BF16 if FP8 is slower on this GPU by the table of measured rates."""
    table: Table = field(default_factory=Table)
    """One decision per op."""
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    """Scaling of what the table puts in FP8."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Loss scaling, if the table puts anything in FP16."""
    rules: Rules = field(default_factory=Rules)
    """Exceptions to the table."""


def check_scaling(scaling: ScalingConfig) -> None:
    """Raise a UserError, with key, value and fix, for scaling that does not exist."""
    where = "precision.scaling"
    needs_powers = scaling.granularity is Granularity.row and not scaling.power_of_two
    if scaling.method is Method.delayed and scaling.granularity is not Granularity.tensor:
        also = f" with {where}.power_of_two=true" if needs_powers else ""
        raise UserError(
            f"{where}.granularity={scaling.granularity.value} with method=delayed: a history is kept per tensor only; "
            f"set {where}.granularity=tensor or {where}.method=current{also}"
        )
    if needs_powers:
        raise UserError(
            f"{where}.granularity=row with power_of_two=false: the weight gradient casts row-scaled operands again, "
            f"which is exact for powers of two only; set {where}.power_of_two=true"
        )
    if not 1 <= scaling.history <= LONGEST_HISTORY:
        raise UserError(
            f"{where}.history={scaling.history}: delayed scaling looks back at least one step, and saves an amax a "
            f"tensor of each; set 1 to {LONGEST_HISTORY}"
        )
    if not scaling.max_jump >= 2:
        raise UserError(
            f"{where}.max_jump={scaling.max_jump:g}: scales could not follow a tensor that grows; set 2 or more"
        )
    if not 0 <= scaling.margin <= 8:
        raise UserError(f"{where}.margin={scaling.margin}: out of range (powers of two of headroom); set 0 to 8")
    if scaling.forward is not Fp8Format.e4m3:
        raise UserError(
            f"{where}.forward={scaling.forward.value}: activations and weights need E4M3's digits; set e4m3"
        )
