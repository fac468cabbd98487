"""Tensor parallelism: heads of MLA and vocabulary over t neighbouring ranks (Megatron-LM, arXiv 1909.08053), with
sequence parallelism for the layers between (arXiv 2205.05198).

The t ranks of a tensor group read the same sequences. Outside attention, embedding and head, rank j holds a piece of
the positions, as in a context group. Inside them it holds a part of the weights:

    q or q_b, kv_b    rows of the heads j H/t to (j + 1) H/t        column-parallel in the paper
    o                 columns of the same heads                     row-parallel in the paper
    embedding, head   the vocabulary entries j V/t to (j + 1) V/t

    gather    own positions -> all positions of the group           backward: sum at own positions, in FP32
    scatter   partial sums of all positions -> sum at own ones      backward: gather

The latents are gathered, not x, and the rotated key in the same message. Without a latent of queries q reads the
gathered x. Gradients of gathered tensors are sums over own heads: they are added over the ranks in FP32 and rounded
once. The head reads the state at all positions of the group; its loss is the same on all t ranks (`precision.head`).

A gather is two operators, `begin` and `finish`, so that GEMMs run between them in both directions: `finish` starts a
communication in the backward pass, and `begin` waits for it. Autograd runs the last operators first:

    forward     kv_a; begin kv; q_a; begin q; finish kv; kv_b; finish q; q_b
    backward    q_b; its sum starts; kv_b; its sum starts; wait for q's; q_a; wait for kv's; kv_a

So kv_b's two GEMMs hide the sum of q's gradients, and q_a's hide the sum of the other. The scatter after o is not
hidden.

All other weights are the same on the t ranks. Each rank sees its own positions only, so their gradients are partial
sums, which are added up once per step (`trainer.parallel.shard_views.add_up`). Combined with context parallelism, a
tensor group has a piece of the sequence, and its heads are exchanged among the ranks of the context group.

Legend: B batch, S positions of the tensor group, D width, H heads, V vocabulary, t ranks of the group.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.context import ContextSplit
from models.messages import gather, in_pieces, join_pieces, reduce, start_gather, start_sum, sum_of_pieces, wait
from precision import Linear

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


CUT = {"attn.q": 0, "attn.q_b": 0, "attn.kv_b": 0, "attn.o": 1, "lm_head": 0}
"""The dimension of a weight [N, K] that is split over ranks, by op of the precision plan."""


class TensorSplit(ContextSplit):
    """This process's position in a tensor group: `rank` of `size`. Methods that communicate are collectives of the
    group."""

    def __init__(self, group: "ProcessGroup"):
        super().__init__(group)
        self.cut: list[tuple[nn.Module, int]] = []
        """Modules whose `weight` is this rank's part, and the dimension that is split."""

    def keep(self, layer: nn.Module, dim: int) -> None:
        """Keep this rank's part of the layer's weight only. Call it before the arena is made."""
        part = layer.weight.detach().chunk(self.size, dim)[self.rank]  # type: ignore[operator]
        layer.weight = nn.Parameter(part.clone())
        if isinstance(layer, Linear):
            layer.operand = None
        self.cut.append((layer, dim))

    def begin(self, x_BsD: Tensor) -> tuple[Tensor, Tensor]:
        """Start to send own positions [B, S/t, D]; return the argument of `finish`."""
        return _Begin.apply(x_BsD, self.size, self.name)

    def finish(self, pending: tuple[Tensor, Tensor]) -> Tensor:
        """Return all positions of the group [B, S, D], once they have arrived."""
        return _Finish.apply(*pending, self.size, self.name)

    def gather(self, x_BsD: Tensor) -> Tensor:
        """Gather own positions [B, S/t, D] into all of the group [B, S, D]."""
        return self.finish(self.begin(x_BsD))

    def scatter(self, x_BSD: Tensor) -> Tensor:
        """Sum partial sums at all positions of the group [B, S, D]; return the sum at own positions [B, S/t, D]."""
        return _Scatter.apply(x_BSD, self.size, self.name)

    def pieces(self, x: Tensor) -> Tensor:
        """Return the x of each rank, [t, ...], without gradient."""
        return gather(x, self.size, self.name)

    def max(self, x: Tensor) -> Tensor:
        """Return the group's maximum, without gradient."""
        return reduce(x, "max", self.name)


class _Begin(torch.autograd.Function):
    """x [B, s, D] -> an autograd edge [B, s, D] for the gradient, FP32 without memory; and x of all ranks [t, B, s, D],
    perhaps still in transit."""

    @staticmethod
    def forward(ctx, x_BsD: Tensor, size: int, group: str) -> tuple[Tensor, Tensor]:
        ctx.dtype = x_BsD.dtype
        pieces_tBsD = start_gather(x_BsD, size, group)
        ctx.mark_non_differentiable(pieces_tBsD)
        return x_BsD.new_empty(1, dtype=torch.float32).expand(x_BsD.shape), pieces_tBsD

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return wait(grads[0]).to(ctx.dtype), None, None


class _Finish(torch.autograd.Function):
    """Second half of a gather. Its gradient reaches `_Begin` perhaps still in transit."""

    @staticmethod
    def forward(ctx, edge_BsD: Tensor, pieces_tBsD: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return join_pieces(wait(pieces_tBsD))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        pieces_tBsD = in_pieces(grads[0].float(), ctx.size)
        return start_sum(pieces_tBsD, ctx.size, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BSD: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return sum_of_pieces(in_pieces(x_BSD, size), size, group)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return join_pieces(gather(grads[0], ctx.size, ctx.group)), None, None


class SplitLookup(torch.autograd.Function):
    """Rows of a table [V, D] of which each rank holds V/t: tokens int64 [...] of this rank -> [..., D].

    Each rank looks up all ranks' tokens among the entries that it holds. Only one summand of a token is not zero, so
    the sum is exact.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor, table: Tensor, split: TensorSplit) -> Tensor:
        local = split.pieces(tokens) - split.rank * weight.shape[0]
        here = (local >= 0) & (local < weight.shape[0])
        ctx.save_for_backward(local, here)
        ctx.rows, ctx.dtype, ctx.split = weight.shape[0], weight.dtype, split
        found = nn.functional.embedding(local.where(here, 0), table) * here[..., None]
        return sum_of_pieces(found, split.size, split.name)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        local, here = ctx.saved_tensors
        dy = ctx.split.pieces(grads[0]).to(ctx.dtype) * here[..., None]
        dw = torch.ops.aten.embedding_dense_backward(dy, local.where(here, 0), ctx.rows, -1, False)
        return None, dw, None, None
