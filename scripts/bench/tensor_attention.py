"""One attention layer over 1, 2, 4 and 8 ranks: tensor parallelism by hand, and context parallelism beside it.

    torchrun --nproc_per_node=8 scripts/bench/tensor_attention.py                        # NCCL, BF16, Moonlight's MLA
    torchrun --nproc_per_node=2 scripts/bench/tensor_attention.py --block plain          # queries, keys, values of x
    torchrun --nproc_per_node=2 scripts/bench/tensor_attention.py --tokens 1024 --repeat 3   # a CPU: gloo, FP32

One sequence of --tokens positions. t ranks, t up to the number of processes; each has H / t heads in the core.

    one          one rank: the unsplit layer
    tensor       q and kv_b by columns, o by rows (Megatron-LM, arXiv 1909.08053). f before the columns: identity, its
                 gradient is summed over the ranks. g behind o: a sum over the ranks, its gradient is unchanged
    overlapped   the same; in the backward pass the sum of f travels while the gradient of the weight is computed
    sequence     tensor, and each rank has T / t positions outside (arXiv 2205.05198): f gathers, g reduces and scatters
    exchanged    sequence, with o whole: its input is exchanged from own heads to own positions; nothing is summed
    context      Ulysses (models.context): all weights whole; q, k, v are exchanged to heads, and o back

In MLA the down projections and their norms are whole on every rank; with `sequence` and `exchanged` the latents travel.

    fwd ms, bwd ms   medians over --repeat calls, each of the slowest rank
    exposed ms       extra time of both compared with copies within the rank in place of messages
    efficiency       time of `one` / (t times the time)
    MB sent          of a rank, forward and backward; a sum over the ranks counts twice (reduce-scatter, all-gather)
    differs          largest difference of y, dx and all weights' gradients from one rank in FP32, of the largest number

In FP32 a difference above 1e-5 ends the bench with an error. See also docs/tensor_parallel.md.
"""

import argparse
import os
import statistics
import sys
from typing import Any

import frame
import measure
import torch
import torch.distributed as dist
from attention_splits import VARIANTS, Messages, One
from torch import Tensor

from precision.errors import RunError, UserError
from trainer.launch.command_line import Parser, guarded

WIDTHS = {"hidden": 2048, "heads": 16, "latent": 512, "nope": 128, "rope": 64, "value": 128}
ALLOWED = 1e-5


def run() -> None:
    options = arguments()
    with frame.process_group() as device:
        results = measured(options, device)
        if dist.get_rank() == 0:
            facts = measure.header()
            measure.say(f"\n{dist.get_backend()}, {options.block}, {options.tokens} tokens, {options.dtype}")
            measure.say(measure.table([row(one, results[0]) for one in results]))
            measure.write_json(options.json, facts, results)


