"""How tokens travel to experts on other ranks, and the buffers for it, as the forecasts see it."""

from models.flops import arriving
from models.slots import room
from precision import Plan
from trainer.config import Config, Device, Dispatch
from trainer.parallel.mesh import Degrees

PER_NODE = 8  # GPUs of a node, which share memory


def dispatch_of(config: Config, degrees: Degrees, node: int = PER_NODE) -> Dispatch:
    """Return `parallel.dispatch`. auto: symmetric in groups within a node of `node` GPUs, else all_to_all."""
    if config.parallel.dispatch is not Dispatch.auto:
        return config.parallel.dispatch
    near = degrees.expert <= node and config.trainer.device is not Device.cpu
    return Dispatch.symmetric if near else Dispatch.all_to_all


def capacity_of(config: Config, degrees: Degrees) -> float | None:
    """Capacity of the slots of tokens on their way to experts; None without slots."""
    slots = dispatch_of(config, degrees) in (Dispatch.slots, Dispatch.symmetric)
    return config.parallel.dispatch_capacity if slots else None


def buffer_bytes(config: Config, plan: Plan, degrees: Degrees, tokens: int) -> float:
    """Return the bytes of the buffers. tokens: of a rank and microbatch."""
    travel = next((row.format.bytes for row in plan.tensors.values() if row.op == "moe.dispatch"), None)
    if degrees.expert == 1 or travel is None:  # a stage may have dense blocks only
        return 0.0
    model, e = config.model, degrees.expert
    width = model.hidden_size * max(travel, plan.tensors["residual"].format.bytes)
    dispatch, capacity = dispatch_of(config, degrees), capacity_of(config, degrees)
    if capacity is None:
        rows = arriving(model, e)
        if dispatch is Dispatch.two_hops and e > PER_NODE:
            rows += arriving(model, e // PER_NODE)
        return 2 * tokens * rows * width
    K = model.num_experts_per_token
    slots, _ = room(capacity, tokens, K, e, model.num_experts // e)
    inbox = dispatch is Dispatch.symmetric  # in addition to the send and the receive buffer
    return (2 + inbox) * e * slots * (width + inbox * 8 * K)
