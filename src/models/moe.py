"""Mixture of experts (DeepSeekMoE, arXiv 2401.06066; DeepSeek-V3, arXiv 2412.19437, section 2.1.2):

    y = FFN_shared(u) + sum over the K chosen experts i of g_i FFN_i(u)

The shared experts are one feed-forward layer of num_shared_experts times an expert's width. The routed ones are two
grouped GEMMs over rows sorted by expert. The weight g_i is applied inside the activation, before the down projection,
which is linear: so the experts' outputs are not saved for g's gradient. The sum over a token's experts runs in the
plan's `moe.accumulate` format.

The dispatcher moves tokens to experts in other processes: see `dispatch`.

The norm before this layer delivers `feed`. If tokens travel in FP8, the norm quantises them once for the shared and the
routed experts; otherwise they are quantised after the permutation. The router reads the plain tensor in both cases. If
the stream grows with depth (`norm_position=post`), the router has its own norm, without gain, so that scores do not
saturate.

Legend: B batch, S sequence, T = B S tokens, D hidden, F expert width, E experts, K chosen experts of a token, R = T K
rows.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from models.config import ModelConfig, NormPosition
from models.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from models.layers import FFN, RMSNorm, first_gemm, without_gate
from models.router import Gate
from models.slots import SlotDispatcher, Slots
from models.two_hops import Hops, TwoHopDispatcher
from precision import Feed, GradRows, GroupedLinear, Kurtosis, Linear, Operand, Plan, Xielu, expert_ffn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Experts(nn.Module):
    """Feed-forward layers D -> F -> D, E of them, or those of this process. gate_up [E, 2F, D], or up [E, F, D] without
    a gate; down [E, D, F].

    combine, accumulate: formats of an expert's output and of the sum over a token's. rows_feed: the Feed of `first`,
    where tokens do not travel as an Operand. keep_rows: see `precision.ffn`.
    """

    keep_rows = True

    def __init__(self, config: ModelConfig, plan: Plan, name: str):
        super().__init__()
        D, F, activation = config.hidden_size, config.moe_intermediate_size, config.activation
        num_experts, rows_per_token = config.num_experts, config.num_experts_per_token

        def grouped(part: str, in_features: int, out_features: int) -> GroupedLinear:
            row = plan.gemm(f"{name}.{part}", "moe.experts", in_features, out_features, num_experts, rows_per_token)
            return GroupedLinear(row)

        part, out_features = first_gemm(activation, F)
        self._first, first = part, grouped(part, D, out_features)
        self.add_module(part, first)
        self.down = grouped("down", F, D)
        self.down_feed = Feed(self.down)
        self.activation = without_gate(activation, num_experts)
        self.kurtosis = Kurtosis("ffn")
        layer = name.removesuffix("experts")
        dispatch = plan.tensor(f"{layer}dispatch", "moe.dispatch")
        self.combine = plan.tensor(f"{layer}combine", "moe.combine").dtype
        self.accumulate = plan.tensor(f"{layer}accumulate", "moe.accumulate").dtype
        self.dispatch = None if dispatch.is_fp8 else dispatch.dtype  # of tokens that travel unquantised
        self.rows_feed = None if dispatch.is_fp8 else Feed(first)

    @property
    def first(self) -> GroupedLinear:
        """The first GEMM: `gate_up`, or `up` without a gate."""
        return cast(GroupedLinear, getattr(self, self._first))

    @property
    def is_gated(self) -> bool:
        """Whether SwiGLU follows it."""
        return self.activation is None

    def keep(self, experts: range) -> None:
        """Keep these experts only."""
        self.first.keep(experts)
        self.down.keep(experts)
        if isinstance(self.activation, Xielu):
            self.activation.keep(experts)

    def forward(
        self,
        x: Operand | Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        add_TD: Tensor | None,
        grad: GradRows | None = None,
        choices: int = -1,
    ) -> Tensor:
        """Apply the experts to x [T, D] and add `add` [T, D]; return [T, D]; see `precision.ffn`.

        expert_TK: the chosen experts (0: the first one here). weight_TK: their weights.
        """
        return expert_ffn(
            x,
            expert_TK,
            weight_TK,
            self.first,
            self.down,
            down_feed=self.down_feed,
            rows_feed=self.rows_feed,
            combine=self.combine,
            accumulate=self.accumulate,
            add=add_TD,
            grad=grad,
            choices=choices,
            kurtosis=self.kurtosis,
            keep_rows=self.keep_rows,
            activation=self.activation,
        )


class MoE(nn.Module):
    """Shared and routed experts with their router."""

    def __init__(self, config: ModelConfig, plan: Plan, name: str, residual: torch.dtype):
        super().__init__()
        D, F, activation = config.hidden_size, config.moe_intermediate_size, config.activation
        self.gate = Gate(
            num_experts=config.num_experts,
            num_experts_per_token=config.num_experts_per_token,
            num_groups=config.num_expert_groups,
            num_groups_per_token=config.num_groups_per_token,
            scoring=config.router_scoring,
            normalize=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
            balance_loss_weight=config.balance_loss_weight,
            force_balanced=config.force_balanced_routing,
        )
        self.router_norm = None
        if config.norm_position is NormPosition.post:
            self.router_norm = RMSNorm(plan, f"{name}.router_norm", D, config.rms_norm_eps, None)
        self.router = Linear(plan.gemm(f"{name}.router", "moe.router", D, config.num_experts))
        self.shared = FFN(plan, f"{name}.shared", "moe.shared", D, config.num_shared_experts * F, activation)
        self.experts = Experts(config, plan, f"{name}.experts")
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.residual = residual
        at_once = (self.experts.first,) if self.experts.dispatch is None else ()
        self.feed = Feed(self.shared.first, *at_once, tensor=True)

    def spread(self, group: "ProcessGroup", by: Slots | Hops | None = None) -> None:
        """Keep this process's share of the experts and send tokens to those of the group (expert parallelism), in
        slots or in two hops if given.

        Call it after the weights are drawn (they are split) and before the arena is made. UserError where this is
        impossible.
        """
        experts = self.gate.num_experts
        if isinstance(by, Slots):
            dispatcher = SlotDispatcher(by, experts)
        elif isinstance(by, Hops):
            dispatcher = TwoHopDispatcher(by, experts)
        else:
            dispatcher = AllToAllDispatcher(group, experts)
        self.experts.keep(dispatcher.experts)
        self.dispatcher = dispatcher

    def forward(self, x: Operand | Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the layer to x [T, D], made for `self.feed`; the T tokens of `batch` sequences of one length.

        Returns y [T, D] in the residual stream's dtype, the weighted balance loss (0-d FP32) and the load [E] int64.
        """
        x_TD = x.tensor if isinstance(x, Operand) else x
        logits_TE = self.router(x_TD if self.router_norm is None else self.router_norm(x_TD))
        expert_BSK, weight_BSK, balance_loss, load_E = self.gate(logits_TE.unflatten(0, (batch, -1)))
        travelling = x if self.experts.dispatch is None else x_TD.to(self.experts.dispatch)
        pending = self.dispatcher.begin(travelling, expert_BSK.flatten(0, 1), weight_BSK.flatten(0, 1), self.experts)
        y_TD = self.dispatcher.finish(pending, self.shared(x), self.experts)
        return y_TD.to(self.residual), balance_loss, load_E
