"""Context parallelism by exchange of heads (DeepSpeed-Ulysses, arXiv 2309.14509), for MLA.

The c ranks of a context group read the same sequences. In every layer except the attention core, rank j holds the
positions j S/c to (j+1) S/c of each sequence. In the core it holds the heads j H/c to (j+1) H/c over all positions:

    q [B, S/c, H, N + R]          all-to-all   -> [B, S, H/c, N + R]
    k_nope, v [B, S/c, H, N + V]  all-to-all   -> [B, S, H/c, N + V]          one message
    k_rope [B, S/c, 1, R]         all-gather   -> [B, S, H/c, R]              one for all heads, sent once
    o [B, S, H/c, V]              all-to-all   -> [B, S/c, H, V]

The core, its mask and its positions are the same as in one process, and each rank computes an equal share of the causal
triangle. The backward pass sends gradients the other way. A rank's gradient of k_rope is a sum over its own heads. It
is summed in FP32, added over the ranks in FP32, and rounded once, as within one process.

Targets, inputs of multi-token prediction and documents depend on other positions. They are computed from the whole rows
of tokens, which every rank has: shifted first, split afterwards. The balance loss counts choices over the whole
sequence (`router`).

Legend: B batch, S sequence, H heads, N nope, R rope, V value width of a head, d width, c ranks of the group.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.messages import exchange, gather, in_pieces, join_pieces, reduce, sum_of_pieces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ContextSplit:
    """This process's position in a context group: `rank` of `size`. Methods that communicate are collectives of the
    group."""

    def __init__(self, group: "ProcessGroup"):
        self.size, self.rank, self.name = group.size(), group.rank(), group.group_name

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's positions [., S/c, ...] of x [., S, ...]."""
        length = x.shape[1] // self.size
        return x.narrow(1, self.rank * length, length)

    def own_heads(self, heads: int) -> range:
        """Return this rank's heads in the attention core, of `heads` in all."""
        each = heads // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def window(self, tokens: Tensor, further: int) -> Tensor:
        """Return this rank's part of the first S tokens and the `further` tokens after it, [B, S/c + further].

        tokens [B, S + 1]; past the end the last token is repeated.
        """
        length = (tokens.shape[1] - 1) // self.size
        first = self.rank * length
        place = torch.arange(first, first + length + further, device=tokens.device)
        return tokens[:, place.clamp(max=tokens.shape[1] - 1)]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the group, without gradient."""
        return reduce(x, "sum", self.name)

    def to_heads(self, x_BsHd: Tensor) -> Tensor:
        """Exchange own positions of all heads [B, S/c, H, d] for all positions of own heads [B, S, H/c, d]."""
        return _Exchange.apply(x_BsHd, True, self.size, self.name)

    def to_positions(self, x_BShd: Tensor) -> Tensor:
        """Exchange all positions of own heads [B, S, H/c, d] for own positions of all heads [B, S/c, H, d]."""
        return _Exchange.apply(x_BShd, False, self.size, self.name)

    def for_heads(self, x_BsR: Tensor, heads: int) -> Tensor:
        """Gather a tensor that all heads share: own positions [B, S/c, R] -> all positions [B, S, heads, R]."""
        return _ForHeads.apply(x_BsR, heads, self.size, self.name)


class _Exchange(torch.autograd.Function):
    """To heads or to positions, and back."""

    @staticmethod
    def forward(ctx, x: Tensor, to_heads: bool, size: int, group: str) -> Tensor:
        ctx.back, ctx.size, ctx.group = not to_heads, size, group
        return _exchange(x, to_heads, size, group)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return _exchange(grads[0], ctx.back, ctx.size, ctx.group), None, None, None


class _ForHeads(torch.autograd.Function):
    """[B, S/c, R] -> [B, S, heads, R]; the gradient is summed over heads and ranks in FP32."""

    @staticmethod
    def forward(ctx, x_BsR: Tensor, heads: int, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return join_pieces(gather(x_BsR, size, group))[:, :, None].expand(-1, -1, heads, -1)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        own_heads_BSR = grads[0].sum(2, dtype=torch.float32)
        summed_BsR = sum_of_pieces(in_pieces(own_heads_BSR, ctx.size), ctx.size, ctx.group)
        return summed_BsR.to(grads[0].dtype), None, None, None


def _exchange(x: Tensor, to_heads: bool, size: int, group: str) -> Tensor:
    if to_heads:  # [B, s, H, d]
        pieces_cBshd = x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4)
        return join_pieces(exchange(pieces_cBshd, size, group))
    pieces_cBshd = exchange(in_pieces(x, size), size, group)
    return pieces_cBshd.permute(1, 2, 0, 3, 4).flatten(2, 3)
