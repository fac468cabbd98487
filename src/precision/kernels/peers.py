"""Row exchange with other GPUs of a node, through memory that all of them have mapped (symmetric memory).

Each of P processes has an inbox of P equal blocks, block s for rows from process s. `push` writes the used rows of
block p of a tensor into process p's inbox, block `rank`: plain stores, over NVLink to other GPUs. `take` copies its own
inbox into a tensor, with zeros in place of unused rows. The number of used rows is known on the device only. The caller
synchronises reads and writes: barriers on both sides (`models.transport`).

Numbers are moved as 32-bit words, whatever their format.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.kernels import const

_WORDS = 4096  # of a program at a time
_PROGRAMS = 64  # per block: enough for NVLink, and few beside a GEMM


@triton.jit
def _push_kernel(rows, inboxes, live, first, row_words, block_words, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    p = tl.program_id(1)
    n = tl.load(live + p).to(tl.int32) * row_words
    there = tl.multiple_of(tl.load(inboxes + p).to(tl.pointer_type(tl.int32)) + first, 16)
    here = rows + p.to(tl.int64) * block_words
    for start in range(tl.program_id(0) * SIZE, n, PROGRAMS * SIZE):
        i = start + tl.arange(0, SIZE)
        tl.store(there + i, tl.load(here + i, mask=i < n), mask=i < n)


@triton.jit
def _take_kernel(inbox, out, live, row_words, block_words, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    p = tl.program_id(1)
    n = tl.load(live + p).to(tl.int32) * row_words
    first = p.to(tl.int64) * block_words
    for start in range(tl.program_id(0) * SIZE, block_words, PROGRAMS * SIZE):
        i = start + tl.arange(0, SIZE)
        tl.store(out + first + i, tl.load(inbox + first + i, mask=i < n, other=0), mask=i < block_words)


def push(rows: Tensor, inboxes: Tensor, live: Tensor, offset: int, rank: int) -> None:
    """Write rows [P * C, ...], contiguous, of whole words, to the other processes: the first live[p] (int64 [P]) of
    each C to process p. inboxes [P] int64: the processes' addresses; offset: into each of them, bytes, a multiple of
    16."""
    P, words = inboxes.shape[0], _words(rows)
    block = words.shape[0] * words.shape[1] // P
    assert block % 4 == 0 and offset % 16 == 0, "blocks begin at multiples of 16 bytes"
    first, programs = offset // 4 + rank * block, _programs(block)
    _push_kernel[(programs, P)](words, inboxes, live, first, words.shape[1], block, _WORDS, programs, num_warps=8)


def take(inbox: Tensor, live: Tensor) -> Tensor:
    """Return a copy of inbox [P * C, ...], contiguous: the first live[p] (int64 [P]) rows of each C, then zeros."""
    out, P = torch.empty_like(inbox), live.shape[0]
    words, to = _words(inbox), _words(out)
    block = words.shape[0] * words.shape[1] // P
    programs = _programs(block)
    _take_kernel[(programs, P)](words, to, live, words.shape[1], block, _WORDS, programs, num_warps=8)
    return out


def _words(rows: Tensor) -> Tensor:
    """View rows as [R, words] int32."""
    return rows.view(rows.shape[0], -1).view(torch.int32)


def _programs(block: int) -> int:
    return 1 if const.INTERPRETED else max(1, min(_PROGRAMS, triton.cdiv(block, _WORDS)))
