"""Packed documents for benches: where they begin, and the ways to keep attention within them.

    documents         as the model calls it: on a GPU our kernel, elsewhere a mask
    documents_whole   the same with one document a sequence: the cost of the kernel itself against cuDNN's
    documents_mask    PyTorch with a boolean mask, by any of its kernels that takes one
    documents_flex    flex_attention with a block mask, compiled

Lengths are drawn evenly from half the mean to one and a half times the mean, the same ones each time.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from models.documents import bounds_of
from precision import attention_core, document_mask
from precision.errors import UserError

NAMES = ["documents", "documents_whole", "documents_mask", "documents_flex"]
KERNELS = ("forward", "keys", "queries")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --document, for all benches of packed sequences."""
    parser.add_argument(
        "--document", type=int, default=512, metavar="N", help="mean tokens of documents (default: 512)"
    )


def add_tiles(parser: argparse.ArgumentParser) -> None:
    """Add --tiles KERNEL=MxNxWARPSxSTAGES: other tiles for a kernel of ours."""
    what = f"of our kernels within documents ({', '.join(KERNELS)}); may be given more than once"
    parser.add_argument("--tiles", action="append", default=[], metavar="KERNEL=MxNxWARPSxSTAGES", help=what)


def check(options: argparse.Namespace) -> None:
    """Check these arguments, and apply `--tiles`. Raises UserError."""
    if options.document < 2:
        raise UserError(f"--document {options.document}: documents have 2 tokens or more")
    for text in getattr(options, "tiles", []):
        name, _, sizes = text.partition("=")
        numbers = sizes.split("x")
        if name not in KERNELS or len(numbers) != 4 or not all(number.isdigit() for number in numbers):
            want = f"want KERNEL=MxNxWARPSxSTAGES, as keys=64x64x8x2, of {', '.join(KERNELS)}"
            raise UserError(f"--tiles {text}: {want}")
        from precision.kernels import document_attention

        M, N, warps, stages = map(int, numbers)
        document_attention.TILES[name] = document_attention.WIDE_TILES[name] = (M, N, warps, stages)


def starts(batch: int, length: int, mean: int) -> Tensor:
    """Return where documents begin, [batch, length] bool. The part before the first began elsewhere."""
    generator = torch.Generator().manual_seed(0)
    found = torch.zeros(batch, length, dtype=torch.bool)
    for row in found:
        at = int(torch.randint(mean, (), generator=generator))
        while at < length:
            row[at] = True
            at += int(torch.randint(mean // 2, mean + mean // 2, (), generator=generator))
    return found


def share(batch: int, length: int, mean: int) -> float:
    """Return pairs of query and key in one document over all causal pairs."""
    bounds = bounds_of(starts(batch, length, mean).cumsum(1, dtype=torch.int32)).long()
    seen = torch.arange(length) + 1 - bounds[0]
    return float(seen.sum()) / (batch * length * (length + 1) / 2)


def core(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, mean: int) -> Callable[[], Tensor]:
    """Return a way to compute q, k [B, H, S, d_qk], v [B, H, S, d_v] -> [B, H, S, d_v] within documents."""
    B, _, S, d_qk = q.shape
    found = starts(B, S, mean) if name != "documents_whole" else torch.zeros(B, S, dtype=torch.bool)
    numbers = found.to(q.device).cumsum(1, dtype=torch.int32)
    bounds = bounds_of(numbers)
    if name in ("documents", "documents_whole"):
        mask = document_mask(bounds, q.dtype, d_qk, v.shape[-1])
        return lambda: attention_core(q, k, v, scale, mask)
    if name == "documents_mask":
        mask = document_mask(bounds, torch.float64, d_qk, v.shape[-1])
        return lambda: F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (numbers[b, i] == numbers[b, j])

    blocks = create_block_mask(seen, B, None, S, S, device=str(q.device), _compile=True)
    flex = torch.compile(flex_attention, dynamic=False)

    def attend() -> Tensor:
        out = flex(q, k, v, block_mask=blocks, scale=scale)
        assert isinstance(out, Tensor)
        return out

    return attend
