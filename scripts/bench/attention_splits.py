"""One attention layer cut over ranks by hand, in the ways that tensor_attention.py measures; the equations are there.

A layer has one sequence x [T, D], its own weights and `forward`; autograd derives the backward pass with its messages.
Legend: T positions, D hidden, H heads, N nope, R rope, V value width of a head, t ranks.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from models.context import ContextSplit
from models.layers import rope_table
from precision import apply_rope, attention_core


class Messages(ContextSplit):
    """Messages of a group, and the bytes that a rank sends. silent: copies within the rank instead."""

    def __init__(self, group: dist.ProcessGroup, silent: bool):
        super().__init__(group)
        self.group, self.silent, self.sent = group, silent, 0.0

    def count(self, numbers: int, size: int, times: float = 1.0) -> None:
        """Count a message of this many numbers of all ranks, of `size` bytes each; `times` passes over the ring."""
        self.sent += times * numbers * size * (self.size - 1) / self.size

    def all_reduce(self, x: Tensor, wait: bool = True) -> Callable[[], object]:
        """Sum x in place. Returns a function that waits for it."""
        self.count(x.numel(), x.element_size(), 2)
        work = None if self.silent else dist.all_reduce(x, group=self.group, async_op=not wait)
        return work.wait if work is not None else lambda: None

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        x = x.clone(memory_format=torch.contiguous_format)
        self.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather [T / t, .] to [T, .]."""
        self.count(x.numel() * self.size, x.element_size())
        if self.silent:
            return x.repeat(self.size, 1)
        gather = torch.ops._c10d_functional.all_gather_into_tensor
        return torch.ops._c10d_functional.wait_tensor(gather(x.contiguous(), self.size, self.name))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum of [T, .] at own positions [T / t, .], added in FP32, as the gradients of one rank are."""
        wide = x.float()
        self.count(wide.numel(), wide.element_size())
        if self.silent:
            return wide[: len(x) // self.size].clone().to(x.dtype)
        scatter = torch.ops._c10d_functional.reduce_scatter_tensor
        part = torch.ops._c10d_functional.wait_tensor(scatter(wide.contiguous(), "sum", self.size, self.name))
        return part.to(x.dtype)

    def to_heads(self, x_BsHd: Tensor) -> Tensor:
        self.count(x_BsHd.numel(), x_BsHd.element_size(), 2)
        if self.silent:
            return x_BsHd[:, :, : x_BsHd.shape[2] // self.size].repeat(1, self.size, 1, 1)
        return super().to_heads(x_BsHd)

    def to_positions(self, x_BShd: Tensor) -> Tensor:
        self.count(x_BShd.numel(), x_BShd.element_size(), 2)
        if self.silent:
            return x_BShd[:, : x_BShd.shape[1] // self.size].repeat(1, 1, self.size, 1)
        return super().to_positions(x_BShd)

    def for_heads(self, x_BsR: Tensor, heads: int) -> Tensor:
        self.count(x_BsR.numel() * self.size, x_BsR.element_size() + 4)
        if self.silent:
            return x_BsR.repeat(1, self.size, 1)[:, :, None].expand(-1, -1, heads, -1)
        return super().for_heads(x_BsR, heads)


class _Message(torch.autograd.Function):
    """One message forward, another one backward."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return ctx.back(grads[0]), None, None


def nothing(x: Tensor) -> Tensor:
    """Send no message."""
    return x.view_as(x)


