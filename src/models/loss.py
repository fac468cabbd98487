"""The result of a forward pass, and the targets of its heads. `precision.head` computes the loss of a head.

Legend: B batch, S sequence.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from precision import IGNORED


class Losses(NamedTuple):
    """Results of a forward pass on B x S tokens. All 0-d FP32 except load.

    lm: nats per token. mtp: the same for multi-token prediction, mean over its depths, not weighted; 0 without MTP.
    balance: the routers' losses, weighted and summed over blocks. total = lm + mtp_loss_weight * mtp + balance. load:
    [blocks with experts, E] int64, rows per expert.
    """

    lm: Tensor
    mtp: Tensor
    balance: Tensor
    load: Tensor
    total: Tensor

    def detached(self, total: Tensor) -> "Losses":
        """Return the same numbers outside the graph, with another `total`."""
        return Losses(self.lm.detach(), self.mtp.detach(), self.balance.detach(), self.load, total.detach())


def targets_ahead(tokens: Tensor, k: int) -> Tensor:
    """Return the targets [B, S] of a head that predicts k positions ahead in tokens [B, S + 1]; IGNORED past the
    end."""
    return F.pad(tokens[:, k:], (0, k - 1), value=IGNORED)
