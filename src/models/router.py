"""The router: the experts of a token and their weights (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

From logits z = u . e (one per routed expert, FP32):

    s_i = sigmoid(z_i)                          affinity; softmax(z)_i in DeepSeek-V2
    choice: the K experts with the largest s_i + b_i, among the experts of the best groups
            score of a group = sum of its two largest s_i + b_i
    g_i = s_i / sum of the chosen s  *  routed_scaling_factor        the bias b never enters g

Balancing without a loss: after each step b_i -= gamma sign(load_i - mean load) (arXiv 2408.15664), so that a busy
expert is chosen less. `DeepSeek.update_router_bias` applies it once the step is known to be good. Moonlight (arXiv
2502.16982) subtracts from the signs their mean over the block's experts: the biases keep their mean, and the choice is
the same. A small loss acts against imbalance within one sequence:

    L = alpha sum_i f_i P_i
    f_i = E / (K S) * number of the sequence's tokens that chose i        counts: no gradient
    P_i = mean over the sequence's tokens of s_i / sum_j s_j

averaged over sequences. No token is dropped, and a token's experts depend on that token alone. Where ranks share a
sequence (`context`), f_i counts over all of it and P_i is the mean over a rank's positions: the mean of the ranks'
losses is that of one process.

Legend: B batch, S sequence, E experts, G groups, K chosen experts of a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.config import RouterScoring
from models.context import ContextSplit
from precision import choose_experts


class Routing(NamedTuple):
    """Result of the router.

    expert [B, S, K] int64. weight [B, S, K] FP32. balance_loss: 0-d FP32, weighted. load [E] int64: rows per expert.
    """

    expert: Tensor
    weight: Tensor
    balance_loss: Tensor
    load: Tensor


class Gate(nn.Module):
    """Logits -> Routing. With sigmoid scoring it holds the selection bias b [E] (a buffer, FP32); it has no
    parameters."""

    bias: Tensor | None

    def __init__(
        self,
        *,
        num_experts: int,
        num_experts_per_token: int,
        num_groups: int,
        num_groups_per_token: int,
        scoring: RouterScoring,
        normalize: bool,
        scaling_factor: float,
        balance_loss_weight: float,
        force_balanced: bool,
    ):
        super().__init__()
        self.num_experts, self.num_chosen = num_experts, num_experts_per_token
        self.num_groups, self.num_groups_kept = num_groups, num_groups_per_token
        self.scoring, self.normalize, self.scaling_factor = scoring, normalize, scaling_factor
        self.balance_loss_weight, self.force_balanced = balance_loss_weight, force_balanced
        biased = scoring is RouterScoring.sigmoid
        self.context: ContextSplit | None = None
        self.register_buffer("bias", torch.empty(num_experts, dtype=torch.float32) if biased else None)

    def forward(self, logits_BSE: Tensor) -> Routing:
        """Route tokens by their logits [B, S, E] FP32."""
        softmax = self.scoring is RouterScoring.softmax
        score_BSE = logits_BSE.softmax(-1) if softmax else logits_BSE.sigmoid()
        expert_BSK = self._round_robin(score_BSE) if self.force_balanced else self.choose(score_BSE)
        weight_BSK = score_BSE.gather(-1, expert_BSK)
        if self.normalize:
            weight_BSK = weight_BSK / (weight_BSK.sum(-1, keepdim=True) + 1e-20)
        count_BE = count_choices(expert_BSK, self.num_experts)
        share_BSE = score_BSE if softmax else score_BSE / (score_BSE.sum(-1, keepdim=True) + 1e-20)
        f_BE = count_BE if self.context is None else self.context.sum(count_BE) / self.context.size
        loss = self.balance_loss_weight * balance_loss(share_BSE, f_BE, self.num_chosen)
        return Routing(expert_BSK, weight_BSK * self.scaling_factor, loss, count_BE.sum(0))

    def choose(self, score_BSE: Tensor) -> Tensor:
        """Return the experts of each token, [B, S, K] int64, all different, from at most `num_groups_per_token`
        groups."""
        return choose_experts(score_BSE, self.bias, self.num_chosen, self.num_groups, self.num_groups_kept)

    def _round_robin(self, score_BSE: Tensor) -> Tensor:
        """Assign experts in turn, whatever the scores: token t gets tK, tK + 1, ... modulo E."""
        B, S, E = score_BSE.shape
        turn = torch.arange(B * S * self.num_chosen, device=score_BSE.device)
        return (turn % E).view(B, S, self.num_chosen)


def count_choices(expert_BSK: Tensor, num_experts: int) -> Tensor:
    """Return how many tokens of each sequence chose each expert: [B, E] int64."""
    chosen = expert_BSK.flatten(1)
    zero_BE = torch.zeros(chosen.shape[0], num_experts, dtype=torch.int64, device=chosen.device)
    return zero_BE.scatter_add(1, chosen, torch.ones_like(chosen))


def balance_loss(share_BSE: Tensor, count_BE: Tensor, num_chosen: int) -> Tensor:
    """Return sum_i f_i P_i, averaged over sequences: 0-d, 1 for perfect balance. share: scores that sum to 1 over E."""
    _, S, E = share_BSE.shape
    f_BE = count_BE * (E / (num_chosen * S))
    return (f_BE * share_BSE.mean(1)).sum(-1).mean()
