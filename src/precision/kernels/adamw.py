"""AdamW over all parameters in two launches, bound by memory bandwidth.

Per parameter p with gradient g, moments m and v, in step t (arXiv 1711.05101; torch.optim.AdamW):

    g = g / divisor                                     the clipping, a number on the device
    m = m + (1 - beta1) (g - m)        v = v + (1 - beta2) (g^2 - v)
    p = p - (lr decay p + lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps))

The kernel reads 16 bytes per element and writes 12; with moments in BF16 12 and 8 (rounded to nearest after p has been
computed). This traffic is its whole time. So gradients are not written back, and values that are the same for a whole
tensor are computed beforehand: `_prepare_kernel` advances the step counts and computes each tensor's factors, in FP64
because 1 - beta^t loses the digits that FP32 has; `_adamw_kernel` streams. Each of its programs owns a chunk of one
tensor, which it looks up in a table made once. A second table has the tensors' addresses. (Gradients are new tensors in
each step: the table is copied, asynchronously, when an address has changed.)

The compute weight that the next step's GEMMs read, BF16 or FP8 under a known scale, is written here too (`Copy`): a
pass of its own would read all parameters again.

Where the flag `ok` is false, parameters and moments stay, and copies are made from them again. The reference is
torch.optim.AdamW, and `weights.cast_weight` for copies.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.formats import E4M3
from precision.kernels.common import (
    MOMENTS,
    TRITON_FP8,
    abs_bits,
    address_table,
    as_bf16,
    cdiv,
    chunk_table,
    inverse,
    to_fp8,
)
from precision.kernels.update_norms import UpdateNorms

_BLOCK = 512  # elements at a time, 4 per thread: a load of 16 bytes from each of four tensors
_BLOCKS = 1  # blocks per program: the fastest measured on an H200, with many programs
_WARPS = 4
_EVICT = "evict_first"  # policy in the L2 cache: nothing is read again
_PREPARED = 256  # tensors that one program prepares


@triton.jit
def _prepare_kernel(
    gradients, steps, decays, ok, lr, divisor, factors, P,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add 1 to the step counts; compute factors [P, 4]: lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), lr * decay, 1 /
    divisor."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    go = (i < P) & tl.load(ok)
    go &= tl.load(gradients + i, mask=i < P, other=0) != 0
    step = tl.load(steps + i, mask=go, other=0).to(tl.pointer_type(tl.float32))
    t32 = tl.load(step, mask=go, other=0) + 1
    tl.store(step, t32, mask=go)
    t = t32.to(tl.float64)
    rate = tl.load(lr)
    one = tl.full((BLOCK,), 1.0, tl.float64)
    kept1 = one - tl.exp(t * tl.full((BLOCK,), LOG_BETA1, tl.float64))
    kept2 = one - tl.exp(t * tl.full((BLOCK,), LOG_BETA2, tl.float64))
    to = factors + i * 4
    tl.store(to, (rate.to(tl.float64) / kept1).to(tl.float32), mask=go)
    tl.store(to + 1, (one / tl.sqrt(kept2)).to(tl.float32), mask=go)
    tl.store(to + 2, rate * tl.load(decays + i, mask=go, other=0), mask=go)
    tl.store(to + 3, (one / tl.load(divisor)).to(tl.float32), mask=go)


@triton.jit
def _towards(old, new, BETA: tl.constexpr):
    """Return beta old + (1 - beta) new, in the form that rounds least: for beta near 1 the change is small beside
    `old`."""
    if BETA > 0.5:
        return old + (new - old) * (1.0 - BETA)
    return new + (old - new) * BETA


@triton.jit
def _update(
    p, g, m, v, begin, end, rate, root, decay, shrink,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements from `begin` on. WHOLE: none of them is past `end`, so that loads are wide. EVICT: their
    policy in the L2 cache."""
    at = begin + tl.arange(0, BLOCK)
    inside = None if WHOLE else at < end
    gradient = tl.load(g + at, mask=inside, eviction_policy=EVICT) * shrink
    first = tl.load(m + at, mask=inside, eviction_policy=EVICT).to(tl.float32)
    second = tl.load(v + at, mask=inside, eviction_policy=EVICT).to(tl.float32)
    master = tl.load(p + at, mask=inside, eviction_policy=EVICT)
    first = _towards(first, gradient, BETA1)
    second = _towards(second, gradient * gradient, BETA2)
    master -= decay * master + rate * (first / (tl.sqrt(second) * root + EPS))
    tl.store(m + at, first.to(m.dtype.element_ty), mask=inside)
    tl.store(v + at, second.to(v.dtype.element_ty), mask=inside)
    tl.store(p + at, master, mask=inside)
    return master


