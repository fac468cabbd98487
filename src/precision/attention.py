"""The attention core: softmax(scale Q K^T) V with a causal mask, softmax in FP32.

On a GPU it is cuDNN's, asked for by name: PyTorch's own order of preference does not take it, and flash attention has
no MLA (its d_qk of 192 differs from its d_v of 128). It is asked for causality, never given a mask: with one, its
backward pass on Hopper has made NaNs (pytorch issue 196678).

What cuDNN does not take is known beforehand, from dtype and shapes, and goes to whatever PyTorch chooses: FP32; a
single position; head sizes that are no multiple of 8 or above 128 (256 on Hopper); GPUs before Ampere; runs that ask
PyTorch for deterministic algorithms. What it refuses beyond that is an error, not another kernel.

MLA's head sizes differ, but PyTorch's fused CPU kernel wants one, so there v is padded with zeros and the result cut.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention_core(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q, k [B, H, S, d_qk], v [B, H, S, d_v], one dtype -> [B, H, S, d_v]. Position i sees positions up to i."""
    if _is_for_cudnn(q, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    narrow = q.shape[-1] - v.shape[-1]
    if q.device.type == "cpu" and narrow > 0:
        v = F.pad(v, (0, narrow))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :-narrow]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def _is_for_cudnn(q: Tensor, v: Tensor) -> bool:
    """Whether cuDNN computes this; see the module docstring."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-2] == 1:
        return False
    sizes = q.shape[-1], v.shape[-1]
    fits = max(sizes) <= _largest_head(q.device.index) and all(size % 8 == 0 for size in sizes)
    return fits and not torch.are_deterministic_algorithms_enabled()


@torch.compiler.assume_constant_result
def _largest_head(device: int) -> int:
    """Head size up to which cuDNN serves this GPU; 0 if it does not."""
    return _largest_head_of(device)


@cache
def _largest_head_of(device: int) -> int:
    version = (torch.backends.cudnn.version() or 0) if torch.backends.cudnn.is_available() else 0
    capability = torch.cuda.get_device_capability(device)
    if version < 90000 or capability < (8, 0):
        return 0
    return 256 if capability == (9, 0) and version >= 91000 else 128
