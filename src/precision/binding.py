"""Connects a model to its arena: `bind` once the parameters exist, `begin_step` before each step."""

import torch
from torch import nn

from precision.amax_probe import AmaxProbe
from precision.backends import get_backend
from precision.fp8_attention import AttentionCore
from precision.kurtosis import Kurtosis, bind_kurtosis
from precision.linear import GroupedLinear, Linear, gemm_layers, refresh_weights
from precision.max_logits import MaxLogits, bind_max_logits
from precision.plan import Plan
from precision.scaling import ScalingArena


def bind(model: nn.Module, plan: Plan, device: torch.device | str) -> ScalingArena:
    """Create the arena on `device`, bind every slot, `MaxLogits` and `Kurtosis` of the model to it, and make the
    compute weights.

    Call it after the parameters are materialised on `device`. Rows are named as in the plan, in the order of the
    model's modules.
    """
    layers = [m for m in model.modules() if isinstance(m, Linear | GroupedLinear | AmaxProbe | AttentionCore)]
    slots = [slot for layer in layers for slot in layer.slots()]
    for layer in layers:
        if isinstance(layer, Linear | GroupedLinear) and layer.te is None:
            get_backend(layer.recipe.backend)  # import it now: compiled code cannot
    arena = ScalingArena(slots, plan.config.scaling, plan.delayed, device)
    arena.max_logits = bind_max_logits([m for m in model.modules() if isinstance(m, MaxLogits)], device)
    bind_kurtosis([m for m in model.modules() if isinstance(m, Kurtosis)], device)
    refresh_weights(model, force=True)
    return arena


def begin_step(model: nn.Module, arena: ScalingArena) -> None:
    """Start a training step: reset the previous step's amaxes and quantise every weight once, unless the optimizer has
    made it."""
    arena.begin_step()
    slots = []
    for layer in gemm_layers(model):
        if layer.is_made_ahead():
            layer.take_ahead()
            slots += [] if layer.weight_slot is None else [layer.weight_slot]
        elif not layer.is_sharded:
            layer.refresh_weight()
    if slots:
        torch._foreach_copy_([slot.amax for slot in slots], [slot.next_amax for slot in slots])  # pyright: ignore