def arguments() -> argparse.Namespace:
    """Parse the options. Raises UserError for incompatible ones."""
    parser, gpu = Parser(__doc__), torch.cuda.is_available()
    parser.add_argument(
        "--block", choices=("mla", "plain"), default="mla", help="mla, or q, k, v straight from x (mla)"
    )
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--tokens", type=int, default=16384 if gpu else 2048, help="positions (16384; on a CPU 2048)")
    for name, width in WIDTHS.items():
        parser.add_argument(f"--{name}", type=int, default=width, help=f"({width}, Moonlight's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if gpu else "float32")
    parser.add_argument("--repeat", type=int, default=10, help="timed calls (10)")
    parser.add_argument("--json", type=measure.Path, metavar="FILE", help="also write everything measured to FILE")
    options = parser.parse_args()
    frame.check_positive(options, "tokens", "repeat", *WIDTHS)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2:
        start = "torchrun --nproc_per_node=2 scripts/bench/tensor_attention.py"
        raise UserError(f"one process has nothing to split: start several, {start}")
    most = max(counts(ranks))
    for name in ("tokens", "heads"):
        if getattr(options, name) % most:
            raise UserError(
                f"--{name} {getattr(options, name)}: {most} ranks cannot split it; set a multiple of {most}"
            )
    return options


def counts(ranks: int) -> list[int]:
    """Return powers of two up to the number of processes."""
    return [2**i for i in range(ranks.bit_length())]


def measured(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Measure every variant on every number of ranks. A collective; rank 0's results are complete."""
    o, generator = options, torch.Generator(device).manual_seed(0)
    q_width = o.nope + (o.rope if o.block == "mla" else 0)
    shapes = {"q": (o.heads * q_width, o.hidden), "o": (o.hidden, o.heads * o.value)}
    inner = o.latent if o.block == "mla" else o.hidden
    shapes |= {"kv_b": (o.heads * (o.nope + o.value), inner)}
    shapes |= {"kv_a": (o.latent + o.rope, o.hidden)} if o.block == "mla" else {}

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    x, dy = draw(o.tokens, o.hidden), draw(o.tokens, o.hidden)
    whole = {name: draw(*shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    dtype, out = getattr(torch, o.dtype), []
    exact = None
    for t in counts(dist.get_world_size()):
        group = dist.new_group(range(t))
        if dist.get_rank() < t:
            assert isinstance(group, dist.ProcessGroup)
            if exact is None:
                exact = gradients(One(o, Messages(group, True), whole, x), dy)[1]
            cast = {name: w.to(dtype) for name, w in whole.items()}
            for name, kind in {"one": One}.items() if t == 1 else {k: VARIANTS[k] for k in o.variants}.items():
                layers = [kind(o, Messages(group, silent), cast, x.to(dtype)) for silent in (False, True)]
                differs = difference(layers[0], dy.to(dtype), exact, group)
                sent = layers[0].messages.sent
                times = timed(layers, dy.to(dtype), o.repeat, group)
                if dtype is torch.float32 and not differs <= ALLOWED:
                    raise RunError(f"{name} on {t} ranks: differs from one rank by {differs:.1e}, above {ALLOWED:.0e}")
                out.append({"name": name, "ranks": t, "differs": differs, "sent": sent, **times})
        dist.barrier()
    return out


def gradients(layer: One, dy: Tensor) -> tuple[tuple[float, float], dict[str, Tensor]]:
    """Return seconds forward and backward, and y, dx and the weights' gradients."""
    forward, y = measure.clock(layer.forward)
    leaves = {"x": layer.x, **layer.weights}
    backward, found = measure.clock(lambda: torch.autograd.grad(y, list(leaves.values()), layer.at_own(dy)))
    return (forward, backward), {"y": y.detach(), **dict(zip(leaves, found, strict=True))}


def difference(layer: One, dy: Tensor, exact: dict[str, Tensor], group: dist.ProcessGroup) -> float:
    """Return the largest difference over all ranks and tensors, relative to the tensor's largest number. If positions
    are split, whole weights take the sum of the ranks' gradients."""
    worst = torch.zeros((), device=dy.device)
    for name, got in gradients(layer, dy)[1].items():
        want, got = exact[name], got.float()
        if name in layer.weights:
            if layer.splits_positions and name not in layer.columns + layer.rows:
                dist.all_reduce(got, group=group)
            part = layer.own(name, want)
        else:
            part = layer.at_own(want)
        worst = torch.maximum(worst, (got - part).abs().max() / want.abs().max())
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return float(worst)


def timed(layers: list[One], dy: Tensor, repeat: int, group: dist.ProcessGroup) -> dict[str, float]:
    """Return medians over calls of the slowest rank's seconds: forward, backward, both without messages; in turn."""
    spent: list[list[tuple[float, float]]] = [[], []]
    for i in range(repeat + 1):  # one to warm up
        for times, layer in zip(spent, layers, strict=True):
            dist.barrier(group=group)
            slowest = torch.tensor(gradients(layer, dy)[0], device=dy.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            if i:
                times.append((float(slowest[0]), float(slowest[1])))
    forward, backward = (statistics.median(pass_) for pass_ in zip(*spent[0], strict=True))
    return {"forward": forward, "backward": backward, "silent": statistics.median(sum(both) for both in spent[1])}


def row(one: dict[str, Any], first: dict[str, Any]) -> dict[str, str]:
    seconds, alone = one["forward"] + one["backward"], first["forward"] + first["backward"]
    return {
        "variant": one["name"],
        "ranks": str(one["ranks"]),
        "fwd ms": f"{1e3 * one['forward']:.2f}",
        "bwd ms": f"{1e3 * one['backward']:.2f}",
        "exposed ms": measure.NONE if one["ranks"] == 1 else f"{1e3 * (seconds - one['silent']):.2f}",
        "efficiency": f"{alone / seconds / one['ranks']:.0%}",
        "MB sent": f"{one['sent'] / 1e6:.4g}",
        "differs": f"{one['differs']:.1e}",
    }


if __name__ == "__main__":
    sys.exit(guarded(run))
