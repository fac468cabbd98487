"""Rows of the precision plan: the decision for each GEMM and tensor. `plan` makes them, layers read them."""

from dataclasses import dataclass, replace

from precision.config import Accumulation, Granularity, Method, ScalingConfig
from precision.formats import BF16, Format

REFERENCE, CUDA, TE = "reference", "cuda", "transformer_engine"


@dataclass(frozen=True)
class GemmRecipe:
    """Formats, scaling and backend of a layer. Equal layers share one object, so that equal blocks compile once; it
    holds no names.

    input, grad: formats of the operands of the forward and of the gradient. saved: format of x saved for backward.
    output: format of y and dx. accumulation: of the products of all three. swiglu: format of y saved for backward, if
    SwiGLU reads it.
    """

    input: Format
    grad: Format
    saved: Format
    output: Format
    scaling: ScalingConfig
    backend: str
    accumulation: Accumulation = Accumulation.fp32
    swiglu: Format = BF16

    @property
    def is_fp8(self) -> bool:
        return self.input.is_fp8

    @property
    def reads_fp8(self) -> bool:
        """Whether x may arrive quantised: Transformer Engine's modules quantise it themselves."""
        return self.is_fp8 and self.backend != TE

    @property
    def sums_fast(self) -> bool:
        """Whether products are summed by the tensor cores alone."""
        return self.accumulation is Accumulation.fast

    @property
    def delayed(self) -> bool:
        return self.scaling.method is Method.delayed

    @property
    def scales_tensors(self) -> bool:
        """Whether a tensor (in a stack: each expert's) has one scale."""
        return self.scaling.granularity is Granularity.tensor

    def can_quantize_parts(self, rows: int | None, even: bool) -> bool:
        """Return whether a part of a weight can be quantised alone, into the same FP8 as the whole.

        This holds under a given scale, and for 128 x 128 blocks that each belong to one part. rows: of a part; None:
        whole experts. even: all parts have one size.
        """
        if not self.reads_fp8:
            return False
        blocks = self.scaling.granularity is Granularity.block and even and (rows is None or rows % 128 == 0)
        return self.scales_tensors or blocks

    @property
    def with_given_scale(self) -> "GemmRecipe":
        """This recipe with tensors cast under a given scale instead of their own. Rows and blocks always use their
        own."""
        if self.delayed or self.scaling.granularity is not Granularity.tensor:
            return self
        return replace(self, scaling=replace(self.scaling, method=Method.delayed))

    @property
    def in_bf16(self) -> "GemmRecipe":
        """This recipe without FP8: operands and gradients in BF16."""
        plain = replace(self, input=BF16, grad=BF16, saved=BF16, accumulation=Accumulation.fp32, swiglu=BF16)
        return plain if self.is_fp8 else self


@dataclass(frozen=True)
class GemmRow:
    """One GEMM of the model. rows_per_token: rows per token (experts: the number chosen)."""

    name: str
    op: str
    in_features: int
    out_features: int
    groups: int
    rows_per_token: float
    recipe: GemmRecipe
    decided_by: str

    @property
    def num_weights(self) -> int:
        """Numbers in the weight; of a stack in all experts' weights."""
        return self.in_features * self.out_features * self.groups

    @property
    def flops_per_token(self) -> float:
        """Forward multiply-adds times two, per token."""
        return 2.0 * self.in_features * self.out_features * self.rows_per_token


@dataclass(frozen=True)
class CoreRow:
    """Attention's core in one block: two products forward, five backward. qk_scale: static scale of queries and keys in
    FP8, a power of two; None: scaled by the recipe. recipe: formats of q, k, v, P and of dO, dS."""

    name: str
    num_heads: int
    qk_head_dim: int
    v_head_dim: int
    qk_scale: float | None
    recipe: GemmRecipe
    decided_by: str

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the forward FLOPs per token; causal, so half of the positions count."""
        return 1.0 * self.num_heads * (self.qk_head_dim + self.v_head_dim) * sequence_length

    @property
    def products(self) -> list[tuple[str, str, str, str]]:
        """Products of a core in FP8: name, formats and scales of its two operands, and the pass."""
        e4m3, e5m2 = self.recipe.input.name, self.recipe.grad.name
        made = "history" if self.recipe.delayed else "own amax"
        q = k = f"{e4m3} {made if self.qk_scale is None else f'static {self.qk_scale:g}'}"
        v, dout, ds = f"{e4m3} {made}", f"{e5m2} {made}", f"{e5m2} {made}"
        return [
            ("S = q k^T", q, k, "forward"),
            ("O = P v", f"{e4m3} 256 / max", v, "forward"),
            ("S = q k^T", q, k, "backward"),
            ("dP = dO v^T", dout, v, "backward"),
            ("dV = P^T dO", f"{e4m3} 448 / sum", dout, "backward"),
            ("dQ = dS k", ds, k, "backward"),
            ("dK = dS^T q", ds, q, "backward"),
        ]


@dataclass(frozen=True)
class TensorRow:
    """One tensor or op that is not a GEMM, and its format."""

    name: str
    op: str
    format: Format
    decided_by: str
