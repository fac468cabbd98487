"""Cross entropy over a large vocabulary.

    loss = mean over valid t of  logsumexp(z_t) - z_t[y_t]           dz_t = (softmax(z_t) - onehot(y_t)) / valid

The backward pass needs only dz of the logits z [T, V]. So `cross_entropy_rows`, a PyTorch operator that graphs can
hold, computes dz together with the loss and overwrites the logits with it, in their own format. On a GPU it is a kernel
(`precision.kernels.cross_entropy`). Elsewhere the reference below computes it, which converts slices of rows to FP32 in
a small buffer that stays in a CPU's cache.

`cross_entropy` takes logits that exist. `precision.head` never materialises all of them.

Legend: B batch, S sequence, T tokens, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor

from precision.proof import LOSS, refused

IGNORED = -100  # a target that counts for nothing; PyTorch's own convention
_SLICE_ELEMENTS = 1 << 18  # of the twin's FP32 buffer


def plain_rows(logits: Tensor, target: Tensor, weight: Tensor, gradient: bool) -> Tensor:
    """Return the losses [T] FP32, times weight; with `gradient`, overwrite the logits with dz, times weight.

    logits [T, V]: any floating dtype, rows contiguous. target [T]: int64; an IGNORED target has loss 0 and a row of
    zeros. weight: 0-d FP32.
    """
    T, V = logits.shape
    rows = max(1, _SLICE_ELEMENTS // V)
    ignored_T1 = (target == IGNORED)[:, None]
    target_T1 = target[:, None].masked_fill(ignored_T1, 0)
    loss_T1 = logits.new_empty(T, 1, dtype=torch.float32)
    buffer = logits.new_empty(min(rows, T), V, dtype=torch.float32)
    for start in range(0, T, rows):
        part = slice(start, min(start + rows, T))
        chosen_column, ignored = target_T1[part], ignored_T1[part]
        z = buffer[: len(ignored)].copy_(logits[part])
        z -= z.amax(1, keepdim=True)
        chosen = z.gather(1, chosen_column)
        total = z.exp_().sum(1, keepdim=True)
        loss_T1[part] = (weight * (total.log() - chosen)).masked_fill_(ignored, 0.0)
        if gradient:
            z *= weight / total
            z.scatter_add_(1, chosen_column, (-weight).expand(len(z), 1))
            logits[part] = z.index_fill_(0, ignored.squeeze(1).nonzero().squeeze(1), 0.0)
    return loss_T1.squeeze(1)


class VocabularySplit(Protocol):
    """Ranks that share the vocabulary, in equal parts and in order; this rank has part `rank`."""

    @property
    def rank(self) -> int:
        """Index of this rank's part."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Return the largest value over all ranks."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        ...

    def gather(self, x_BsD: Tensor) -> Tensor:
        """Gather this rank's positions into all positions; the gradient is summed in FP32."""
        ...


def split_rows(logits: Tensor, target: Tensor, weight: Tensor, gradient: bool, split: VocabularySplit) -> Tensor:
    """Compute `cross_entropy_rows` for logits [T, V / ranks] of this rank's words; target: over all words.

    Every rank returns the losses [T] of the whole vocabulary. Ranks exchange 12 bytes per row: the largest logit, the
    sum of exponentials, the target's logit.
    """
    z, ignored_T = logits.float(), target == IGNORED
    z -= split.max(z.amax(1))[:, None]
    own = target - split.rank * z.shape[1]
    here_T = (own >= 0) & (own < z.shape[1]) & ~ignored_T
    column_T1 = own.where(here_T, 0)[:, None]
    chosen_T = z.gather(1, column_T1).squeeze(1) * here_T
    total_T, chosen_T = split.sum(torch.stack([z.exp_().sum(1), chosen_T]))
    if gradient:
        z *= (weight / total_T)[:, None]
        z.scatter_add_(1, column_T1, (-weight * here_T)[:, None])
        logits.copy_(z.masked_fill_(ignored_T[:, None], 0.0))
    return (weight * (total_T.log() - chosen_T)).masked_fill_(ignored_T, 0.0)


cross_entropy_rows = torch.library.custom_op("octet::cross_entropy_rows", plain_rows, mutates_args={"logits"})


@cross_entropy_rows.register_kernel("cuda")
def _on_gpu(logits: Tensor, target: Tensor, weight: Tensor, gradient: bool) -> Tensor:
    if LOSS in refused:
        return plain_rows(logits, target, weight, gradient)
    from precision.kernels import cross_entropy as kernels  # needs Triton, which machines without a GPU lack

    return kernels.cross_entropy_rows(logits, target, weight, gradient, IGNORED)


@cross_entropy_rows.register_fake
def _shape(logits: Tensor, target: Tensor, weight: Tensor, gradient: bool) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def mean_weight(target: Tensor) -> Tensor:
    """Return the factor that turns a sum over the targets [...] that are not IGNORED into their mean: 1 / their number,
    0-d FP32, on their device."""
    return (target != IGNORED).sum().clamp_(min=1).reciprocal()


class _CrossEntropy(torch.autograd.Function):
    """See the module docstring. Backward scales the saved dz in place, so autograd refuses to run it a second time."""

    @staticmethod
    def forward(ctx, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        gradient = ctx.needs_input_grad[0]
        z_TV = logits_TV.clone() if gradient else logits_TV
        loss_T = cross_entropy_rows(z_TV, target_T, mean_weight(target_T), gradient)
        ctx.save_for_backward(z_TV if gradient else None)
        return loss_T.sum()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (dz_TV,) = ctx.saved_tensors
        for rows in dz_TV.split(max(1, (1 << 26) // dz_TV.shape[1])):
            rows.copy_(rows.float().mul_(grads[0]))  # in FP32: a BF16 factor would round the gradient first
        return dz_TV, None


def cross_entropy(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    """Return the mean cross entropy in nats over the targets that are not IGNORED, 0-d FP32; 0 if all are IGNORED.
    Backward runs once.

    logits [B, S, V]: any floating dtype. target [B, S]: int64.
    """
    return _CrossEntropy.apply(logits_BSV.flatten(0, 1), target_BS.flatten())
