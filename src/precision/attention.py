"""The attention core: softmax(scale Q K^T) V with a causal mask, softmax in FP32."""

import torch.nn.functional as F
from torch import Tensor


def attention_core(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q, k [B, H, S, d_qk], v [B, H, S, d_v], one dtype -> [B, H, S, d_v]. Position i sees positions up to i.

    MLA's d_qk differs from d_v; PyTorch's fused CPU kernel wants one head size, so v is padded with zeros there (and
    the result cut).
    """
    narrow = q.shape[-1] - v.shape[-1]
    if q.device.type == "cpu" and narrow > 0:
        v = F.pad(v, (0, narrow))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :-narrow]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
