"""The head and its loss in one: cross entropy of h w^T without all logits ever in memory.

32,768 tokens by 163,840 words are 10.7 GB of logits in BF16, and as much of their gradient. So the tokens are taken in
chunks, and each chunk goes all the way while its logits exist:

    z [c, V]   = x w^T                      fprop
    dz         = (softmax(z) - onehot) / valid       over z, in its memory (`precision.cross_entropy`)
    dx [c, D]  = dz w                       dgrad
    dw [V, D] += dz^T x                     wgrad, an FP32 sum over chunks

What is kept for the backward pass is dx [T, D] and dw; backward multiplies them by the gradient of the loss, which is
known only then. Not x, nor logits. dw is handed to autograd as it is and becomes the master's `.grad`.

The three GEMMs are those of the head's plan row, through its backend's door (Transformer Engine's modules have none:
beside them a head in BF16 is torch's). A head in FP8 is computed whole, by Linear and `cross_entropy`, since the scale
of one gradient is meant for all of its tokens.

Legend: B batch, S sequence, T tokens, c tokens of a chunk, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from precision.backends import Backend, GradOperand, WeightOperand, get_backend
from precision.cross_entropy import cross_entropy, cross_entropy_rows, mean_weight
from precision.linear import Linear
from precision.rows import GemmRecipe

_CHUNK_BYTES = 1 << 28  # of a chunk's logits
_MIN_ROWS = 2048  # fewer would have wgrad move its FP32 sum for longer than it multiplies
_ROUND = 128  # chunks of tokens are multiples of what a GEMM's tile holds


def linear_cross_entropy(h_BSD: Tensor, lm_head: Linear, target_BS: Tensor) -> Tensor:
    """Mean cross entropy, in nats, of lm_head(h) over the targets that are not IGNORED; 0-d FP32. Backward works once.

    h [B, S, D]. target [B, S]: int64. Without gradients, or under no_grad, only the loss is computed.
    """
    recipe, operand = lm_head.recipe, lm_head.operand
    if not is_chunked(recipe):
        return cross_entropy(lm_head(h_BSD), target_BS)
    assert operand is not None, "compute weights are missing: call precision.refresh_weights(model)"
    h_TD, target_T = h_BSD.flatten(0, -2), target_BS.flatten()
    if torch.is_grad_enabled() and (h_BSD.requires_grad or lm_head.weight.requires_grad):
        return _LinearCrossEntropy.apply(h_TD, lm_head.weight, operand, target_T, recipe)
    return _in_chunks(h_TD, operand, target_T, recipe, None, False)[0]


def is_chunked(recipe: GemmRecipe) -> bool:
    """Whether a head of this recipe is computed in chunks; a whole one keeps its input and its logits' gradient."""
    return not recipe.is_fp8


class _LinearCrossEntropy(torch.autograd.Function):
    """See the module docstring. Backward scales the kept dw in place: autograd refuses to run it a second time."""

    @staticmethod
    def forward(
        ctx, h_TD: Tensor, weight_VD: Tensor, operand: WeightOperand, target_T: Tensor, recipe: GemmRecipe
    ) -> Tensor:
        dh_TD = torch.empty_like(h_TD) if ctx.needs_input_grad[0] else None
        loss, dw_VD = _in_chunks(h_TD, operand, target_T, recipe, dh_TD, ctx.needs_input_grad[1])
        ctx.save_for_backward(dh_TD, dw_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx, *grads: Tensor):
        dh_TD, dw_VD = ctx.saved_tensors
        if dh_TD is not None:  # in FP32: as a factor of BF16 the gradient would be rounded first
            dh_TD = dh_TD.float().mul_(grads[0]).to(dh_TD.dtype)
        if dw_VD is not None:
            into = dw_VD if ctx.weight_dtype == dw_VD.dtype else torch.empty_like(dw_VD, dtype=ctx.weight_dtype)
            dw_VD = torch.mul(dw_VD, grads[0], out=into)
        return dh_TD, dw_VD, None, None, None


def _in_chunks(
    h_TD: Tensor, operand: WeightOperand, target_T: Tensor, recipe: GemmRecipe, dh_TD: Tensor | None, wants_dw: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss, and dw [V, D] FP32 if wanted, both for a gradient of 1; dh is written into dh_TD if given."""
    backend = get_backend(recipe.backend)
    weight = mean_weight(target_T)
    gradient = wants_dw or dh_TD is not None
    losses, dw_VD = [], None
    rows = chunk_rows(len(h_TD), operand.data.shape[0], recipe.output.bytes)
    for start in range(0, len(h_TD), rows):
        part = slice(start, start + rows)
        x_cD = h_TD[part].to(recipe.input.dtype)
        z_cV = backend.forward(x_cD, None, operand, None, recipe)
        losses.append(cross_entropy_rows(z_cV, target_T[part], weight, gradient))
        if gradient:
            dz_cV = z_cV.to(recipe.grad.dtype)
            dz = GradOperand(dz_cV, dz_cV)
            if dh_TD is not None:
                dh_TD[part] = backend.dgrad(dz, operand, None, recipe)
            if wants_dw:
                dw_VD = _add_wgrad(dw_VD, dz, x_cD, backend, recipe)
            del dz_cV, dz
        del z_cV  # before the next chunk's are made
    return torch.cat(losses).sum() if losses else weight.new_zeros(()), dw_VD


def _add_wgrad(dw: Tensor | None, dz: GradOperand, x: Tensor, backend: Backend, recipe: GemmRecipe) -> Tensor:
    """dw + dz^T x in FP32, in dw's memory if there is one."""
    if x.is_cuda and x.dtype is torch.bfloat16 and backend.name != "reference":  # cuBLAS adds up in FP32, in place
        if dw is None:
            return torch.mm(dz.data.t(), x, out_dtype=torch.float32)
        return torch.addmm(dw, dz.data.t(), x, out_dtype=torch.float32, out=dw)
    fresh = backend.wgrad(dz, x, None, None, recipe, torch.float32)
    return fresh if dw is None else dw.add_(fresh)


def chunk_rows(tokens: int, vocabulary: int, logit_bytes: int) -> int:
    """Tokens of a chunk: equal chunks, as few as keep a chunk's logits near _CHUNK_BYTES, but not below _MIN_ROWS."""
    most = max(_CHUNK_BYTES // (vocabulary * logit_bytes), _MIN_ROWS, 1)
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // (chunks * _ROUND)) * _ROUND)
