"""Losses: cross entropy over a large vocabulary, and what a forward pass returns.

    loss = mean over valid t of  logsumexp(z_t) - z_t[y_t]           dz_t = (softmax(z_t) - onehot(y_t)) / valid

The logits [T, V] are the largest tensor of a step, and all that backward needs of them is dz. So they are read once, in
slices of rows that are converted to FP32 in one small buffer, and dz is written in the same go, in the logits' own
format. Neither an FP32 copy of [T, V] nor, after the forward pass, the logits themselves exist.

Legend: B batch, S sequence, T tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that counts for nothing; PyTorch's own convention
# Elements of the FP32 buffer: what stays in a CPU's cache; on a GPU enough to fill it
_SLICE_ELEMENTS = {"cpu": 1 << 18}
_SLICE_ELEMENTS_ELSEWHERE = 1 << 26


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
    """See the module docstring. Backward scales the kept dz in place: autograd refuses to run it a second time."""

    @staticmethod
    def forward(ctx, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        T, V = logits_TV.shape
        rows = max(1, _SLICE_ELEMENTS.get(logits_TV.device.type, _SLICE_ELEMENTS_ELSEWHERE) // V)
        valid_T = target_T != IGNORED
        weight_T1 = (valid_T / valid_T.sum()).float()[:, None]
        target_T1 = target_T.clamp_min(0)[:, None]
        loss_T1 = torch.empty_like(weight_T1)
        dz_TV = torch.empty_like(logits_TV) if ctx.needs_input_grad[0] else None
        buffer = torch.empty(min(rows, T), V, dtype=torch.float32, device=logits_TV.device)
        for start in range(0, T, rows):
            part = slice(start, min(start + rows, T))
            weight, target = weight_T1[part], target_T1[part]
            z = buffer[: len(weight)].copy_(logits_TV[part])
            z -= z.amax(1, keepdim=True)
            chosen = z.gather(1, target)
            total = z.exp_().sum(1, keepdim=True)
            loss_T1[part] = torch.where(weight > 0, weight * (total.log() - chosen), 0.0)
            if dz_TV is not None:
                z *= weight / total
                dz_TV[part] = z.scatter_add_(1, target, -weight)
        ctx.save_for_backward(dz_TV)
        return loss_T1.sum()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (dz_TV,) = ctx.saved_tensors
        return dz_TV.mul_(grads[0]), None


def cross_entropy(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    """Mean cross entropy in nats over the targets that are not IGNORED, 0-d FP32. Backward works once.

    logits [B, S, V]: any floating dtype. target [B, S]: int64.
    """
    return _CrossEntropy.apply(logits_BSV.flatten(0, 1), target_BS.flatten())


def targets_ahead(tokens: Tensor, k: int) -> Tensor:
    """tokens [B, S + 1] -> targets [B, S] of a head that predicts k places on; IGNORED where the sequence is over."""
    return F.pad(tokens[:, k:], (0, k - 1), value=IGNORED)
