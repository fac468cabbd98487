"""Activations of feed-forward layers without a gate, as in FOG (arXiv 2505.20524): y = w_down act(w_up x).

    GeLU(x)  = x Phi(x)                                                 (arXiv 1606.08415)
    xIELU(x) = a_p x^2 + x / 2                                for x > 0 (arXiv 2411.13010)
               a_n (expm1(min(x, -1e-6)) - x) + x / 2         else

with trained a_p = softplus(positive) and a_n = 1/2 + softplus(negative), both 0.8 at first: one pair a layer, so one an
expert. FP32 inside; saves its input. A gated layer's SwiGLU is in `fused`.

Legend: R rows, F features, E experts (1 in a dense layer).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision.fused import quantize_for
from precision.kurtosis import Kurtosis
from precision.operand import Feed, Operand

INITIAL = 0.8
_OFFSET = 0.5  # least a_n
_NEAR_ZERO = -1e-6


class Gelu(nn.Module):
    """GeLU, not approximated."""

    def forward(self, x: Tensor, row_weight: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
        """Return GeLU(x) of x [..., F], each row times `row_weight` [...] FP32, in x's dtype."""
        return _Gelu.apply(x, row_weight)


class Xielu(nn.Module):
    """xIELU with its two parameters for each of E layers, [E] FP32."""

    def __init__(self, layers: int = 1):
        super().__init__()
        self.positive = nn.Parameter(torch.empty(layers, dtype=torch.float32))
        self.negative = nn.Parameter(torch.empty(layers, dtype=torch.float32))

    @torch.no_grad()
    def reset(self) -> None:
        """Set the parameters to their initial values."""
        self.positive.fill_(math.log(math.expm1(INITIAL)))
        self.negative.fill_(math.log(math.expm1(INITIAL - _OFFSET)))

    def keep(self, experts: range) -> None:
        """Keep the parameters of these experts only."""
        for name in ("positive", "negative"):
            parameter = getattr(self, name)
            setattr(self, name, nn.Parameter(parameter.detach()[experts.start : experts.stop].clone()))

    def forward(self, x: Tensor, row_weight: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
        """Return xIELU(x) of x [..., F], each row times `row_weight` [...] FP32, in x's dtype. offsets: cumulative ends
        of the experts' rows, for E > 1."""
        a = torch.stack([F.softplus(self.positive), F.softplus(self.negative) + _OFFSET])
        if offsets is None:
            return _Xielu.apply(x, row_weight, a.expand(2, 1))
        row_R = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
        expert_R = torch.searchsorted(offsets, row_R, right=True).clamp_(max=a.shape[1] - 1)
        return _Xielu.apply(x, row_weight, _Spread.apply(a, expert_R))


def activate(
    x: Tensor,
    activation: Gelu | Xielu,
    feed: Feed | None = None,
    row_weight: Tensor | None = None,
    offsets: Tensor | None = None,
    kurtosis: Kurtosis | None = None,
) -> Operand | Tensor:
    """Return `activation` of x [..., F] as `feed` requests it. row_weight, kurtosis: as in `swiglu`."""
    h = activation(x, row_weight, offsets)
    if kurtosis is not None:
        kurtosis(h)
    return quantize_for(h, feed)


class _Spread(torch.autograd.Function):
    """a [2, E] by row, [2, R]. The gradient is a product with zeros and ones: the same bits in each run."""

    @staticmethod
    def forward(ctx, a: Tensor, expert: Tensor) -> Tensor:
        ctx.save_for_backward(expert)
        ctx.experts = a.shape[1]
        return a.index_select(1, expert)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (expert,) = ctx.saved_tensors
        own = expert[:, None] == torch.arange(ctx.experts, device=expert.device)
        return grads[0] @ own.to(grads[0].dtype), None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, row_weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, row_weight)
        return _weighted(F.gelu(x.float()), row_weight, x.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, row_weight = ctx.saved_tensors
        wide, dh = x.float(), grads[0].float()
        dweight = None if row_weight is None else (F.gelu(wide) * dh).sum(-1)
        dh = dh if row_weight is None else dh * row_weight[..., None]
        return torch.ops.aten.gelu_backward(dh, wide).to(x.dtype), dweight


class _Xielu(torch.autograd.Function):
    """a [2, R], or [2, 1] for all rows."""

    @staticmethod
    def forward(ctx, x: Tensor, row_weight: Tensor | None, a: Tensor) -> Tensor:
        ctx.save_for_backward(x, row_weight, a)
        wide = x.float()
        return _weighted(_xielu(wide, *a[..., None]), row_weight, x.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, row_weight, a = ctx.saved_tensors
        a_p, a_n = a[..., None]
        wide, dh = x.float(), grads[0].float()
        dweight = None if row_weight is None else (_xielu(wide, a_p, a_n) * dh).sum(-1)
        dh = dh if row_weight is None else dh * row_weight[..., None]
        is_positive, bent = wide > 0, torch.expm1(wide.clamp(max=_NEAR_ZERO))
        dx = torch.where(is_positive, 2 * a_p * wide, a_n * bent).add_(0.5).mul_(dh)
        da = torch.stack([
            torch.where(is_positive, wide.square(), 0.0).mul_(dh).sum(-1),
            torch.where(is_positive, 0.0, bent - wide).mul_(dh).sum(-1),
        ])  # fmt: skip
        da = da.flatten(1)  # by row: one, or none, for each pair of a, or many for its only one
        return dx.to(x.dtype), dweight, da if da.shape == a.shape else da.sum(1, keepdim=True)


def _xielu(wide: Tensor, a_p: Tensor, a_n: Tensor) -> Tensor:
    bent = torch.expm1(wide.clamp(max=_NEAR_ZERO)) - wide
    return torch.where(wide > 0, a_p * wide.square(), a_n * bent).add_(wide, alpha=0.5)


def _weighted(h: Tensor, row_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    h = h if row_weight is None else h * row_weight[..., None]
    return h if h.dtype == dtype else h.to(dtype)
