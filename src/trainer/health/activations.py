"""Kurtosis of activations: the sign that comes first when a run in FP8 is going to diverge.

    kurtosis(x) = mean(x^4) / mean(x^2)^2          uncentred, over the hidden dimension of one token

averaged over tokens (arXiv 2505.20524). 3 for Gaussian numbers; D, the number of features, where one of them holds all.
Numbers with outliers fit no scale. In the runs of that paper the kurtosis of QKV departed long before the gradient
norm, and the loss came last; growth slower than linear is healthy. It is looked at in each block at three places:

    qkv     queries, keys and values, as the projections make them (of MLA: q or q_b, and kv_b, together)
    ffn     input of the feed-forward layer's second linear, as its GEMM reads it; with experts: the shared ones' and
            every routed row
    block   the block's output, the residual stream

By forward hooks, which are there only as long as somebody looks. Sums, so that ranks can add theirs up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precision import Operand
from precision.wire import read_back
from trainer.parallel.totals import added_up

if TYPE_CHECKING:
    from models.block import Block
    from trainer.distributed import World

Hook = Callable[[nn.Module, Any, Any], None]

PLACES = ("qkv", "ffn", "block")


class Kurtosis:
    """Sums of kurtosis over tokens, by block (`DeepSeek.iter_blocks`) and place, of the passes made under `watching`.

    sums [blocks, places, 2] FP64: of the kurtosis, of tokens. A block that is recomputed counts twice in both.
    """

    def __init__(self, blocks: list[tuple[str, Block]], device: torch.device):
        self._blocks = blocks
        self.sums = torch.zeros(len(self._blocks), len(PLACES), 2, dtype=torch.float64, device=device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every pass made inside."""
        hooks = []
        for i, (_, block) in enumerate(self._blocks):
            attn = block.attn
            q = attn.q if attn.q_a is None else attn.q_b
            keep, add = self._of_qkv(i)
            hooks += [q.register_forward_hook(keep), attn.kv_b.register_forward_hook(add)]
            seconds = [layer for name, layer in block.named_modules() if name.endswith(".down")]
            hooks += [layer.register_forward_pre_hook(self._of_ffn(i)) for layer in seconds]
            hooks.append(block.register_forward_hook(self._of_block(i)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def means(self, world: World) -> dict[str, Tensor]:
        """[blocks] FP64 by place, over all ranks; NaN where nothing was seen. A collective."""
        sums = added_up([self.sums], world)[0]
        return dict(zip(PLACES, (sums[..., 0] / sums[..., 1]).unbind(1), strict=True))

    def _of_qkv(self, block: int) -> tuple[Hook, Hook]:
        kept: list[Tensor] = []
        return (
            lambda module, args, out: kept.append(out),
            lambda module, args, out: self._add(block, "qkv", kept.pop(), out),
        )

    def _of_ffn(self, block: int) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: self._add(block, "ffn", args[0])

    def _of_block(self, block: int) -> Hook:
        return lambda module, args, out: self._add(block, "block", out[0])

    @torch.no_grad()
    def _add(self, block: int, place: str, *parts: Tensor | Operand) -> None:
        rows = [_values(part).flatten(0, -2) for part in parts]
        width = sum(row.shape[-1] for row in rows)
        second, fourth = (torch.stack([_powers(row, p) for row in rows]).sum(0) for p in (2, 4))
        kurtosis = fourth * width / second.square()
        seen = fourth != 0  # where no token comes, a row of zeros stands in
        total = torch.where(seen, kurtosis, 0.0).sum()
        self.sums[block, PLACES.index(place)] += torch.stack([total, seen.sum(dtype=torch.float64)])


def _powers(rows: Tensor, power: int) -> Tensor:
    """Sum of |x|^power of each row, FP64; inside in FP32, one pass over BF16 as it is. (So x^4 is 0 below 1e-11.)"""
    return torch.linalg.vector_norm(rows, power, dim=-1, dtype=torch.float32).double().pow(power)


def _values(x: Tensor | Operand) -> Tensor:
    """x in numbers; where only FP8 is kept, what is read from it."""
    if isinstance(x, Tensor):
        return x
    return x.tensor if x.kept else read_back(x.data, x.scale_inv, torch.float32)
