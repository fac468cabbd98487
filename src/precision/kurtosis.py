"""Kurtosis of activations, measured while a step is sampled (see `observe`).

    kurtosis(x) = mean(x^4) / mean(x^2)^2          uncentred, over the features of one token (arXiv 2505.20524)

A `Kurtosis` module is called with a tensor of the model and does nothing unless a sampler is set (`observe`). Then it
adds to `sums` [2] FP64 the kurtosis of every k-th token and the number of these tokens. Rows of zeros are padding and
do not count. `sequences` [2] holds the same over all sampled numbers of a sequence together, as the code of that paper
measures it; this also detects a few huge tokens. The experts' rows belong to no sequence and count as one.

`sums` is a view into one buffer of the model, bound like the rows of the arena (`bind`). Each view has its own version
counter: one module's write must not invalidate what another one saved. In a graph the module is an operator that
mutates its sums only when it is sampled, so the graph is the same in all steps.
"""

from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from precision.observe import every, is_sampled
from precision.operators import operator
from precision.proof import STATISTICS, refused


class _Row:
    """A module's rows of the buffer. They are not registered as buffers of the module, so checkpoints do not contain
    them."""

    def __init__(self):
        self.both: Tensor | None = None
        self.sums: Tensor | None = None  # the halves of `both`, made once because graphs take them as they are
        self.sequences: Tensor | None = None


class Kurtosis(nn.Module):
    """Measures the kurtosis of the tensor at `place` of a block."""

    def __init__(self, place: str):
        super().__init__()
        self.place, self.row = place, _Row()

    @property
    def sums(self) -> Tensor | None:
        """[2] FP64: the sum over tokens, and their number; None where nothing is bound."""
        return self.row.sums

    @property
    def sequences(self) -> Tensor | None:
        """[2] FP64: the sum over sequences, and their number."""
        return self.row.sequences

    def forward(self, x: Tensor, beside: Tensor | None = None) -> None:
        """Add the kurtosis of x [..., D]. beside [..., E]: more features of the same tokens."""
        both = self.row.both
        if both is None:
            return
        if torch.compiler.is_compiling():
            _kurtosis(both, x.detach(), None if beside is None else beside.detach())
        elif is_sampled():
            _take(both, x, beside)


def bind_kurtosis(modules: Iterable[Kurtosis], device: torch.device | str) -> Tensor:
    """Give each module its row of a new FP64 buffer; return the sums over tokens [modules, 2]."""
    found = list(modules)
    both = torch.zeros(len(found), 4, dtype=torch.float64, device=device)
    for i, module in enumerate(found):
        module.row.both, module.row.sums, module.row.sequences = both.data[i], both.data[i, :2], both.data[i, 2:]
    return both[:, :2]


@torch.no_grad()
def add_plain_kurtosis(sums: Tensor, x: Tensor, beside: Tensor | None = None) -> None:
    """Add the kurtosis of rows x [R, D] and beside [R, E] to sums [2]; computed in FP32 (so x^4 is 0 below 1e-11)."""
    squares = [part.float().square() for part in (x, beside) if part is not None]
    second = torch.stack([square.sum(-1).double() for square in squares]).sum(0)
    fourth = torch.stack([torch.linalg.vector_norm(square, dim=-1).double().square() for square in squares]).sum(0)
    seen = fourth != 0
    width = sum(square.shape[-1] for square in squares)
    kurtosis = torch.where(seen, fourth * width / second.square(), 0.0)
    sums.add_(torch.stack([kurtosis.sum(), seen.sum(dtype=torch.float64)]))


@torch.no_grad()
def add_sequence_kurtosis(sequences: Tensor, rows: Tensor, beside: Tensor | None, of_row: Tensor, count: int) -> None:
    """Add the kurtosis of rows [R, D] and beside [R, E] to sequences [2]; row r is in sequence of_row[r] of `count`."""
    squares = [part.float().square() for part in (rows, beside) if part is not None]
    width = sum(square.shape[-1] for square in squares)
    second = torch.stack([square.sum(-1).double() for square in squares]).sum(0)
    fourth = torch.stack([torch.linalg.vector_norm(square, dim=-1).double().square() for square in squares]).sum(0)
    sums = torch.zeros(3, count, dtype=torch.float64, device=rows.device)
    sums.index_add_(1, of_row, torch.stack([second, fourth, torch.full_like(second, width)]))
    seen = sums[1] > 0
    kurtosis = torch.where(seen, sums[1] * sums[2] / sums[0].square(), 0.0)
    sequences.add_(torch.stack([kurtosis.sum(), seen.sum(dtype=torch.float64)]))


def _take(both: Tensor, x: Tensor, beside: Tensor | None) -> None:
    """Add the kurtosis of every k-th row. both [4]: sums over tokens, sums over sequences."""
    sums, sequences = both[:2], both[2:]
    rows, more = (None if part is None else part.detach().flatten(0, -2) for part in (x, beside))
    assert rows is not None
    part = every(rows)
    count, length = (x.shape[0], x.shape[1]) if x.dim() == 3 else (1, max(len(rows), 1))
    of_row = torch.arange(len(rows), device=rows.device)[part] // length
    rows, more = rows[part], None if more is None else more[part]
    add_sequence_kurtosis(sequences, rows, more, of_row, count)
    if rows.is_cuda and find_spec("triton") is not None and STATISTICS not in refused:
        from precision.kernels.kurtosis import add_kurtosis

        add_kurtosis(sums, rows, more)
    else:
        add_plain_kurtosis(sums, rows, more)


@operator("kurtosis", mutates_args=("both",))
def _kurtosis(both: Tensor, x: Tensor, beside: Tensor | None) -> None:
    if is_sampled():
        _take(both, x, beside)


@torch.library.register_fake(_kurtosis)
def _(both: Tensor, x: Tensor, beside: Tensor | None) -> None:
    return None