@triton.jit
def _write_copy(
    entry, master, begin, end, ALIGN: tl.constexpr, BLOCK: tl.constexpr, F8: tl.constexpr, LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the copy of BLOCK elements of a master, all of one group. entry: the tensor's row of `copies`."""
    at = begin + tl.arange(0, BLOCK)
    inside = None if WHOLE else at < end
    rounded = as_bf16(master)
    scales = tl.load(entry + 2)
    if scales == 0:
        plain = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.bfloat16)), ALIGN)
        tl.store(plain + at, rounded.to(tl.bfloat16), mask=inside)
    elif F8 is not None:  # GPUs before sm_89 cannot compile this
        data = tl.multiple_of(tl.load(entry).to(tl.pointer_type(F8)), ALIGN)
        group = begin // tl.load(entry + 1)
        scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + group)
        tl.store(data + at, to_fp8(rounded * scale, F8, LIMIT), mask=inside)
        top = tl.max(abs_bits(rounded) if WHOLE else tl.where(at < end, abs_bits(rounded), 0))
        amax = tl.load(entry + 4).to(tl.pointer_type(tl.int32)) + group
        if top > tl.load(amax):  # it only rises, so an old value does no harm: fewer atomics
            tl.atomic_max(amax, top, sem="relaxed")
        if begin % tl.load(entry + 1) == 0:
            tl.store(tl.load(entry + 3).to(tl.pointer_type(tl.float32)) + group, inverse(scale))


