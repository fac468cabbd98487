"""Expert parallelism over several nodes: tokens cross the network once per node (DeepSeek-V3, arXiv 2412.19437, 3.2.2).

A group of P = N x L processes holds the experts: L on each of N nodes, in order. A token with experts on several
processes of a node is sent once to that node, to the process that has the sender's place there (first hop, over the
network). From there it travels to the processes of its experts (second hop, within the node). Results take the way
back: each node's sum of a token's experts crosses the network as one row.

    rows over the network per token, 8 of 256 experts on 8 nodes of 8        all_to_all    two hops
    chosen from all experts, each as likely                                         6.7         4.6
    chosen from those of 4 nodes, as DeepSeek-V3 does                               6.4         3.2

Each hop is an `AllToAllDispatcher`. The first has the processes of one place in their nodes as its group, and as its
experts those of a whole node, which the second spreads over the node's processes. Rows travel in the formats of
`precision.wire` in both hops. Gradients in FP8 are read back to BF16 and cast again under the same scale in between,
which changes no number. The sum over a node is rounded to BF16, as that over a process is.

The host waits once in each layer, for the numbers of rows of both hops. They are exchanged before the first hop: each
process tells those of its place in the other nodes how many of its rows each process there will receive.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from models.dispatch import AllToAllDispatcher, Counts, Pending, RoutedExperts, check_even, keep_untraced
from precision import GradRows, GroupedLinear, Operand
from precision.wire import RowMap


@dataclass(frozen=True)
class Hops:
    """Process groups of the two hops. nodes: the processes of one place, one on each node; node: those of this node;
    all: both axes."""

    nodes: dist.ProcessGroup
    node: dist.ProcessGroup
    all: dist.ProcessGroup


class TwoHopDispatcher:
    """Dispatcher in two hops; see the module docstring. experts: the global ones that are here.

    UserError if they cannot be spread evenly.
    """

    traceable = False

    def __init__(self, hops: Hops, num_experts: int):
        nodes, processes = dist.get_world_size(hops.nodes), dist.get_world_size(hops.all)
        check_even(num_experts, processes)
        self._to_nodes = AllToAllDispatcher(hops.nodes, num_experts, hops.all)
        self._in_node = AllToAllDispatcher(hops.node, num_experts // nodes, second_hop=True)
        first = self._to_nodes.experts.start
        self.experts = range(first + self._in_node.experts.start, first + self._in_node.experts.stop)
        keep_untraced(self)

    def begin(
        self, x: Operand | Tensor, expert_TK: Tensor, weight_TK: Tensor, experts: RoutedExperts
    ) -> tuple[Pending, Counts]:
        """See `dispatch.Dispatcher`: counts the rows of both hops."""
        pending = self._to_nodes.begin(x, expert_TK, weight_TK, experts)
        nodes, each = self._to_nodes.size, self._in_node.size
        own = RowMap.packed(expert_TK, nodes * each, len(self.experts), pending.row_map.kernels).counts()
        on = torch.empty_like(own)
        dist.all_to_all_single(on, own, group=self._to_nodes.group)
        on = on.view(nodes, each, 2).sum(0)
        # where nothing arrives, the first expert receives a row of zeros
        nothing = pending.counts.received[:, 0].sum() == 0
        on[0, 0] += nothing
        on[0, 1] += nothing * expert_TK.shape[1]
        return pending, self._in_node.count(on, experts)

    def finish(self, pending: tuple[Pending, Counts], add_TD: Tensor, experts: RoutedExperts) -> Tensor:
        first, counts = pending
        return self._to_nodes.finish(first, add_TD, _NodeExperts(experts, self._in_node, counts))


class _NodeExperts:
    """The experts of a node, spread over its processes, as those of one process (`RoutedExperts`)."""

    def __init__(self, experts: RoutedExperts, hop: AllToAllDispatcher, counts: Counts):
        self._experts, self._hop, self._counts = experts, hop, counts
        self.first: GroupedLinear = experts.first
        self.is_gated: bool = experts.is_gated
        self.down: GroupedLinear = experts.down
        self.combine: torch.dtype = experts.combine
        self.accumulate: torch.dtype = experts.accumulate

    def __call__(
        self,
        x: Operand | Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        add_TD: Tensor | None,
        grad: GradRows | None = None,
        choices: int = -1,
    ) -> Tensor:
        assert add_TD is None
        rows = self._hop.rows(expert_TK, self._experts)
        return self._hop.finish(Pending(x, rows, expert_TK, weight_TK, self._counts), None, self._experts, grad)
