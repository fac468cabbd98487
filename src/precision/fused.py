"""Ops that produce the operands of GEMMs: norm -> operand, SwiGLU -> operand, permutation -> operand, each with its
backward pass.

Quantising in the op that produces a tensor saves a pass over it. So these ops return what their `Feed` requests: an
`Operand` if a consumer computes in FP8, else a plain tensor. Without a feed they are plain ops. They are written in
PyTorch here; a backend with its own kernels fuses the cast.

Their backward passes are explicit, in FP32, and save little: the norm its input (the residual stream, which exists
anyway) and one number per row; SwiGLU its input. T tokens, K experts per token, R = T K rows, D and F features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from precision.formats import E4M3, read_back, saturating_cast
from precision.kurtosis import Kurtosis
from precision.linear import quantize
from precision.observe import is_observed
from precision.operand import Feed, Operand, placeholder
from precision.scaling import scale_from_amax


def _in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in dtype, or x itself if it has that dtype. torch 2.11 silently drops the gradient of a traced forward
    method that returns the result of a no-op `to` or of an in-place op."""
    return x if x.dtype == dtype else x.to(dtype)


class _RmsNorm(torch.autograd.Function):
    """y = x / rms(x) * gain. Saves rstd [..., 1]. dx = rstd (g - n mean(g n)) with n = x rstd, g = dy gain."""

    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, rstd)
        return _in(wide * rstd if gain is None else wide * rstd * gain, x.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, gain, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        dy = grads[0].float()
        product = dy * normed
        if gain is None:
            dx = dy.sub(normed.mul_(product.mean(-1, keepdim=True))).mul_(rstd)
            return dx.to(x.dtype), None, None
        dgain = product.flatten(0, -2).sum(0).to(gain.dtype)
        mean = (product @ gain.to(product.dtype)).div_(gain.shape[0])[..., None]
        dx = (dy * gain).sub_(normed.mul_(mean)).mul_(rstd)
        return dx.to(x.dtype), dgain, None


class _SwiGlu(torch.autograd.Function):
    """h = silu(gate) up row_weight. With s = sigmoid(gate): dgate = dh up s (1 + gate (1 - s)), dup = dh gate s.
    narrow: gate_up is saved in FP8."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, row_weight: Tensor | None, narrow: bool) -> Tensor:
        ctx.save_for_backward(*(swiglu_to_fp8(gate_up) if narrow else (gate_up, None)), row_weight)
        ctx.dtype = gate_up.dtype
        gate, up = gate_up.chunk(2, -1)
        silu = F.silu(gate.float())
        h = silu * up if row_weight is None else silu.mul_(up) * row_weight[..., None]
        return _in(h, gate_up.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        gate_up, scale_inv, row_weight = ctx.saved_tensors
        if scale_inv is not None:
            gate_up = swiglu_from_fp8(gate_up, scale_inv, ctx.dtype)
        gate, up = (half.float() for half in gate_up.chunk(2, -1))
        silu = F.silu(gate)
        dh = grads[0].float()
        dweight = None
        if row_weight is not None:
            dweight = (silu * up).mul_(dh).sum(-1).to(row_weight.dtype)
            dh = dh * row_weight[..., None]
        out = torch.empty_like(gate_up)
        dgate, dup = out.chunk(2, -1)
        dgate.copy_(torch.ops.aten.silu_backward(up * dh, gate))
        dup.copy_(silu.mul_(dh))
        return out, dweight, None


def swiglu_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up [..., 2F] in E4M3 with scales, powers of two, of 1 x 128: data [..., 2, F] and inverse scales
    [..., 2, ceil(F / 128)]."""
    halves = x.unflatten(-1, (2, -1)).float()
    blocks = F.pad(halves, (0, -halves.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = scale_from_amax(blocks.abs().amax(-1), E4M3.max, 0, power_of_two=True)
    return saturating_cast(blocks, scale[..., None], E4M3).flatten(-2)[..., : halves.shape[-1]].contiguous(), 1 / scale


def swiglu_from_fp8(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of `swiglu_to_fp8`, [..., 2F]; exact in BF16."""
    return read_back(data, scale_inv).flatten(-2).to(dtype)


class _Gather(torch.autograd.Function):
    """rows[r] = x[index[r]], or without `values`, where FP8 is gathered beside it, the autograd edge alone. Backward:
    each token sums its K rows in FP32. inverse [T, K]: their numbers."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor, values: bool) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.dtype = x.dtype
        return x.index_select(0, index) if values else x.new_zeros(()).expand(index.shape[0], *x.shape[1:])

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (inverse,) = ctx.saved_tensors
        return sum_rows(grads[0], inverse, torch.float32).to(ctx.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """out[t] = sum over k of rows[inverse[t, k]]. Backward: each row receives its token's gradient."""

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dtype = rows.dtype
        return sum_rows(rows, inverse, dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (index,) = ctx.saved_tensors
        return grads[0].to(ctx.dtype).index_select(0, index), None, None, None


def sum_rows(rows: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of each token's rows [T, D], added one after the other in `dtype`. An index past the last row adds
    nothing."""
    if rows.shape[0] < inverse.numel():
        inverse, rows = inverse.clamp(max=rows.shape[0]), F.pad(rows, (0, 0, 0, 1))
    *some, last = inverse.unbind(1)
    if not some:
        return _in(rows.index_select(0, last), dtype)
    total = rows.index_select(0, some[0]).to(dtype)
    for index in some[1:]:
        total += rows.index_select(0, index)
    return total + rows.index_select(0, last)


def quantize_for(x: Tensor, feed: Feed | None) -> Operand | Tensor:
    """Return x as the consumers of `feed` need it: quantised once if any of them computes in FP8."""
    if feed is None or feed.slot is None or feed.recipe is None:
        return x
    data, scale_inv = quantize(x, feed.slot, feed.recipe)
    kept = feed.wants_tensor
    return Operand(x if kept else _ToPlaceholder.apply(x), data, scale_inv, kept=kept)


class _ToPlaceholder(torch.autograd.Function):
    """Replace x by a placeholder of its shape without memory; the gradient passes through."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return placeholder(x)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return grads[0]


def rms_norm(
    x: Tensor, gain: Tensor | None, eps: float, feed: Feed | None = None, kernels: str = "reference"
) -> Operand | Tensor:
    """Apply RMSNorm (arXiv 1910.07467) to x [..., D] with gain [D] FP32, or without; FP32 inside, result in x's dtype.

    kernels: `cuda` norms BF16 with a gain and casts in one kernel; without gain these are plain ops, which a compiled
    block fuses.
    """
    fits = x.dtype == torch.bfloat16 and (feed is None or feed.backend in (None, "cuda"))
    if kernels == "cuda" and gain is not None and fits and not is_observed():
        return _norm_and_cast(x, gain, eps, feed)
    return quantize_for(_RmsNorm.apply(x, gain, eps), feed)


def _norm_and_cast(x: Tensor, gain: Tensor, eps: float, feed: Feed | None) -> Operand | Tensor:
    from precision.backends.cuda import cast_of

    if feed is None or feed.slot is None or feed.recipe is None:
        return _NormAndCast.apply(x, gain, eps, None, None, None, "", True)[0]
    how = cast_of(feed.recipe, feed.recipe.input).text
    rows = feed.slot.scale, feed.slot.amax, feed.slot.place
    carrier, data, inv = _NormAndCast.apply(x, gain, eps, *rows, how, feed.wants_tensor)
    # torch 2.11 forgets that these have no gradients where they leave a compiled graph (on their way to other ranks)
    return Operand(carrier, data.detach(), inv.detach(), kept=feed.wants_tensor)


class _NormAndCast(torch.autograd.Function):
    """`_RmsNorm` with its result in FP8, from one kernel."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        gain: Tensor,
        eps: float,
        scale_row: Tensor | None,
        amax: Tensor | None,
        place: Tensor | None,
        how: str,
        plain: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from precision.kernels import ops

        x2 = x.reshape(-1, x.shape[-1])
        scale_row = x.new_empty(1, dtype=torch.float32) if scale_row is None else scale_row
        amax = x.new_empty(1, dtype=torch.float32) if amax is None else amax
        y, data, inv, rstd = ops.rms_norm(x2, gain, eps, scale_row, amax, how, plain, place)
        ctx.save_for_backward(x, gain, rstd)
        data = data.view(x.shape) if how else data
        inv = inv.unflatten(0, x.shape[:-1]) if how and inv.dim() else inv
        ctx.mark_non_differentiable(data, inv)
        return y.view(x.shape) if plain else placeholder(x), data, inv

    @staticmethod
    def backward(ctx, *grads: Tensor):
        from precision.kernels import ops

        x, gain, rstd = ctx.saved_tensors
        dx, dgain = ops.rms_norm_backward(grads[0].reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]), gain, rstd)
        return dx.view(x.shape), dgain, *(None,) * 6


def swiglu(
    gate_up: Tensor,
    feed: Feed | None = None,
    row_weight: Tensor | None = None,
    kurtosis: Kurtosis | None = None,
    narrow: bool = False,
) -> Operand | Tensor:
    """Return silu(gate) * up (arXiv 2002.05202) of gate_up [..., 2F], gate first, as [..., F]; FP32 inside.

    row_weight [...] FP32: multiplies each row. With the router's weight applied here the experts' outputs are not
    saved, and its gradient comes with SwiGLU's. kurtosis: observes the result before it is cast. narrow: gate_up is
    saved in FP8, in blocks of 1 x 128. (Kernels recompute h from it in the backward pass; here the next GEMM keeps h.)
    """
    h = _SwiGlu.apply(gate_up, row_weight, narrow)
    if kurtosis is not None:
        kurtosis(h)
    return quantize_for(h, feed)


def gather_rows(x: Operand | Tensor, index: Tensor, inverse: Tensor, feed: Feed | None = None) -> Operand | Tensor:
    """Gather the rows of tokens in the experts' order: x [T, D], index [R] int64 (the token of each row); returns [R,
    D].

    inverse [T, K] int64: the K rows of each token. An Operand is gathered as FP8 with its scales; a tensor is delivered
    as `feed` requests. The gradient of a token is the FP32 sum over its rows.
    """
    if not isinstance(x, Operand):
        return quantize_for(_Gather.apply(x, index, inverse, True), feed)
    data = x.data.view(torch.uint8).index_select(0, index).view(x.data.dtype)
    scale_inv = x.scale_inv.index_select(0, index) if x.scale_inv.dim() else x.scale_inv
    return Operand(_Gather.apply(x.carrier, index, inverse, False), data, scale_inv, kept=False)


def combine_rows(rows: Tensor, index: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum each token's rows in `dtype`: rows [R, D] in the experts' order; returns [T, D]. index, inverse: as in
    `gather_rows`."""
    return _Combine.apply(rows, index, inverse, dtype)
