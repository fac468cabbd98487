"""Kurtosis of activations, measured while a step is sampled (see `observe`).

    kurtosis(x) = mean(x^4) / mean(x^2)^2          uncentred, over the features of one token (arXiv 2505.20524)

A `Kurtosis` module is called with a tensor of the model and does nothing unless a sampler is set (`observe`). Then it
adds to `sums` [2] FP64 the kurtosis of every k-th token and the number of these tokens. Rows of zeros are padding and
do not count. `sequences` [2] holds the same over all sampled numbers of a sequence together, as the code of that paper
measures it; this also detects a few huge tokens. Rows without a sequence (of experts) count as one in a step, whatever
microbatch or rank they are in: their moments (sum of x^2, of x^4, and count) are added up.

Moments are also added over ranks: of a token over those that have its other features (`token_group`), of a sequence
over those that have its other features and positions (`sequence_group`).

`sums` is a view into one buffer of the model, bound like the rows of the arena (`bind`). Each view has its own version
counter: one module's write must not invalidate what another one saved. In a graph the module is an operator that
mutates its sums only when it is sampled, so the graph is the same in all steps.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from precision.observe import every, is_sampled
from precision.operators import fake, operator

WIDTHS = 2, 2, 3
"""Parts of a module's row: kurtosis and number of tokens, of sequences, and the moments of rows without a sequence."""


class Kurtosis(nn.Module):
    """Measures the kurtosis of the tensor at `place` of a block. Both are None until `bind`: row, of the buffer, and
    sums [2] FP64, the part of it over tokens."""

    def __init__(self, place: str):
        super().__init__()
        self.place = place
        self.row: Tensor | None = None
        self.sums: Tensor | None = None  # made once, because graphs take it as it is
        self.token_group = self.sequence_group = ""  # names of process groups; none: this rank has all of it

    @property
    def sequences(self) -> Tensor | None:
        """[2] FP64: the sum over sequences, and their number."""
        return None if self.row is None else self.row[2:4]

    def forward(self, x: Tensor, beside: Tensor | None = None) -> None:
        """Add the kurtosis of x [..., D]: [B, S, D] of sequences, [R, D] of rows without one. beside [..., E]: more
        features of the same tokens. On a sampled step a collective of the groups."""
        if self.row is None:
            return
        groups = self.token_group, self.sequence_group
        if torch.compiler.is_compiling():
            _kurtosis(self.row, x.detach(), None if beside is None else beside.detach(), *groups)
        elif is_sampled():
            _take(self.row, x, beside, *groups)


def bind_kurtosis(modules: Iterable[Kurtosis], device: torch.device | str) -> Tensor:
    """Give each module its row of a new FP64 buffer; return the sums over tokens [modules, 2]."""
    found = list(modules)
    rows = torch.zeros(len(found), sum(WIDTHS), dtype=torch.float64, device=device)
    for i, module in enumerate(found):
        module.row, module.sums = rows.data[i], rows.data[i, :2]
    return rows[:, :2]


def moments(x: Tensor, beside: Tensor | None = None) -> Tensor:
    """Return the moments [3, R] FP64 of rows x [R, D] and beside [R, E]: the sum of x^2, of x^4, and the number of
    features. Computed in FP32 (so x^4 is 0 below 1e-11)."""
    squares = [part.float().square() for part in (x, beside) if part is not None]
    second = torch.stack([square.sum(-1).double() for square in squares]).sum(0)
    fourth = torch.stack([torch.linalg.vector_norm(square, dim=-1).double().square() for square in squares]).sum(0)
    return torch.stack([second, fourth, torch.full_like(second, sum(square.shape[-1] for square in squares))])


def kurtosis_of(moments: Tensor) -> Tensor:
    """Return [2, N] of moments [3, N]: the kurtosis, 0 for rows of zeros, and whether a row counts (1 or 0)."""
    second, fourth, width = moments
    seen = fourth != 0
    return torch.stack([torch.where(seen, fourth * width / second.square(), 0.0), seen.double()])


@torch.no_grad()
def add_plain_kurtosis(sums: Tensor, x: Tensor) -> None:
    """Add to sums [2] the kurtosis of rows x [R, D], and their number: what the kernel is compared with."""
    sums.add_(kurtosis_of(moments(x)).sum(1))


@torch.no_grad()
def _take(row: Tensor, x: Tensor, beside: Tensor | None, token_group: str, sequence_group: str) -> None:
    """Add the kurtosis of every k-th row to a module's row."""
    tokens, sequences, pool = row.split(WIDTHS)
    rows, more = (None if part is None else part.flatten(0, -2) for part in (x, beside))
    assert rows is not None
    part = every(rows)
    here = moments(rows[part], None if more is None else more[part])
    if x.dim() == 3:
        of_row = torch.arange(len(rows), device=rows.device)[part] // x.shape[1]
        by_sequence = here.new_zeros(3, x.shape[0]).index_add_(1, of_row, here)
        sequences.add_(kurtosis_of(_sum(by_sequence, sequence_group)).sum(1))
    else:
        pool.add_((here * (here[1] != 0)).sum(1))
    tokens.add_(kurtosis_of(_sum(here, token_group)).sum(1))


def _sum(x: Tensor, group: str) -> Tensor:
    if not group:
        return x
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group))


@operator("kurtosis", mutates_args=("row",))
def _kurtosis(row: Tensor, x: Tensor, beside: Tensor | None, token_group: str, sequence_group: str) -> None:
    if is_sampled():
        _take(row, x, beside, token_group, sequence_group)


@fake(_kurtosis)
def _(row: Tensor, x: Tensor, beside: Tensor | None, token_group: str, sequence_group: str) -> None:
    return None
