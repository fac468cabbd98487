"""Errors of FP8 attention against float64: experiment 1 of docs/fully_fp8.md. On a CPU, seconds.

    python scripts/bench/fp8_attention.py --length 256 --heads 2

A line for each kind of data and precision: relative L2 error of O, dQ, dK and dV, the mean largest P of a row, and the
row sums of dS over those of |dS|, which are 0 for exact numbers (before dS is cast). q and k are normed over the head.

    gauss     independent
    peaked    queries near their own key
    sink      queries near the first key, as of an attention sink
"""

import sys

import torch
from layers import core_in_fp8
from torch import Tensor

from precision import attention_core, fp8_attention
from precision.attention import visible
from precision.errors import UserError
from trainer.launch.command_line import Parser, guarded

KINDS = {"gauss": (0.0, 0.0), "peaked": (0.4, 0.0), "sink": (0.0, 0.4)}
"""Shares of a query's own key, and of the first key, in the query."""
D, V = 192, 128


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--length", type=int, default=256, metavar="S", help="positions (256)")
    parser.add_argument("--heads", type=int, default=2, metavar="H", help="heads (2)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="draws of each kind (2)")
    arguments = parser.parse_args()
    if min(vars(arguments).values()) < 1:
        raise UserError("--length, --heads and --seeds: give 1 or more")
    core, _ = core_in_fp8(arguments.heads, D, V, "cpu")
    print("data    precision  largest P  O      dQ     dK     dV     sum dS / sum |dS|")
    for kind in KINDS:
        for seed in range(arguments.seeds):
            q, k, v, dout = data(kind, arguments.heads, arguments.length, seed)
            scale, seen = 2**0.5 / D**0.5, visible(None, arguments.length, q.device)
            p = (q.double() @ k.double().mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
            want, largest = gradients(p @ v.double(), q, k, v, dout), float(p.detach().amax(-1).mean())
            for name, function in (("bf16", attention_core), ("fp8", core)):
                scores: list[Tensor] = []
                with recording(scores):
                    found = gradients(function(q, k, v, scale), q, k, v, dout)
                errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, want, strict=True)]
                ds = torch.cat(scores, 1) if scores else None
                sums = "" if ds is None else f"{float(ds.sum(-1).abs().sum() / ds.abs().sum()):.4f}"
                numbers = "  ".join(f"{error:.3f}" for error in errors)
                print(f"{kind:<7} {name:<10} {largest:.2f}       {numbers}  {sums}".rstrip())


def data(kind: str, heads: int, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, dO in BF16; the sizes of tokens' gradients are log-normal."""
    own, first = KINDS[kind]
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, heads, length, D, generator=g) for _ in range(2))
    v, dout = (torch.randn(1, heads, length, V, generator=g) for _ in range(2))
    q = q + own * k + first * k[:, :, :1]
    q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
    dout = dout * torch.randn(1, heads, length, 1, generator=g).exp()
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    return q, k, v, dout.bfloat16()


def gradients(out: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Return O, dQ, dK, dV."""
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))]


class recording:
    """Context manager that keeps dS before its cast."""

    def __init__(self, scores: list[Tensor]):
        self._scores, self._cast = scores, fp8_attention.saturating_cast

    def __enter__(self) -> None:
        def cast(x: Tensor, scale: Tensor, fmt) -> Tensor:
            if fmt.name == "e5m2" and x.shape[-1] == x.shape[-2]:
                self._scores.append(x)
            return self._cast(x, scale, fmt)

        fp8_attention.saturating_cast = cast

    def __exit__(self, *exception: object) -> None:
        fp8_attention.saturating_cast = self._cast


if __name__ == "__main__":
    sys.exit(guarded(run))
