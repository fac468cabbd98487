"""Layers of every block: norm, rotary position, embedding, gated feed-forward layer.

RMSNorm (arXiv 1910.07467): y = x / sqrt(mean(x^2) + eps) * gain; in FOG's models (arXiv 2505.20524) some without gain.

SwiGLU feed-forward (arXiv 2002.05202): y = W_down (silu(W_gate x) * W_up x). Gate and up are one GEMM, with the gate as
its first half. In FOG's variants without a gate: y = W_down act(W_up x), see `precision.activation`.

RoPE (arXiv 2104.09864; `precision.rotary` applies it): pair j at position p turns by the angle p w_j, with w_j =
theta^(-2j / R).

YaRN (arXiv 2309.00071) stretches the context by a factor s: a pair that turns more than beta_fast times within the
original length L keeps w_j, one that turns less than beta_slow times gets w_j / s, with a linear ramp between:

    pair that turns r times within L:  j(r) = R ln(L / (2 pi r)) / (2 ln theta)
    m(s, a) = 0.1 a ln s + 1
    cos, sin        *= m(s, mscale) / m(s, mscale_all_dim)          m(s, 1) if either is 0
    softmax scale   *= m(s, mscale_all_dim)^2

as in DeepSeek's inference code and transformers 5.17.

Legend: B batch, S sequence, D hidden, F intermediate, V vocabulary, H heads, R rotary dimensions, P = R / 2 pairs.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Activation, YarnConfig
from models.tensor import SplitLookup, TensorSplit
from precision import Feed, Gelu, Kurtosis, Linear, Operand, Plan, Xielu, activate, gated_ffn, rms_norm


class RMSNorm(nn.Module):
    """RMSNorm with an FP32 gain [features] that starts at `initial`; None: without gain."""

    def __init__(self, plan: Plan, name: str, features: int, eps: float, initial: float | None = 1.0):
        super().__init__()
        dtype = plan.tensor(name, "norm").dtype
        self.weight = None if initial is None else nn.Parameter(torch.empty(features, dtype=dtype))
        self.eps, self.kernels, self.initial = eps, plan.kernels, initial

    def forward(self, x: Tensor, feed: Feed | None = None) -> Operand | Tensor:
        """Norm x [..., features]; return the same shape, in the form `feed` requests, or without a feed in x's
        dtype."""
        return rms_norm(x, self.weight, self.eps, feed, self.kernels)


def normed(x: Tensor, norm: RMSNorm | None) -> Tensor:
    """Return norm(x) as a tensor; x if norm is None."""
    if norm is None:
        return x
    out = norm(x)
    assert isinstance(out, Tensor)
    return out


class Embedding(nn.Module):
    """Token embedding: an FP32 master [V, D], looked up in the plan's format, times `factor`, in the residual stream's
    dtype."""

    def __init__(
        self, plan: Plan, name: str, vocab_size: int, hidden_size: int, residual: torch.dtype, factor: float = 1.0
    ):
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))
        self.dtype, self.residual = plan.tensor(name, "embed").dtype, residual
        self.table: Tensor | None = None  # the whole table in the plan's format, where ranks share it
        self.is_sharded = False
        self.tensor: TensorSplit | None = None  # the ranks that share the vocabulary

    def split(self, tensor: TensorSplit) -> None:
        """Keep the rows of this process's own words (tensor parallelism). Call it after they are drawn."""
        self.tensor = tensor
        tensor.keep(self, 0)

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype in which a shared table is gathered."""
        return self.dtype

    def receive(self, table: Tensor) -> list[Tensor]:
        """Use `table` [V, D], gathered from the ranks that share it, for lookups from now on. Makes no other tensor."""
        self.table = table
        return []

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens int64 [...]; return [..., D]. The cast after the lookup gives the same numbers as a cast
        table."""
        if self.tensor is not None:
            table = self.weight if self.table is None else self.table
            found = SplitLookup.apply(tokens, self.weight, table, self.tensor).to(self.dtype)
        elif self.table is not None:
            found = _Lookup.apply(tokens, self.weight, self.table)
        else:
            found = F.embedding(tokens, self.weight).to(self.dtype)
        return found.to(self.residual) if self.factor == 1 else found.to(self.residual) * self.factor


class _Lookup(torch.autograd.Function):
    """Rows of a gathered table; the gradient flows to the master's edge, in FP32."""

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (tokens,) = ctx.saved_tensors
        dy = grads[0].to(ctx.dtype)
        return None, torch.ops.aten.embedding_dense_backward(dy, tokens, ctx.rows, -1, False), None


