"""The attention core, causal: forward and backward of each kernel that accepts the shape.

    python scripts/bench/attention.py                                    4 x 16 x 4096 with 192/128 (MLA) and 128/128
    python scripts/bench/attention.py --shape 1x128x8192x192x128 --variants core cudnn

A shape is B x H x S x d_qk x d_v: sequences, heads, positions, head size of queries and keys, of values.

    core         precision.attention_core, as the model calls it
    fp8          precision.AttentionCore with delayed scales, casts included
    cudnn flash efficient math    PyTorch's kernels, each by name
    te te_fp8    te.DotProductAttention in BF16, and with FP8 attention (DelayedScaling) if it supports that
    documents documents_whole documents_mask documents_flex    within documents of --document tokens: see packed.py

FLOPs: forward 2 B H S^2 (d_qk + d_v) / 2, the half that the mask leaves; backward 2.5 times that, of which one fifth is
recomputed scores (as in papers on attention); within documents, only pairs in one document. Backward is timed alone, on
an autograd graph that is kept.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import frame
import layers
import measure
import packed
import torch
from layers import TransformerEngine
from limits import heads
from measure import Timing, Variant, both, show
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from precision.attention import attention_core
from precision.errors import RunError, UserError
from trainer.launch.command_line import Parser, guarded

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
NAMES = ["core", "fp8", *KERNELS, "te", "te_fp8", *packed.NAMES]
LEFT_OUT = ("math", "documents_mask", "documents_flex")  # scores of math fill 4 GiB here
BY_DEFAULT = [name for name in NAMES if name not in LEFT_OUT]
SHAPES = [(4, 16, 4096, 192, 128), (4, 16, 4096, 128, 128)]
Shape = tuple[int, int, int, int, int]


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--shape", action="append", metavar="BxHxSxQxV", help="may be given more than once")
    parser.add_argument(
        "--variants", nargs="+", choices=NAMES, default=BY_DEFAULT, metavar="NAME", help=f"some of {', '.join(NAMES)}"
    )
    packed.add_arguments(parser)
    packed.add_tiles(parser)
    measure.add_arguments(parser)
    options = parser.parse_args()
    frame.check_positive(options, "rounds", "repeat")
    packed.check(options)
    shapes = [parse_shape(text) for text in options.shape or ()] or SHAPES
    facts = measure.header()
    te = layers.transformer_engine(options.variants)
    results: list[dict[str, Any]] = []
    for shape in shapes:
        measure.release()
        B, H, S, d_qk, d_v = shape
        measure.say(f"\n{B} x {H} x {S}, {d_qk} / {d_v}")
        made = [
            v
            for name in options.variants
            for v in measure.attempt(name, lambda n=name, s=shape: variants(n, s, te, options.document))
        ]
        timings = measure.measure(made, options)
        measure.say(report(shape, timings, options.document))
        results += [{"shape": shape, **asdict(timing)} for timing in timings.values()]
    measure.write_json(options.json, facts, results)


def parse_shape(text: str) -> Shape:
    """Parse a shape: 4x16x4096x192x128 -> B, H, S, d_qk, d_v."""
    try:
        b, h, s, q, v = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise UserError(f"--shape {text}: want BxHxSxQxV, as 4x16x4096x192x128") from None
    if min(b, h, s, q, v) < 1:
        raise UserError(f"--shape {text}: sizes are 1 or more")
    return b, h, s, q, v


def variants(name: str, shape: Shape, te: TransformerEngine | None, document: int) -> list[Variant]:
    """Return forward and backward of one kernel. Raises an error for an unsupported shape. document: mean length."""
    B, H, S, d_qk, d_v = shape
    torch.manual_seed(3)
    scale = d_qk**-0.5
    inputs = q, k, v = tuple(heads(B, H, S, d).requires_grad_() for d in (d_qk, d_qk, d_v))
    dy = heads(B, H, S, d_v, scale=1e-3)
    if name == "core":
        return _both_ways(name, lambda: attention_core(q, k, v, scale), inputs, dy)
    if name == "fp8":
        core_fp8, arena = layers.core_in_fp8(H, d_qk, d_v, "cuda")
        arena.scale.fill_(32.0)  # known scales
        return _both_ways(name, lambda: core_fp8(q, k, v, scale), inputs, dy)
    if name in KERNELS:
        with _with_reasons():
            return _both_ways(name, lambda: _by_name(KERNELS[name], q, k, v, scale), inputs, dy)
    if name in packed.NAMES:
        return _both_ways(name, packed.core(name, q, k, v, scale, document), inputs, dy)
    if te is None:
        return []
    core = te.pytorch.DotProductAttention(H, (d_qk, d_v), qkv_format="bshd", attn_mask_type="causal")
    by_position = [t.transpose(1, 2) for t in inputs]

    def forward() -> Tensor:
        with te.autocast("te_bf16") if name == "te" else te.attention_in_fp8():
            return core(*by_position).view(B, S, H, d_v).transpose(1, 2)

    return _both_ways(name, forward, inputs, dy, graph=False)


def _by_name(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


@contextmanager
def _with_reasons() -> Iterator[None]:
    """Add PyTorch's reasons, which come as warnings about all kernels, to the RuntimeError of a kernel that refuses."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            texts = [str(warning.message).partition("(Triggered")[0].strip() for warning in said]
            why = [text for text in texts if not text.endswith("because:") and "runtime disabled" not in text]
            raise RunError("; ".join(why) or str(error)) from None


def _both_ways(
    name: str, forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], dy: Tensor, graph: bool = True
) -> list[Variant]:
    y = forward()
    measure.synchronize()

    def backward() -> object:
        return torch.autograd.grad(y, inputs, dy, retain_graph=True)

    backward()
    measure.synchronize()
    # autograd runs backward on the stream of its forward, which is not the one that a graph is captured on
    return [Variant(f"{name} forward", forward, graph), Variant(f"{name} backward", backward, graph=False)]


def report(shape: Shape, timings: dict[str, Timing], document: int) -> str:
    """Return the table of a shape. The ratio is to the model's kernel."""
    B, H, S, d_qk, d_v = shape
    causal, part = float(B * H * S * S * (d_qk + d_v)), packed.share(B, S, document)

    def work(name: str) -> float:
        return causal * (part if name in packed.NAMES and name != "documents_whole" else 1)

    rows = []
    for name, timing in timings.items():
        what, kind = name.split()
        row = measure.columns(timing, work(what) * (1 if kind == "forward" else 2.5))
        row["x core"] = both(timings.get(f"core {kind}"), timing)
        rows.append(row)
    for name in sorted({name.split()[0] for name in timings}, key=NAMES.index):
        pair = [timings.get(f"{name} {kind}") for kind in ("forward", "backward")]
        if all(pair):
            total = sum(timing.short for timing in pair if timing)
            rows.append(
                {
                    "variant": f"{name} both",
                    "ms": show(total, ".3f", 1e3),
                    "TF/s": show(3.5 * work(name) / total, ".3g", 1e-12),
                }
            )
    return measure.table(rows)


if __name__ == "__main__":
    sys.exit(guarded(run))