@triton.jit
def _adamw_kernel(
    chunks, gradients, tensors, copies, factors, ok,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGN: tl.constexpr, MOMENT: tl.constexpr, EVICT: tl.constexpr,
    F8: tl.constexpr, LIMIT: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Update one chunk. chunks [programs, 2]: tensor, chunk of it. gradients [P]: addresses; 0: none. tensors [P, 4]:
    addresses of p, m and v, number of elements. copies [P, 5]: address of the copy (0: none), elements of a group,
    addresses of its groups' scales (0: BF16), inverse scales and amaxes. All addresses are multiples of ALIGN. MOMENT:
    format of m and v. F8: that of copies with scales; None: there are none. COPIED: whether there are any copies."""
    entry = chunks + tl.program_id(0).to(tl.int64) * 2
    i = tl.load(entry)
    begin = tl.load(entry + 1).to(tl.int64) * (BLOCK * BLOCKS)
    go = tl.load(ok)
    gradient = tl.load(gradients + i)
    row = tensors + i * 4
    p = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), ALIGN)
    m = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(MOMENT)), ALIGN)
    v = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(MOMENT)), ALIGN)
    size = tl.load(row + 3)
    copied = False
    if COPIED:  # GPUs before sm_80 cannot compile the rounding to BF16
        copied = tl.load(copies + i * 5) != 0
    if (gradient != 0) & (go | copied):
        g = tl.multiple_of(gradient.to(tl.pointer_type(tl.float32)), ALIGN)
        rate = tl.load(factors + i * 4)
        root = tl.load(factors + i * 4 + 1)
        decay = tl.load(factors + i * 4 + 2)
        shrink = tl.load(factors + i * 4 + 3)
        end = tl.minimum(begin + BLOCK * BLOCKS, size)
        while begin + BLOCK <= end:
            if go:
                one = _update(p, g, m, v, begin, end, rate, root, decay, shrink, BETA1, BETA2, EPS, BLOCK, EVICT, True)
            else:
                one = tl.load(p + begin + tl.arange(0, BLOCK))
            if copied:
                _write_copy(copies + i * 5, one, begin, end, ALIGN, BLOCK, F8, LIMIT, True)
            begin += BLOCK
        if begin < end:
            if go:
                one = _update(p, g, m, v, begin, end, rate, root, decay, shrink, BETA1, BETA2, EPS, BLOCK, EVICT, False)
            else:
                at = begin + tl.arange(0, BLOCK)
                one = tl.load(p + at, mask=at < end, other=0)
            if copied:
                _write_copy(copies + i * 5, one, begin, end, ALIGN, BLOCK, F8, LIMIT, False)


class Copy(NamedTuple):
    """A compute weight that a step writes: data, of the parameter's shape, BF16 or E4M3. For E4M3, FP32 numbers, one
    for each expert of a stack or one alone: scale, which is read, scale_inv, which is written, and amax, which is
    raised to the largest |BF16(parameter)|."""

    data: Tensor
    scale: Tensor | None = None
    scale_inv: Tensor | None = None
    amax: Tensor | None = None

    @property
    def size(self) -> int:
        """Elements of a group."""
        return self.data.numel() // (1 if self.scale is None else self.scale.numel())

    def fits(self, block: int) -> bool:
        """Whether no block of the kernel has elements of two groups."""
        return self.scale is None or self.scale.numel() == 1 or self.size % block == 0

    @property
    def entry(self) -> list[int]:
        """Its row of the kernel's table."""
        beside = [0 if t is None else t.data_ptr() for t in (self.scale, self.scale_inv, self.amax)]
        return [self.data.data_ptr(), self.size, *beside]


_NONE = [0] * 5  # the entry of a parameter without a copy


class FusedAdamW:
    """Updates P parameters in place, with their moments and step counts.

    parameters, first, second: P tensors each, contiguous, of equal shapes, on one device; parameters FP32, first and
    second FP32 or BF16. steps: P 0-d FP32 tensors. weight_decay: P numbers. Moments and step counts must keep their
    addresses; parameters and gradients may move. block: elements that a program handles at a time.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        steps: Sequence[Tensor],
        weight_decay: Sequence[float],
        betas: tuple[float, float],
        eps: float,
        block: int = _BLOCK,
    ):
        self._parameters, self._kept = list(parameters), [*first, *second, *steps]
        moments = first[0].dtype if first else torch.float32
        for tensor in [*self._parameters, *steps]:
            assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        for tensor in (*first, *second):
            assert tensor.dtype == moments and tensor.is_contiguous()
        self._moment = MOMENTS[moments]
        self._betas, self._eps, self._block = betas, eps, block
        self._device = device = self._parameters[0].device
        chunks = [-(-p.numel() // (block * _BLOCKS)) for p in self._parameters]
        self._chunks = chunk_table(chunks).to(device)
        self._steps = torch.tensor([t.data_ptr() for t in steps], device=device)
        self._decays = torch.tensor(weight_decay, dtype=torch.float32, device=device)
        self._moments = list(zip((t.data_ptr() for t in first), (t.data_ptr() for t in second), strict=True))
        self._sizes = [p.numel() for p in self._parameters]
        self._factors = torch.empty(len(chunks), 4, device=device)
        self._norms = UpdateNorms(self._sizes, betas, eps, device, moments=moments)
        self._one = torch.ones((), device=device)
        self._addresses: tuple[list[int], list[int]] = [], []
        self._tensors = self._gradients = self._copies = torch.empty(0, dtype=torch.int64, device=device)
        self._entries: list[list[int]] = []
        self._align = 4

    def step(
        self, ok: Tensor, lr: Tensor, divisor: Tensor | None = None, copies: Sequence[tuple[Tensor, ...] | None] = ()
    ) -> list[bool]:
        """Make one step with the parameters' gradients if `ok`, else nothing but the copies. A parameter without a
        gradient does not change, nor does its copy.

        ok: bool; lr: FP32; divisor of all gradients: FP32, None: 1; all 0-d, on the device. copies: P fields of `Copy`,
        or None; or none at all. Returns which were written. Does not synchronise.
        """
        gradients = [None if p.grad is None else p.grad.contiguous() for p in self._parameters]
        made: list[Copy | None] = []
        for fields, g in zip(copies or [None] * len(gradients), gradients, strict=True):
            copy = None if fields is None or g is None else Copy(*fields)
            made.append(copy if copy is not None and copy.fits(self._block) else None)
        self._look_up([0 if g is None else g.data_ptr() for g in gradients], made)
        divisor = self._one if divisor is None else divisor
        beta1, beta2 = self._betas
        copied = any(entry[0] for entry in self._entries)
        narrow = TRITON_FP8[E4M3.dtype] if any(entry[2] for entry in self._entries) else None
        P = len(self._parameters)
        _prepare_kernel[(cdiv(P, _PREPARED),)](
            self._gradients, self._steps, self._decays, ok, lr, divisor, self._factors, P,
            *self._norms.logs, _PREPARED,
        )  # fmt: skip
        if len(self._chunks):
            _adamw_kernel[(len(self._chunks),)](
                self._chunks, self._gradients, self._tensors, self._copies, self._factors, ok,
                beta1, beta2, self._eps, self._block, _BLOCKS, self._align, self._moment, _EVICT,
                narrow, E4M3.max, copied, num_warps=_WARPS,  # pyright: ignore[reportCallIssue]
            )  # fmt: skip
        written = [p for p, g in zip(self._parameters, gradients, strict=True) if g is not None]
        torch.autograd.graph.increment_version(written)  # caches made from a parameter compare its version
        return [copy is not None for copy in made]

    def norms(self, lr: Tensor) -> Tensor:
        """Return [2, P] FP64: norm of the last step's change of each parameter, at this rate (0-d FP32), 0 before the
        first step; norm of each parameter. Does not synchronise."""
        self._look_up(self._addresses[1], None)
        return self._norms(self._tensors, self._steps, self._decays, lr, self._align)

    def _look_up(self, gradients: list[int], copies: Sequence[Copy | None] | None) -> None:
        """Update the tables of addresses. copies: None: as they are."""
        parameters = [p.data_ptr() for p in self._parameters]
        entries = self._entries if copies is None else [_NONE if copy is None else copy.entry for copy in copies]
        known = self._addresses
        if (parameters, gradients) == known and entries == self._entries:
            return
        if parameters != known[0]:
            rows = [(p, *moments, n) for p, moments, n in zip(parameters, self._moments, self._sizes, strict=True)]
            self._tensors = address_table(rows, self._device)
        if gradients != known[1]:
            self._gradients = address_table(gradients, self._device)
        if entries != self._entries:
            self._copies = address_table(entries, self._device)
        self._addresses, self._entries = (parameters, gradients), entries
        every = [*parameters, *gradients, *(entry[0] for entry in entries)]
        every += [address for pair in self._moments for address in pair]
        self._align = 16 if all(address % 16 == 0 for address in every) else 4
