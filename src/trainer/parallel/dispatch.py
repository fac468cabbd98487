"""How experts' tokens travel, by `parallel.dispatch`: see `models.dispatch` and `models.slots`."""

import torch

from models.slots import OBSERVED, Slots
from models.transport import EqualSplits, SymmetricMemory, check_shares_memory, shares_memory
from precision.errors import UserError
from precision.proof import PEERS, refused
from trainer.config.schema import Dispatch
from trainer.config.sections import ParallelConfig
from trainer.parallel.mesh import Mesh


def build_slots(config: ParallelConfig, mesh: Mesh, device: torch.device) -> Slots | None:
    """Return the slots that all layers of experts share, or None if tokens travel without slots. A collective. Raises
    UserError if symmetric memory is required and unavailable."""
    if mesh.expert is None or config.dispatch is Dispatch.all_to_all:
        return None
    group = mesh.expert.get_group()
    if config.dispatch is Dispatch.slots:
        transport = EqualSplits(group)
    elif config.dispatch is Dispatch.auto and (PEERS in refused or not shares_memory(group, device)):
        return None
    else:
        if config.dispatch is Dispatch.symmetric:
            if PEERS in refused:
                why = f"its kernels are wrong here ({refused[PEERS]})"
                raise UserError(f"parallel.dispatch=symmetric: {why}; set parallel.dispatch=slots")
            check_shares_memory(group, device)
        transport = SymmetricMemory(group, device, config.timeout)
    return Slots(transport, config.dispatch_capacity, torch.zeros((), device=device), OBSERVED)
