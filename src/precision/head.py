"""The head and its loss in one op: cross entropy of h w^T that never holds all logits in memory.

The logits of 32,768 tokens over 163,840 words are 10.7 GB in BF16, and their gradient is as large. So tokens are
processed in chunks, and each chunk runs all four products while its logits exist:

    z [c, V]   = x w^T                      fprop
    dz         = (softmax(z) - onehot) / valid       over z, in its memory (`precision.cross_entropy`)
    dx [c, D]  = dz w                       dgrad
    dw [V, D] += dz^T x                     wgrad, an FP32 sum over chunks

dx [T, D] and dw are saved for backward, not x or logits. Backward multiplies them by the gradient of the loss, which is
known only then. autograd receives dw as it is, and it becomes the master's `.grad`.

The three GEMMs are those of the head's plan row, called through its backend. Transformer Engine's modules have no such
interface: with them a BF16 head uses torch's GEMMs, and an FP8 head is computed unchunked, by Linear and
`cross_entropy`.

In FP8 x is cast once and dz per chunk. With delayed scaling the scale of dz comes from its bound, 1 / valid, which most
steps reach, and not from past steps: their microbatches may have had more targets. With current scaling per tensor it
is the chunk's own. dz is the gradient of a loss of weight 1, whatever weight multiplies it later. In FP16 that would
underflow to 0: there dz and dx are gradients of `loss_scale` times the loss, and backward divides its factor by
loss_scale. Scales that are powers of two keep the mantissa of 1 / valid, and FP8 would round it alike in all rows, up
to 11 % of the gradient: there dz is divided by a power of two instead, and backward's factor makes up for it.

With tensor parallelism the words are split over ranks. Each rank computes the logits of its words at all positions of
the group. Ranks share maxima, sums and targets' logits (`split_rows`) and sum dx in FP32; dw covers the rank's own
words.

Legend: B batch, S sequence, T tokens, c tokens of a chunk, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from precision.backends import Backend, GradOperand, get_backend
from precision.cross_entropy import VocabularySplit, cross_entropy, cross_entropy_rows, mean_weight, split_rows
from precision.linear import Linear, quantize
from precision.rows import TE, GemmRecipe
from precision.scaling import Slot, scale_from_amax

_CHUNK_BYTES = 1 << 28  # size of a chunk's logits
_MIN_ROWS = 2048  # with fewer, wgrad would take longer to move its FP32 sum than to multiply
_ROUND = 128  # chunks are multiples of a GEMM's tile


def linear_cross_entropy(
    h_BSD: Tensor,
    lm_head: Linear,
    target_BS: Tensor,
    loss_scale: Tensor | None = None,
    split: VocabularySplit | None = None,
) -> Tensor:
    """Return the mean cross entropy, in nats, of lm_head(h) over the targets that are not IGNORED; 0-d FP32. Backward
    runs once.

    h [B, S, D]. target [B, S]: int64. loss_scale: 0-d FP32, the factor of the loss before its backward pass; None: no
    scaling. Without gradients, or under no_grad, only the loss is computed.

    split: lm_head holds this rank's words, and h this rank's part of the S positions. Every rank returns the mean over
    all positions. Its gradient must be the same on each rank, and counts on each.
    """
    if split is not None:
        h_BSD = split.gather(h_BSD)
    if not is_chunked(lm_head.recipe):
        return cross_entropy(lm_head(h_BSD), target_BS)
    h_TD, target_T = h_BSD.flatten(0, -2), target_BS.flatten()
    if torch.is_grad_enabled() and (h_BSD.requires_grad or lm_head.weight.requires_grad):
        return _LinearCrossEntropy.apply(h_TD, lm_head.weight, lm_head, target_T, loss_scale, split)
    return _in_chunks(h_TD, lm_head, target_T, None, False, None, split)[0]


def is_chunked(recipe: GemmRecipe) -> bool:
    """Return whether a head of this recipe is computed in chunks. An unchunked one saves its input and its logits'
    gradient."""
    return not recipe.is_fp8 or recipe.backend != TE


def bounds_gradient(recipe: GemmRecipe) -> bool:
    """Return whether the scale of dz comes from its bound, in a head with delayed scaling."""
    return recipe.is_fp8 and recipe.delayed and is_chunked(recipe)


class _LinearCrossEntropy(torch.autograd.Function):
    """See the module docstring. Backward scales the saved dw in place, so autograd refuses to run it a second time."""

    @staticmethod
    def forward(
        ctx,
        h_TD: Tensor,
        weight_VD: Tensor,
        lm_head: Linear,
        target_T: Tensor,
        loss_scale: Tensor | None,
        split: VocabularySplit | None,
    ) -> Tensor:
        dh_TD = torch.empty_like(h_TD) if ctx.needs_input_grad[0] else None
        wants_dw = ctx.needs_input_grad[1]
        loss, dw_VD, scale = _in_chunks(h_TD, lm_head, target_T, dh_TD, wants_dw, loss_scale, split)
        ctx.save_for_backward(dh_TD, dw_VD, scale)
        ctx.weight_dtype, ctx.ranks = weight_VD.dtype, 1 if split is None else split.size
        return loss

    @staticmethod
    def backward(ctx, *grads: Tensor):
        dh_TD, dw_VD, scale = ctx.saved_tensors
        factor = ctx.ranks * (grads[0] if scale is None else grads[0] / scale)
        if dh_TD is not None:  # in FP32: a BF16 factor would round the gradient first
            dh_TD = dh_TD.float().mul_(factor).to(dh_TD.dtype)
        if dw_VD is not None:
            into = dw_VD if ctx.weight_dtype == dw_VD.dtype else torch.empty_like(dw_VD, dtype=ctx.weight_dtype)
            dw_VD = torch.mul(dw_VD, factor, out=into)
        return dh_TD, dw_VD, *(None,) * 4


def _in_chunks(
    h_TD: Tensor,
    lm_head: Linear,
    target_T: Tensor,
    dh_TD: Tensor | None,
    wants_dw: bool,
    loss_scale: Tensor | None,
    split: VocabularySplit | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss, dw [V, D] FP32 if wanted, and the gradient for which dw is made, 0-d FP32 (None: 1); write dh
    into dh_TD if given."""
    recipe, operand, backend = lm_head.recipe, lm_head.operand, get_backend(lm_head.recipe.backend)
    assert operand is not None, "compute weights are missing: call precision.refresh_weights(model)"
    mean, scale = mean_weight(target_T), loss_scale
    weight = mean if loss_scale is None else mean * loss_scale
    if recipe.is_fp8 and recipe.scaling.power_of_two and loss_scale is None:
        weight = scale_from_amax(1 / mean, 1.0, 0, True)
        scale = weight / mean
    x_TD, x_inv = h_TD, None
    if lm_head.input_slot is not None:
        x_TD, x_inv = quantize(h_TD, lm_head.input_slot, recipe)
    bound = None
    if bounds_gradient(recipe):
        bound = scale_from_amax(weight, recipe.grad.max, recipe.scaling.margin, recipe.scaling.power_of_two)
    gradient, losses, dw_VD = wants_dw or dh_TD is not None, [], None
    rows = chunk_rows(len(h_TD), operand.data.shape[0], recipe.output.bytes)
    for start in range(0, len(h_TD), rows):
        part = slice(start, start + rows)
        x_cD = x_TD[part].to(recipe.input.dtype)
        inv = x_inv if x_inv is None or not x_inv.dim() else x_inv[part]
        z_cV = backend.forward(x_cD, inv, operand, None, recipe)
        if split is None:
            losses.append(cross_entropy_rows(z_cV, target_T[part], weight, gradient))
        else:
            losses.append(split_rows(z_cV, target_T[part], weight, gradient, split))
        if gradient:
            dz = _gradient_operand(z_cV, lm_head.grad_slot, bound, backend, recipe)
            if dh_TD is not None:
                dh_TD[part] = backend.dgrad(dz, operand, None, recipe)
            if wants_dw:
                dw_VD = _add_wgrad(dw_VD, dz, x_cD, inv, backend, recipe)
            del dz
        del z_cV  # before the next chunk's logits are made
    loss_T = torch.cat(losses) if losses else weight.new_zeros(0)
    if loss_scale is None:
        return (loss_T if scale is None else loss_T / weight * mean).sum(), dw_VD, scale
    return loss_T.sum() / loss_scale, dw_VD, scale


