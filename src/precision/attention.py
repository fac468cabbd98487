"""The attention core: softmax(scale Q K^T) V with a causal mask, softmax in FP32.

*On a GPU* cuDNN computes it, called by name: PyTorch's own selection skips cuDNN, and flash attention does not support
MLA (d_qk of 192, d_v of 128). cuDNN is called with its causal flag and never with a mask: its masked backward pass has
produced NaNs on Hopper (pytorch issue 196678).

cuDNN supports BF16 and FP16, head sizes that are multiples of 8 up to 256 on Hopper, and two positions or more. In all
other cases, and when a run asks for deterministic algorithms, PyTorch selects among its other kernels. The operator is
called directly, because a selection made by a context manager is lost when a compiled block is recomputed in its
backward pass.

*On a CPU* PyTorch's fused kernel requires d_qk = d_v. So v is padded with zeros and the result is cut.

The log-sum-exp that a kernel saves for backward also bounds the largest logit: see `max_logits`.

*Within documents* position i sees positions j with start(i) <= j <= i. On a GPU our own kernel computes this
(`kernels.document_attention`) and skips everything that is masked. Elsewhere, and in FP32, PyTorch with a boolean mask
computes it; this is also the reference that the kernel is tested against. The alternatives do not work: masked cuDNN
has produced NaNs; cuDNN's variable-length backward pass in PyTorch 2.11 mistakes d_qk for the longest document and
writes outside its memory (pytorch pull request 186142); flash attention requires one head size and a list of documents
whose length the host knows; flex_attention rounds 192 up to 256, and outside a compiled graph it materialises the
scores.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from precision.hardware import HOPPER
from precision.max_logits import raise_max_logits
from precision.proof import ATTENTION, refused

LOG_2 = math.log(2)


def attention_core(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, max_logits_H: Tensor | None = None
) -> Tensor:
    """Compute causal attention of q, k [B, H, S, d_qk] and v [B, H, S, d_v], one dtype; return [B, H, S, d_v].

    mask: from `document_mask`, for this or a narrower dtype and these head sizes; restricts each position to its own
    document.
    max_logits [H] FP32: raised as in `max_logits`, if the kernel returns a log-sum-exp (`returns_lse`).
    """
    if mask is not None and q.dtype not in (torch.bfloat16, torch.float16):  # a block in FP32 beside others
        mask = visible(mask, q.shape[-2], q.device)
    out, lse = _attention(q, k, v, scale, mask)
    if max_logits_H is not None and lse is not None:
        is_base_2 = mask is not None and mask.dtype is torch.int32  # our kernel's
        raise_max_logits(max_logits_H, lse, LOG_2 if is_base_2 else 1.0)
    return out


def returns_lse(device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int, documents: bool) -> bool:
    """Return whether `attention_core` gets a log-sum-exp on this device, for these head sizes and two positions or
    more. documents: whether attention stays within documents."""
    if device.type != "cuda":
        return True
    return (_kernel_takes if documents else _cudnn_takes)(device, dtype, d_qk, d_v)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the result, and the log-sum-exp of each row's logits [B, H, S] or [B, H, S, 1], or None."""
    if mask is not None and mask.dtype is torch.int32:
        return torch.ops.octet.document_attention(q, k, v, mask, scale)
    if not q.is_cuda:
        return _on_cpu(q, k, v, scale, mask)
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale), None
    if q.shape[-2] > 1 and _cudnn_takes(q.device, q.dtype, q.shape[-1], v.shape[-1]):
        # no bias, keep the log-sum-exp, no dropout, causal, no debug mask
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = cudnn(q, k, v, None, True, 0.0, True, False, scale=scale)
        return out, lse
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale), None


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call PyTorch's fused kernel. It requires d_qk = d_v, so the narrower one is padded with zeros."""
    width, wide = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (t if t.shape[-1] == wide else F.pad(t, (0, wide - t.shape[-1])) for t in (q, k, v))
    bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    out, lse = _CpuCore.apply(q, k, v, bias, scale)
    return out if width == wide else out[..., :width], lse


