"""Losses: cross entropy over a large vocabulary, and what a forward pass returns.

Cross entropy of FP32-converted logits, without ever holding an FP32 copy of them: a large vocabulary makes [T, V] the
largest tensor of a step, so it is read in slices of rows, forward and backward, and kept once, in the format the head
produced.

    loss = mean over valid t of  logsumexp(z_t) - z_t[y_t]           dz_t = (softmax(z_t) - onehot(y_t)) / valid

Legend: B batch, S sequence, T tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that counts for nothing; PyTorch's own convention
_SLICE_ELEMENTS = 1 << 20  # of a slice of logits: FP32 copies of it stay in a CPU's cache


class Losses(NamedTuple):
    """What a forward pass on B x S tokens says. All 0-d FP32 except load.

    lm: nats per token. mtp: the same for multi-token prediction, mean over its depths, not weighted; 0 without MTP.
    balance: the routers' losses, weighted and summed over blocks. total = lm + mtp_loss_weight * mtp + balance. load:
    [blocks with experts, E] int64, rows each expert got.
    """

    lm: Tensor
    mtp: Tensor
    balance: Tensor
    load: Tensor
    total: Tensor

    def detached(self, total: Tensor) -> "Losses":
        """The same numbers outside the graph, with another `total`."""
        return Losses(self.lm.detach(), self.mtp.detach(), self.balance.detach(), self.load, total.detach())


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        rows = max(1, _SLICE_ELEMENTS // logits_TV.shape[1])
        lse_T = torch.cat([part.float().logsumexp(-1) for part in logits_TV.split(rows)])
        valid_T = target_T != IGNORED
        chosen_T = logits_TV.gather(1, target_T.clamp_min(0)[:, None]).squeeze(1).float()
        count = valid_T.sum()
        ctx.save_for_backward(logits_TV, target_T, lse_T, count)
        ctx.rows = rows
        return torch.where(valid_T, lse_T - chosen_T, 0.0).sum() / count

    @staticmethod
    def backward(ctx, *grads: Tensor):
        logits_TV, target_T, lse_T, count = ctx.saved_tensors
        weight_T = torch.where(target_T != IGNORED, grads[0] / count, 0.0)
        dz_TV = torch.empty_like(logits_TV)
        parts = (t.split(ctx.rows) for t in (logits_TV, target_T, lse_T, weight_T, dz_TV))
        for logits, target, lse, weight, dz in zip(*parts, strict=True):
            p = (logits.float() - lse[:, None]).exp_()
            p.scatter_add_(1, target.clamp_min(0)[:, None], p.new_full((), -1.0).expand(len(p), 1))
            dz.copy_(p.mul_(weight[:, None]))
        return dz_TV, None


def cross_entropy(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    """Mean cross entropy in nats over the targets that are not IGNORED, 0-d FP32.

    logits [B, S, V]: any floating dtype. target [B, S]: int64.
    """
    return _CrossEntropy.apply(logits_BSV.flatten(0, 1), target_BS.flatten())


def targets_ahead(tokens: Tensor, k: int) -> Tensor:
    """tokens [B, S + 1] -> targets [B, S] of a head that predicts k places on; IGNORED where the sequence is over."""
    return F.pad(tokens[:, k:], (0, k - 1), value=IGNORED)
