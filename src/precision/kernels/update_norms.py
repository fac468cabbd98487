"""Norms of AdamW's last update and of each parameter: one pass over p, m and v.

After t steps, with the current p, m, v, the last step was (`trainer.optim.update_norms` has the derivation, and is the
reference)

    lr / (1 - lr decay) * (u + decay p)        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

The kernel reads 12 bytes per element (with moments in BF16 8) and writes nothing; this traffic is its whole time.
`_factors_kernel` computes the values that are the same for a whole tensor, in FP64. `_squares_kernel` streams: a
program owns a chunk of one tensor and writes two sums of squares, FP32 over some thousand elements. `_add_up_kernel`
adds them, one program per tensor, in FP64 and always in the same order.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels.common import MOMENTS, cdiv, chunk_table

_BLOCK = 2048  # elements per program, 16 per thread: four loads of 16 bytes from each of three tensors
_WARPS = 4
_AT_ONCE = 4096  # sums of a tensor that are read at a time
_PREPARED = 256  # tensors that one program prepares


@triton.jit(do_not_specialize=["P"])
def _factors_kernel(
    steps, factors, P, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute factors [P, 2]: sqrt(1 - beta2^t) / (1 - beta1^t), eps sqrt(1 - beta2^t). Without steps: values that give
    u = 0."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(steps + i, mask=i < P, other=0).to(tl.pointer_type(tl.float32))
    t = tl.load(step, mask=i < P, other=0).to(tl.float64)
    one = tl.full((BLOCK,), 1.0, tl.float64)
    first = one - tl.exp(t * tl.full((BLOCK,), LOG_BETA1, tl.float64))
    second = tl.sqrt(one - tl.exp(t * tl.full((BLOCK,), LOG_BETA2, tl.float64)))
    factor = tl.where(t > 0, second / tl.where(t > 0, first, one), 0.0)
    small = tl.where(t > 0, second * tl.full((BLOCK,), EPS, tl.float64), one)
    tl.store(factors + i * 2, factor.to(tl.float32), mask=i < P)
    tl.store(factors + i * 2 + 1, small.to(tl.float32), mask=i < P)


@triton.jit
def _squares(p, m, v, begin, end, factor, small, decay, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Return the sums of squares of (u + decay p) and p over BLOCK elements; WHOLE: none of them is past `end`."""
    at = begin + tl.arange(0, BLOCK)
    inside = None if WHOLE else at < end
    master = tl.load(p + at, mask=inside, eviction_policy="evict_first")
    first = tl.load(m + at, mask=inside, eviction_policy="evict_first").to(tl.float32)
    second = tl.load(v + at, mask=inside, eviction_policy="evict_first").to(tl.float32)
    change = first / (tl.sqrt(second) + small) * factor + decay * master
    if not WHOLE:
        change = tl.where(inside, change, 0.0)
        master = tl.where(inside, master, 0.0)
    return tl.sum(change * change), tl.sum(master * master)


@triton.jit
def _squares_kernel(
    chunks, tensors, factors, decays, sums, BLOCK: tl.constexpr, ALIGN: tl.constexpr, MOMENT: tl.constexpr
):  # fmt: skip
    """Write one chunk's two sums, [programs, 2]. chunks [programs, 2]: tensor, chunk of it. tensors [P, 4]: addresses
    of p, m and v, multiples of ALIGN, number of elements. MOMENT: format of m and v."""
    program = tl.program_id(0).to(tl.int64)
    i = tl.load(chunks + program * 2)
    begin = tl.load(chunks + program * 2 + 1).to(tl.int64) * BLOCK
    row = tensors + i * 4
    p = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), ALIGN)
    m = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(MOMENT)), ALIGN)
    v = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(MOMENT)), ALIGN)
    end = tl.load(row + 3)
    factor, small = tl.load(factors + i * 2), tl.load(factors + i * 2 + 1)
    decay = tl.load(decays + i)
    if begin + BLOCK <= end:
        changed, size = _squares(p, m, v, begin, end, factor, small, decay, BLOCK, True)
    else:
        changed, size = _squares(p, m, v, begin, end, factor, small, decay, BLOCK, False)
    tl.store(sums + program * 2, changed)
    tl.store(sums + program * 2 + 1, size)


@triton.jit(do_not_specialize=["P"])
def _add_up_kernel(ends, sums, steps, decays, lr, norms, P, BLOCK: tl.constexpr):
    """Write the norms of one tensor, whose sums end at ends[i], to norms [2, P]: of the update, 0 without steps; of
    itself."""
    i = tl.program_id(0)
    begin = tl.load(ends + i - 1, mask=i > 0, other=0)
    end = tl.load(ends + i)
    changed = tl.zeros((BLOCK,), tl.float64)
    size = tl.zeros((BLOCK,), tl.float64)
    while begin < end:
        at = begin + tl.arange(0, BLOCK)
        changed += tl.load(sums + at * 2, mask=at < end, other=0).to(tl.float64)
        size += tl.load(sums + at * 2 + 1, mask=at < end, other=0).to(tl.float64)
        begin += BLOCK
    step = tl.load(tl.load(steps + i).to(tl.pointer_type(tl.float32)))
    rate = tl.load(lr).to(tl.float64)
    factor = rate / (1.0 - rate * tl.load(decays + i).to(tl.float64))
    tl.store(norms + i, tl.where(step > 0, tl.sqrt(tl.sum(changed)) * factor, 0.0))
    tl.store(norms + P + i, tl.sqrt(tl.sum(size)))


class UpdateNorms:
    """Norms of P parameters and of their last updates.

    sizes: elements of each, 0 too. block: elements at a time. moments: FP32 or BF16.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        betas: tuple[float, float],
        eps: float,
        device: torch.device,
        block: int = _BLOCK,
        moments: torch.dtype = torch.float32,
    ):
        self._block, self._eps, self._moment = block, eps, MOMENTS[moments]
        self.logs = [math.log(max(beta, 1e-300)) for beta in betas]
        counts = [-(-size // block) for size in sizes]
        self._chunks = chunk_table(counts).to(device)
        self._ends = torch.tensor(counts).cumsum(0).to(device)
        self._factors = torch.empty(len(sizes), 2, device=device)

    def __call__(self, tensors: Tensor, steps: Tensor, decays: Tensor, lr: Tensor, align: int) -> Tensor:
        """Return [2, P] FP64: norms of the updates, of the parameters. Does not synchronise.

        tensors [P, 4] int64: addresses of parameter, first and second moment, contiguous, and multiples of `align`;
        elements. steps [P] int64: addresses of FP32 numbers. decays [P] FP32. lr: 0-d FP32.
        """
        P, device = len(self._ends), self._ends.device
        sums = torch.empty(len(self._chunks), 2, device=device)
        norms = torch.empty(2, P, dtype=torch.float64, device=device)
        _factors_kernel[(cdiv(P, _PREPARED),)](steps, self._factors, P, *self.logs, self._eps, _PREPARED)
        if len(self._chunks):
            _squares_kernel[(len(self._chunks),)](
                self._chunks, tensors, self._factors, decays, sums, self._block, align, self._moment,
                num_warps=_WARPS,  # pyright: ignore[reportCallIssue]
            )  # fmt: skip
        _add_up_kernel[(P,)](
            self._ends, sums, steps, decays, lr, norms, P, _AT_ONCE,
            num_warps=8,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
        return norms