class _CpuCore(torch.autograd.Function):
    """PyTorch's fused kernels by name, for the log-sum-exp. Backward computes in FP32: in BF16 its kernel takes
    three to four times as long."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, bias)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, *grads: Tensor):
        q, k, v, out, lse, bias = ctx.saved_tensors
        dtype = torch.promote_types(q.dtype, torch.float32)
        wide = [t.to(dtype) for t in (grads[0], q, k, v, out)]
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        bias = None if bias is None else bias.to(dtype)
        made = flash(*wide, lse, 0.0, bias is None, attn_mask=bias, scale=ctx.scale)
        return *(dx.to(q.dtype) for dx in made), None, None


def latent_attention(
    q: Tensor, latent: Tensor, rank: int, scale: float, key_factor_BHL: Tensor | None = None
) -> Tensor:
    """Attend from all heads to one shared key and value per position: softmax(scale q latent^T) latent, cut to `rank`.

    q [B, H, T, C], latent [B, L, C], one dtype; returns [B, H, T, rank]. The T queries are the last of the L positions,
    and each sees the positions up to its own. Scores and softmax are in FP32. The heads are computed as queries of one
    head, so the latent is not repeated for them. Two products, because cuDNN's attention would plan each new length L,
    50 ms on an H200.

    key_factor [B, H, L] FP32: multiplies the scores of a key, per head.
    """
    (B, H, T, _), L = q.shape, latent.shape[1]
    score_BHTL = (q.flatten(1, 2).float() @ latent.mT.float()).view(B, H, T, L) * scale
    if key_factor_BHL is not None:
        score_BHTL *= key_factor_BHL[:, :, None]
    if T > 1:
        seen_TL = torch.ones(T, L, dtype=torch.bool, device=q.device).tril(L - T)
        score_BHTL.masked_fill_(~seen_TL, -torch.inf)
    share = score_BHTL.softmax(-1).to(q.dtype).flatten(1, 2)
    return (share @ latent[..., :rank]).view(B, H, T, rank)


def document_mask(bounds_2BS: Tensor, dtype: torch.dtype, d_qk: int, d_v: int) -> Tensor:
    """Return the mask that keeps `attention_core` within documents; one mask serves all blocks.

    bounds [2, B, S] int32: the first position of each position's document, and the one after its last. Returned
    unchanged where the kernel supports q, k and v of this dtype and these head sizes; else as a boolean mask [B, 1, S,
    S].
    """
    if _kernel_takes(bounds_2BS.device, dtype, d_qk, d_v):
        return bounds_2BS.contiguous()
    return _within(bounds_2BS)


def visible(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return which positions are visible, [S, S] or [B, 1, S, S] bool, for a mask from `document_mask`. None: plain
    causal."""
    if mask is None:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if mask.dtype is torch.bool else _within(mask)


def _within(bounds_2BS: Tensor) -> Tensor:
    """Return the boolean mask [B, 1, S, S] of these document bounds."""
    start_BS = bounds_2BS[0]
    place_S = torch.arange(start_BS.shape[1], device=start_BS.device)
    return ((place_S >= start_BS[..., None]) & (place_S <= place_S[:, None]))[:, None]


def _kernel_takes(device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int) -> bool:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or ATTENTION in refused:
        return False
    import precision.kernels.attention_ops  # noqa: F401  (makes torch.ops.octet.document_attention)
    from precision.kernels.document_attention import LARGEST, SHARED_MEMORY

    gpu = torch.cuda.get_device_properties(device)
    return max(d_qk, d_v) <= LARGEST and gpu.shared_memory_per_block_optin >= SHARED_MEMORY


def _cudnn_takes(device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int) -> bool:
    """Return whether cuDNN supports this; assumes two positions or more."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and max(d_qk, d_v) <= 256
        and not (d_qk % 8 or d_v % 8)
        and not torch.are_deterministic_algorithms_enabled()
        and torch.cuda.get_device_properties(device).major == HOPPER[0]
    )
