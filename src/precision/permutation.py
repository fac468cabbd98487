"""Permutation of tokens to their experts' rows and back, on one device.

A token that chose K experts becomes K rows. Rows are sorted by expert, so that a grouped GEMM finds each expert's rows
together:

    index   [R]     the token of each row, R = T K
    inverse [T, K]  the row of each of a token's choices: index[inverse[t, k]] = t
    offsets [E]     int32, where each expert's rows end; expert e has rows offsets[e-1] to offsets[e], perhaps none

A choice may be none, written as expert E: it makes no row, and inverse holds a row that does not exist.

The sort is stable, so a token's place within its expert follows from the order of tokens alone. Everything stays on the
device: a binary search in the sorted list yields the counts, and no shape depends on them.

Legend: T tokens, K chosen experts of a token, R = T K rows, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 128  # kernels that hold the rows of a whole layer pad each expert's to multiples of it


def rows_in_tiles(choices: int, experts: int) -> int:
    """Return the largest possible number of rows when this many choices are padded to tiles; memory is allocated for
    it."""
    return (choices + experts * (TILE - 1) + TILE - 1) // TILE * TILE


class Permutation(NamedTuple):
    """Rows in the experts' order; see the module docstring. order [R] int64: which of the T K choices each row is."""

    order: Tensor
    index: Tensor
    inverse: Tensor
    offsets: Tensor


def permutation(expert_TK: Tensor, num_experts: int, choices: int = -1) -> Permutation:
    """Sort the choices expert [T, K] int64 by expert. choices: how many are not none; -1: all."""
    T, K = expert_TK.shape
    sorted_R, order_R = expert_TK.flatten().sort(stable=True)
    inverse_R = torch.empty_like(order_R).scatter(0, order_R, torch.arange(T * K, device=order_R.device))
    experts_E = torch.arange(num_experts, device=sorted_R.device)
    offsets_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
    order_R = order_R if choices < 0 else order_R[:choices]
    return Permutation(order_R, order_R // K, inverse_R.view(T, K), offsets_E)
