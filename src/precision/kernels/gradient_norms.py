"""L2 norms of all gradients in two launches: one pass at memory bandwidth, 4 bytes per element.

`_squares_kernel` streams: a program owns a chunk of one tensor, which it looks up in a table made once, and writes an
FP32 sum of squares. `_total_kernel` adds up those of a tensor, in FP64 and always in the same order. A second table has
the tensors' addresses. The reference is torch._foreach_norm, which launches once for every 20 M elements.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.common import address_table, chunk_table

_BLOCK = 4096  # elements per program, 16 per thread
_WARPS = 8
_AT_ONCE = 4096  # sums of a tensor that are read at a time


@triton.jit
def _squares_kernel(chunks, gradients, sizes, sums, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Sum the squares of one chunk. chunks [programs, 2]: tensor, chunk of it. gradients [P]: addresses, multiples of
    ALIGN; 0: none, with sum 0. sizes [P]: numbers of elements."""
    program = tl.program_id(0).to(tl.int64)
    i = tl.load(chunks + program * 2)
    at = tl.load(chunks + program * 2 + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(gradients + i)
    g = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), ALIGN)
    size = tl.load(sizes + i)
    total = 0.0
    if address != 0:
        if (tl.load(chunks + program * 2 + 1).to(tl.int64) + 1) * BLOCK <= size:  # no mask: loads are wide
            x = tl.load(g + at, eviction_policy="evict_first")
        else:
            x = tl.load(g + at, mask=at < size, other=0.0)
        total += tl.sum(x * x)
    tl.store(sums + program, total)


@triton.jit
def _total_kernel(ends, sums, norms, BLOCK: tl.constexpr):
    """Compute the norm of one tensor, whose sums end at ends[i]."""
    i = tl.program_id(0)
    begin = tl.load(ends + i - 1, mask=i > 0, other=0)
    end = tl.load(ends + i)
    total = tl.zeros((BLOCK,), tl.float64)
    while begin < end:
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + at, mask=at < end, other=0).to(tl.float64)
        begin += BLOCK
    tl.store(norms + i, tl.sqrt(tl.sum(total)).to(tl.float32))


class GradientNorms:
    """Norms of P tensors with these numbers of elements (0 is allowed) on a device. block: elements of a program."""

    def __init__(self, sizes: Sequence[int], device: torch.device, block: int = _BLOCK):
        self._block, self._device = block, device
        counts = [-(-size // block) for size in sizes]
        self._chunks = chunk_table(counts).to(device)
        self._ends = torch.tensor(counts).cumsum(0).to(device)
        self._sizes = torch.tensor(sizes).to(device)
        self._known: list[int] = []
        self._addresses = torch.empty(0, dtype=torch.int64, device=device)

    def __call__(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return [P] FP32, 0 for None; gradients FP32. Does not synchronise."""
        flat = [None if g is None else g.contiguous() for g in gradients]
        addresses = [0 if g is None else g.data_ptr() for g in flat]
        if addresses != self._known:
            self._known, self._addresses = addresses, address_table(addresses, self._device)
        align = 16 if all(address % 16 == 0 for address in addresses) else 4
        sums = torch.empty(len(self._chunks), device=self._device)
        norms = torch.empty(len(flat), device=self._device)
        if len(self._chunks):
            _squares_kernel[(len(self._chunks),)](
                self._chunks, self._addresses, self._sizes, sums, self._block, align,
                num_warps=_WARPS,  # pyright: ignore[reportCallIssue]
            )  # fmt: skip
        if len(flat):
            _total_kernel[(len(flat),)](
                self._ends, sums, norms, _AT_ONCE,
                num_warps=8,  # pyright: ignore[reportCallIssue]
            )  # fmt: skip
        return norms
