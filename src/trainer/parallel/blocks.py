"""Recomputes and compiles each block of the model, in this order, in place.

Recomputation (`torch.utils.checkpoint`) runs a part of the forward pass again in the backward pass instead of saving
its results. Amaxes are maxima and router loads are outputs, so nothing is counted twice.

    none        nothing
    selective   the attention sublayer without the attention core: norms, projections, RoPE and concatenation are cheap
                compared with saving q, k and v of all heads (DeepSeek-V3, arXiv 2412.19437, section 3.2.3); the core's
                output and log-sum-exp are saved. And rows of tokens for experts in BF16, which are gathered again
    full        everything inside a block; only its input is saved

Compilation is per block: equal blocks share one graph. `selective` happens inside that graph, `full` around it. If
experts are spread over ranks, tokens on their way to them are between two graphs: see `models.dispatch`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models import DeepSeek
from models.block import MoEBlock
from trainer.config.schema import Recompute
from trainer.parallel.compiler_internals import allow_graphs, reuse_graphs, silence_advice_on_recomputation

_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu")
}

_OURS = "octet.document_attention.default", "octet.fp8_attention.default"  # by name: they exist once used


def parallelize(
    model: DeepSeek, recompute: Recompute, compiled: bool, backend: str | Callable = "inductor", shapes: int = 1
) -> None:
    """Wrap the forward of every block in `model.iter_blocks()`. backend: torch.compile's. shapes: number of microbatch
    shapes in the run; each is compiled for."""
    if compiled:
        kinds = {type(block) for _, block in model.iter_blocks()}
        allow_graphs(4 * len(kinds) * shapes + 8)
        reuse_graphs()
        silence_advice_on_recomputation()
    for _, block in model.iter_blocks():
        if recompute is Recompute.selective:
            block.around_attention = _recompute_all_but_core
            if isinstance(block, MoEBlock):
                block.moe.experts.keep_rows = False
        if compiled:
            whole = not isinstance(block, MoEBlock) or block.moe.dispatcher.traceable
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=whole, dynamic=False)
        if recompute is Recompute.full:
            _recompute(block)


def _recompute(block: nn.Module) -> None:
    """Make the block save only its input when gradients are needed."""
    call = block.forward
    again = partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)  # blocks use no random numbers
    block.forward = lambda *args: again(*args) if torch.is_grad_enabled() else call(*args)


def _recompute_all_but_core(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Call function(*args), saving its arguments and the output of the attention core."""
    if not torch.is_grad_enabled():
        return function(*args)
    keep_core = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=keep_core)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_core = op in _ATTENTION or str(op) in _OURS
    return CheckpointPolicy.MUST_SAVE if is_core else CheckpointPolicy.PREFER_RECOMPUTE
