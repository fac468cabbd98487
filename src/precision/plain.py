"""A model that computes in FP8, in BF16 for a while: what its recipe would compute without the casts.

    with in_bf16(model):
        model(tokens).total.backward()

Each GEMM in FP8 takes the BF16 variant of its row (`GemmRecipe.in_bf16`): the same backend, the same master weights,
BF16(master) as it is instead of FP8 made from that. What feeds it is delivered as a plain tensor, and so tokens travel
to their experts in BF16 too. Everything else is in BF16 or FP32 anyway and stays.

Afterwards layers and feeds are what they were: the same operands in the same memory. Where ranks share weights,
nothing may be gathered when it begins or ends; what travels then is BF16, and `trainer.parallel` sees to that.
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
    """Inside, no GEMM of the model computes in FP8. Nothing of it may be compiled. AssertionError for Transformer
    Engine, whose modules decide by themselves."""
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
    """One layer. Version -1: its compute weight is made when it is next wanted."""
    _set(after, layer, recipe=layer.recipe.in_bf16, operand=None, operand_version=-1)
    _set(after, layer, input_slot=None, weight_slot=None, grad_slot=None)


def _feeds(model: nn.Module) -> list[Feed]:
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Feed)]


def _set(after: ExitStack, thing: object, **values: Any) -> None:
    """Set attributes, and back to what they were in the end."""
    for name, value in values.items():
        after.callback(setattr, thing, name, getattr(thing, name))
        setattr(thing, name, value)
