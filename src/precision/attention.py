"""The attention core: softmax(scale Q K^T) V with a causal mask, softmax in FP32.

On a GPU it is cuDNN's, asked for by name: PyTorch's own order of preference does not take it, and flash attention has
no MLA (its d_qk of 192 differs from its d_v of 128). It is asked for causality, never given a mask: with one, its
backward pass on Hopper has made NaNs (pytorch issue 196678).

cuDNN takes BF16 and FP16, head sizes that are multiples of 8 up to 256 on Hopper (128 on other GPUs from Ampere on;
192 / 128 on Blackwell), and two positions or more. PyTorch checks that beforehand, from dtype, shapes and GPU, and for
what is left takes the next kernel of the list below. So it does for runs that ask for deterministic algorithms.

MLA's head sizes differ, but PyTorch's fused CPU kernel wants one, so there v is padded with zeros and the result cut.
"""

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

GPU_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]  # the first that can


def attention_core(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q, k [B, H, S, d_qk], v [B, H, S, d_v], one dtype -> [B, H, S, d_v]. Position i sees positions up to i."""
    if q.is_cuda:
        return _first_that_can(q, k, v, scale)
    narrow = q.shape[-1] - v.shape[-1]
    if narrow > 0:
        v = F.pad(v, (0, narrow))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :-narrow]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def _first_that_can(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    with sdpa_kernel(GPU_KERNELS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
