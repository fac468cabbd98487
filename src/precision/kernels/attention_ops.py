"""Attention within documents as a custom PyTorch operator with its backward pass: see `document_attention`.

Recomputation refers to it by name, and saves its result (`trainer.parallel.blocks`).
"""

from typing import Any

import torch
from torch import Tensor

from precision.kernels import document_attention as _kernels
from precision.kernels.attention_tiles import by_position
from precision.kernels.common import readable


@torch.library.custom_op("octet::document_attention", mutates_args=())
def document_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the result and the log-sum-exp, which backward needs; see `document_attention.forward`."""
    return _kernels.forward(*map(readable, (q, k, v)), bounds, scale)


@document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return by_position(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("octet::document_attention_backward", mutates_args=())
def document_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v = map(readable, (dout, q, k, v))
    return _kernels.backward(dout, q, k, v, bounds, readable(out), lse.contiguous(), scale)


@document_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    D, V = q.shape[-1], v.shape[-1]
    return by_position(q, D), by_position(q, D), by_position(q, V)


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, bounds, *output)


def _backward(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, bounds, out, lse = ctx.saved_tensors
    dq, dk, dv = document_attention_backward(dout, q, k, v, bounds, out, lse, ctx.scale)
    return dq, dk, dv, None, None


document_attention.register_autograd(_backward, setup_context=_keep)
