"""Kurtosis of activations: the earliest sign that an FP8 run is about to diverge.

    kurtosis(x) = mean(x^4) / mean(x^2)^2          uncentred, over the hidden dimension of one token

averaged over tokens (arXiv 2505.20524). It is 3 for Gaussian numbers and D, the number of features, if one feature
holds everything. No scale fits numbers with outliers. In that paper's runs the kurtosis of QKV departed long before the
gradient norm, and the loss came last; growth slower than linear is healthy. Each block is measured at three places:

    qkv     queries, keys and values, as the projections make them (of MLA: q or q_b, and kv_b, together)
    ffn     input of the feed-forward layer's second linear, before it is cast; with experts: the shared ones' and
            every routed row
    block   the block's output, the residual stream

There are two definitions. The paper's text takes the features of one token and averages over tokens. Its code takes all
numbers of a sequence (`_sequence`), which also detects a few huge tokens. They differ where outliers are tokens.

The model accumulates the sums while a step is sampled (`precision.kurtosis`); this module reduces them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precision.kurtosis import WIDTHS, Kurtosis, kurtosis_of
from trainer.parallel.collectives import all_sum

if TYPE_CHECKING:
    from models.block import Block
    from trainer.launch.world import World

PLACES = ("qkv", "ffn", "block")
KINDS = (*PLACES, *(f"{place}_sequence" for place in PLACES))


class BlockKurtosis:
    """Sums of the `Kurtosis` modules of a model's blocks (`DeepSeek.iter_blocks`). The model must be bound. A block
    that is recomputed counts its tokens twice, in both sums."""

    def __init__(self, blocks: list[tuple[str, Block]]):
        self._shape = len(blocks), len(PLACES)
        self._found: list[Tensor] = []
        places: list[int] = []
        for i, (_, block) in enumerate(blocks):
            for module in block.modules():
                if isinstance(module, Kurtosis):
                    assert module.row is not None, "precision.bind(model, ...) has not been called"
                    self._found.append(module.row)
                    places.append(i * len(PLACES) + PLACES.index(module.place))
        self._places = torch.tensor(places, device=self._found[0].device)

    def forget(self) -> None:
        torch._foreach_zero_(self._found)  # pyright: ignore[reportPrivateImportUsage]

    @property
    def sums(self) -> Tensor:
        """Sums of the kurtosis and of tokens, [blocks, places, 2] FP64."""
        return self._by_place(torch.stack(self._found)[:, :2])

    def _by_place(self, sums: Tensor) -> Tensor:
        blocks, places = self._shape
        zeros = torch.zeros(blocks * places, 2, dtype=torch.float64, device=sums.device)
        return zeros.index_add_(0, self._places, sums).view(blocks, places, 2)

    def means(self, world: World) -> dict[str, Tensor]:
        """Return means over all ranks, [blocks] FP64 by place and by place with `_sequence`; NaN if empty. A
        collective."""
        tokens, sequences, pool = all_sum([torch.stack(self._found)], world)[0].split(WIDTHS, 1)
        sequences = sequences + kurtosis_of(pool.T).T
        sums = torch.cat([self._by_place(tokens), self._by_place(sequences)], 1)
        return dict(zip(KINDS, (sums[..., 0] / sums[..., 1]).unbind(1), strict=True))