def _gradient_operand(
    dz: Tensor, slot: Slot | None, scale: Tensor | None, backend: Backend, recipe: GemmRecipe
) -> GradOperand:
    """Return dz as its GEMMs read it; in FP8 with a slot. scale: instead of the slot's."""
    if slot is None:
        dz = dz.to(recipe.grad.dtype)
        return GradOperand(dz, dz)
    own, amax = slot.rows
    return backend.quantize_grad(dz, own if scale is None else scale, amax, recipe, slot.place)


def _add_wgrad(
    dw: Tensor | None, dz: GradOperand, x: Tensor, x_inv: Tensor | None, backend: Backend, recipe: GemmRecipe
) -> Tensor:
    """Return dw + dz^T x in FP32, in dw's memory if there is one."""
    if x.is_cuda and x.dtype is torch.bfloat16 and backend.name != "reference":  # cuBLAS accumulates in FP32, in place
        if dw is None:
            return torch.mm(dz.data.t(), x, out_dtype=torch.float32)
        return torch.addmm(dw, dz.data.t(), x, out_dtype=torch.float32, out=dw)
    fresh = backend.wgrad(dz, x, x_inv, None, recipe, torch.float32)
    return fresh if dw is None else dw.add_(fresh)


def chunk_rows(tokens: int, vocabulary: int, logit_bytes: int) -> int:
    """Return the tokens per chunk: equal chunks, as few as keep a chunk's logits near _CHUNK_BYTES, at least
    _MIN_ROWS."""
    most = max(_CHUNK_BYTES // (vocabulary * logit_bytes), _MIN_ROWS, 1)
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // (chunks * _ROUND)) * _ROUND)
