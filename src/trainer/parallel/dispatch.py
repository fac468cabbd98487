"""How experts' tokens travel, by `parallel.dispatch`: see `models.dispatch` and `models.slots`."""

import os
import socket
from itertools import groupby

import torch
import torch.distributed as dist

from models.slots import OBSERVED, Slots
from models.transport import EqualSplits, SymmetricMemory, shares_memory
from models.two_hops import Hops
from precision.errors import UserError
from precision.proof import PEERS, refused
from trainer.config.schema import Dispatch
from trainer.config.sections import ParallelConfig
from trainer.parallel.mesh import Mesh


def build_dispatch(config: ParallelConfig, mesh: Mesh, device: torch.device) -> Slots | Hops | None:
    """Return the slots that all layers of experts share, or the groups of two hops; None if tokens travel by plain
    all-to-all. A collective. Raises UserError if symmetric memory, or several nodes, are required and unavailable."""
    if mesh.expert is None or config.dispatch is Dispatch.all_to_all:
        return None
    group = mesh.expert.get_group()
    if config.dispatch is Dispatch.two_hops:
        return _hops(group, device)
    if config.dispatch is Dispatch.slots:
        transport = EqualSplits(group)
    elif shares_memory(group, device, PEERS not in refused):
        transport = SymmetricMemory(group, device, config.timeout)
    elif config.dispatch is Dispatch.auto:
        return None
    elif PEERS in refused:
        why = f"its kernels are wrong here ({refused[PEERS]})"
        raise UserError(f"parallel.dispatch=symmetric: {why}; set parallel.dispatch=slots")
    else:
        raise UserError(
            "parallel.dispatch=symmetric: the ranks of an expert group are not GPUs of one node that reach each "
            "other's memory over NVLink; set parallel.dispatch=slots, or a parallel.expert that fits into a node"
        )
    return Slots(transport, config.dispatch_capacity, torch.zeros((), device=device), OBSERVED)


def _hops(group: dist.ProcessGroup, device: torch.device) -> Hops:
    """Return the groups of two hops for a group of neighbouring ranks that holds the experts. A collective."""
    from torch.distributed.device_mesh import init_device_mesh

    # torchrun's number of the node, too: several of its agents may run on one machine
    nodes: list = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, (socket.gethostname(), os.environ.get("GROUP_RANK")))
    size = dist.get_world_size(group)
    parts = [[len(list(ranks)) for _, ranks in groupby(nodes[i : i + size])] for i in range(0, len(nodes), size)]
    each = parts[0][0]
    uneven = [part for part in parts if part != [each] * (size // each) or len(part) < 2]
    if uneven:
        raise UserError(
            f"parallel.dispatch=two_hops: parallel.expert={size} ranks are not equally many on each of several nodes "
            f"(here {', '.join(map(str, uneven[0]))}); set parallel.dispatch=auto, or a multiple of a node's ranks"
        )
    axes = init_device_mesh(device.type, (len(parts), size // each, each), mesh_dim_names=("others", "nodes", "node"))
    return Hops(axes["nodes"].get_group(), axes["node"].get_group(), group)
