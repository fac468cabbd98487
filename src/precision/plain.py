"""Temporary BF16 for an FP8 model: it computes what its recipe would compute without the casts.

    with in_bf16(model):
        model(tokens).total.backward()

Each FP8 GEMM uses the BF16 variant of its row (`GemmRecipe.in_bf16`): the same backend and master weights, and
BF16(master) instead of the FP8 made from it. Its feeds deliver plain tensors, so tokens also travel to their experts in
BF16. Everything else is in BF16 or FP32 anyway and does not change.

Afterwards layers and feeds are restored, with the same operands in the same memory. Where ranks share weights, no
weight may be gathered when the context begins or ends; inside, weights are gathered in BF16 (`trainer.parallel`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from precision.fp8_attention import AttentionCore
from precision.linear import GroupedLinear, Linear, gemm_layers
from precision.operand import Feed
from precision.rows import TE


@contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Run every GEMM of the model without FP8 inside this context. No part of the model may be compiled. AssertionError
    for Transformer Engine, whose modules decide for themselves."""
    with ExitStack() as after:
        for layer in gemm_layers(model):
            assert layer.recipe.backend != TE, "Transformer Engine's modules have no BF16 variant here"
            if layer.recipe.is_fp8:
                _switch(after, layer)
        for module in model.modules():
            if isinstance(module, AttentionCore):
                _set(after, module, in_fp8=False)
        for feed in _feeds(model):
            _set(after, feed, slot=None)
        yield


def _switch(after: ExitStack, layer: Linear | GroupedLinear) -> None:
    """Switch one layer. Version -1: its compute weight is made at the next use."""
    _set(after, layer, recipe=layer.recipe.in_bf16, operand=None, operand_version=-1)
    _set(after, layer, input_slot=None, weight_slot=None, grad_slot=None)


def _feeds(model: nn.Module) -> list[Feed]:
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Feed)]


def _set(after: ExitStack, thing: object, **values: Any) -> None:
    """Set attributes, and restore them at the end."""
    for name, value in values.items():
        after.callback(setattr, thing, name, getattr(thing, name))
        setattr(thing, name, value)
