"""Recompute and compile each block of the model, in this order, in place.

Recomputation (`torch.utils.checkpoint`) keeps a block's input only and runs its forward pass again in the backward
pass; amaxes are maxima and router loads are outputs, so nothing is counted twice. Compilation is per block: equal
blocks share one graph.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import DeepSeek
from trainer.config import Recompute


def parallelize(model: DeepSeek, recompute: Recompute, compiled: bool) -> None:
    """Wrap the forward of every block in `model.iter_blocks()`."""
    if compiled:
        kinds = {type(block) for _, block in model.iter_blocks()}
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 4 * len(kinds) + 8)
    for _, block in model.iter_blocks():
        if compiled:
            block.compile(fullgraph=True, dynamic=False)
        if recompute is Recompute.full:
            _recompute(block)


def _recompute(block: nn.Module) -> None:
    """Make calls of the block keep only their input while gradients are wanted."""
    call = block._call_impl if block._compiled_call_impl is None else block._compiled_call_impl
    forward = partial(checkpoint, call, use_reentrant=False)
    block._compiled_call_impl = lambda *args: forward(*args) if torch.is_grad_enabled() else call(*args)