class _Column(torch.autograd.Function):
    """f and a product by columns: dx travels while dw is computed."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, messages: Messages) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.messages = messages
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, w = ctx.saved_tensors
        dx = grads[0] @ w
        wait = ctx.messages.all_reduce(dx, wait=False)
        dw = grads[0].t() @ x
        wait()
        return dx, dw, None


class One:
    """The layer on one rank. Subclasses override how weights and positions are cut, and what travels."""

    splits_positions = False
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    def __init__(self, options: argparse.Namespace, messages: Messages, whole: dict[str, Tensor], x: Tensor):
        self.o, self.messages = options, messages
        self.heads = options.heads // (messages.size if self.columns else 1)
        self.weights = {k: self.own(k, w).detach().clone().requires_grad_() for k, w in whole.items()}
        self.x = self.at_own(x).detach().clone().requires_grad_()
        self.rope_2SP = rope_table(len(x), options.rope, 10000.0, None, x.device)
        self.own_2SP = messages.own(self.rope_2SP) if self.splits_positions else self.rope_2SP

    def own(self, name: str, w: Tensor) -> Tensor:
        """Return this rank's part of a whole weight."""
        dim = 0 if name in self.columns else 1 if name in self.rows else None
        return w if dim is None else w.chunk(self.messages.size, dim)[self.messages.rank]

    def at_own(self, x: Tensor) -> Tensor:
        """Return this rank's positions of x [T, .]."""
        return x.chunk(self.messages.size)[self.messages.rank] if self.splits_positions else x

    def enter(self, x: Tensor) -> Tensor:
        """Apply f: return the input of own heads, at all positions."""
        return x

    def column(self, x: Tensor, name: str) -> Tensor:
        """Apply f and a product with own columns."""
        return F.linear(self.enter(x), self.weights[name])

    def leave(self, out_TV: Tensor) -> Tensor:
        """Apply o and g."""
        return F.linear(out_TV, self.weights["o"])

    def forward(self) -> Tensor:
        """Map x [T or T / t, D] to y of the same shape."""
        o, w, rope = self.o, self.weights, self.own_2SP
        latent, k_rope = self.x, None
        if "kv_a" in w:
            latent, k_rope = F.linear(self.x, w["kv_a"]).split([o.latent, o.rope], -1)
            latent = F.rms_norm(latent, (o.latent,), eps=1e-6)
            k_rope = apply_rope(k_rope[None, :, None], rope)[0, :, 0]
        q, kv = (self.column(x, name).unflatten(-1, (self.heads, -1)) for x, name in ((self.x, "q"), (latent, "kv_b")))
        return self.leave(self.core(q, kv, k_rope).flatten(1))

    def core(self, q_THd: Tensor, kv_THx: Tensor, k_rope_TR: Tensor | None) -> Tensor:
        """Compute own heads at all positions: [T, H, V]."""
        shared = None if k_rope_TR is None else self.enter(k_rope_TR)[:, None].expand(-1, q_THd.shape[1], -1)
        return self.attention(q_THd, kv_THx, shared)

    def attention(self, q_THd: Tensor, kv_THx: Tensor, k_rope_THR: Tensor | None) -> Tensor:
        """Return causal attention of this rank's heads, at all positions."""
        o = self.o
        if k_rope_THR is not None:
            q_nope, q_rope = q_THd.split([o.nope, o.rope], -1)
            q_THd = torch.cat([q_nope, apply_rope(q_rope[None], self.rope_2SP)[0]], -1)
        k, v = kv_THx.split([o.nope, o.value], -1)
        k = k if k_rope_THR is None else torch.cat([k, k_rope_THR], -1)
        q, k, v = (t.transpose(0, 1)[None] for t in (q_THd, k, v))
        return attention_core(q, k, v, q_THd.shape[-1] ** -0.5)[0].transpose(0, 1)


class TensorSplit(One):
    """Megatron-LM's: columns, then rows."""

    columns, rows = ("q", "kv_b"), ("o",)

    def enter(self, x: Tensor) -> Tensor:
        return _Message.apply(x, nothing, self.messages.sum)

    def leave(self, out_TV: Tensor) -> Tensor:
        return _Message.apply(super().leave(out_TV), self.messages.sum, nothing)


class Overlapped(TensorSplit):
    """f's sum beside the weight's gradient."""

    def column(self, x: Tensor, name: str) -> Tensor:
        return _Column.apply(x, self.weights[name], self.messages)


class Sequence(TensorSplit):
    """Own positions outside."""

    splits_positions = True

    def enter(self, x: Tensor) -> Tensor:
        return _Message.apply(x, self.messages.all_gather, self.messages.reduce_scatter)

    def leave(self, out_TV: Tensor) -> Tensor:
        y_TD = F.linear(out_TV, self.weights["o"])
        return _Message.apply(y_TD, self.messages.reduce_scatter, self.messages.all_gather)


class Exchanged(Sequence):
    """o whole, of own positions."""

    rows = ()

    def leave(self, out_TV: Tensor) -> Tensor:
        out_1THV = out_TV.unflatten(-1, (self.heads, -1))[None]
        return F.linear(self.messages.to_positions(out_1THV)[0].flatten(1), self.weights["o"])


class Context(One):
    """Ulysses."""

    splits_positions = True

    def core(self, q_THd: Tensor, kv_THx: Tensor, k_rope_TR: Tensor | None) -> Tensor:
        m = self.messages
        shared = None if k_rope_TR is None else m.for_heads(k_rope_TR[None], self.heads // m.size)[0]
        out = self.attention(m.to_heads(q_THd[None])[0], m.to_heads(kv_THx[None])[0], shared)
        return m.to_positions(out[None])[0]


VARIANTS: dict[str, type[One]] = {
    "tensor": TensorSplit,
    "overlapped": Overlapped,
    "sequence": Sequence,
    "exchanged": Exchanged,
    "context": Context,
}