def first_gemm(activation: Activation, intermediate_size: int) -> tuple[str, int]:
    """Return name and out features of the first GEMM of a feed-forward layer."""
    return ("gate_up", 2 * intermediate_size) if activation is Activation.swiglu else ("up", intermediate_size)


def without_gate(activation: Activation, layers: int = 1) -> Gelu | Xielu | None:
    """Return the activation of so many layers without a gate; None for SwiGLU, which has one."""
    match activation:
        case Activation.gelu:
            return Gelu()
        case Activation.xielu:
            return Xielu(layers)
        case Activation.swiglu:
            return None


class FFN(nn.Module):
    """Feed-forward layer D -> F -> D: a dense block's (op `ffn`), or the shared experts (op `moe.shared`)."""

    def __init__(
        self, plan: Plan, name: str, op: str, hidden_size: int, intermediate_size: int, activation: Activation
    ):
        super().__init__()
        part, out_features = first_gemm(activation, intermediate_size)
        self._first, first = part, Linear(plan.gemm(f"{name}.{part}", op, hidden_size, out_features))
        self.add_module(part, first)
        self.down = Linear(plan.gemm(f"{name}.down", op, intermediate_size, hidden_size))
        self.feed, self.down_feed = Feed(first), Feed(self.down)
        self.activation = without_gate(activation)
        self.kurtosis = Kurtosis("ffn")

    @property
    def first(self) -> Linear:
        """The first GEMM: `gate_up`, or `up` without a gate."""
        return cast(Linear, getattr(self, self._first))

    def forward(self, x: Operand | Tensor) -> Tensor:
        """Apply the layer to x [..., D], normed and made for `self.feed`; return [..., D]."""
        if self.activation is None:
            return gated_ffn(x, self.first, self.down, self.down_feed, self.kurtosis)
        return self.down(activate(self.first(x), self.activation, self.down_feed, kurtosis=self.kurtosis))


def rope_frequencies(dim: int, theta: float, yarn: YarnConfig | None, device: torch.device) -> Tensor:
    """Return the angle per position of each pair, w [P] FP32, radians. See the module docstring."""
    exponent_P = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    frequency_P = 1.0 / theta**exponent_P
    if yarn is None:
        return frequency_P

    def pair_with_turns(times: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with_turns(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_with_turns(yarn.beta_slow)), dim - 1)
    pair_P = torch.arange(dim // 2, dtype=torch.float32, device=device)
    # without a pair on one side of the ramp, last may be below first: theirs then runs backwards, too
    slowed_P = ((pair_P - first) / ((last - first) or 0.001)).clamp(0, 1)
    return frequency_P / yarn.factor * slowed_P + frequency_P * (1 - slowed_P)


def rope_table(length: int, dim: int, theta: float, yarn: YarnConfig | None, device: torch.device) -> Tensor:
    """Return cos and sin of positions 0 to length - 1: [2, S, P] FP32."""
    frequency_P = rope_frequencies(dim, theta, yarn, device)
    angle_SP = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency_P
    table_2SP = torch.stack([angle_SP.cos(), angle_SP.sin()])
    if yarn is None:
        return table_2SP
    return table_2SP * _rope_growth(yarn)


def softmax_scale(qk_head_dim: int, yarn: YarnConfig | None) -> float:
    """Return 1 / sqrt(d_qk), with YaRN times m(s, mscale_all_dim)^2."""
    growth = 1.0 if yarn is None else _growth(yarn, yarn.mscale_all_dim)
    return qk_head_dim**-0.5 * growth**2


def qk_bound(qk_head_dim: int, yarn: YarnConfig | None) -> float:
    """Return a bound of the elements of normed queries and keys after RoPE."""
    return qk_head_dim**0.5 * (1.0 if yarn is None else max(1.0, _rope_growth(yarn)))


def _rope_growth(yarn: YarnConfig) -> float:
    """Return the factor of cos and sin."""
    if yarn.mscale and yarn.mscale_all_dim:
        return _growth(yarn, yarn.mscale) / _growth(yarn, yarn.mscale_all_dim)
    return _growth(yarn, 1.0)


def _growth(yarn: YarnConfig, a: float) -> float:
    """Return m(s, a) = 0.1 a ln s + 1."""
    return 0.1 * a * math.log(yarn.factor) + 1.0
