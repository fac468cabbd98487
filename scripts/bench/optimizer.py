"""AdamW's part of a step on a GPU, piece by piece, against a copy of as many bytes.

    python scripts/bench/optimizer.py                 Moonlight cut to 5 blocks: 2.56 G parameters
    python scripts/bench/optimizer.py model=deepseek_300m

    gradient norms     one pass over the gradients, 4 bytes a parameter; torch._foreach_norm beside it
    AdamW              28 bytes a parameter, with moments in BF16 20; with several tilings
    update norms       12 bytes (8), in logged steps only

The goal is 90 % of the copy's rate. Gradients are freed after a step, and the first microbatch writes new ones, so none
are zeroed.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import measure
import torch
from measure import say
from torch import Tensor

from models import DeepSeek
from precision import Plan
from precision.errors import UserError
from trainer.config import load
from trainer.forecast.preflight import check
from trainer.launch.command_line import Parser, guarded
from trainer.launch.composition import compose

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FIVE_BLOCKS = ["model=moonlight_16b", "model.num_layers=5", "model.vocab_size=32768"]
BETAS, EPS, DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 1e-3
CUTS = [(512, 1, 4), (1024, 1, 4), (1024, 1, 8), (2048, 1, 8), (2048, 1, 4), (1024, 4, 4), (4096, 1, 16)]
NORM_CUTS = [(2048, 4), (4096, 4), (4096, 8), (8192, 8), (16384, 8)]


def run() -> None:
    """Read the command line, measure, print."""
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=f"the model (default: {' '.join(FIVE_BLOCKS)})")
    parser.add_argument("--repeat", type=int, default=5, help="timed repetitions (default: 5)")
    options = parser.parse_intermixed_args()
    if not torch.cuda.is_available():
        raise UserError("scripts/bench/optimizer.py measures GPU kernels and there is no GPU")
    measure.header()
    sys.argv[1:] = options.words or FIVE_BLOCKS
    (job,) = compose(CONFIGS)
    config = load(job.tree)
    check(config)
    plan = Plan(config.precision, config.model.num_layers, None)
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in DeepSeek(config.model, plan).parameters()]
    Pieces(shapes, options.repeat).measure()


class Pieces:
    """Parameters of these shapes, gradients and moments."""

    def __init__(self, shapes: list[tuple[int, ...]], repeat: int):
        self._repeat, self._count = repeat, sum(math.prod(shape) for shape in shapes)
        self._parameters = [torch.randn(shape, device="cuda") for shape in shapes]
        for p in self._parameters:
            p.grad = torch.randn_like(p) * 1e-3
        largest = max(self._parameters, key=lambda p: p.numel())
        twin = torch.empty_like(largest)
        seconds = measure.short(lambda: twin.copy_(largest), repeat)
        self._copy = 8 * largest.numel() / seconds
        say(f"{self._count / 1e9:.3f} G parameters in {len(shapes)} tensors; a copy: {self._copy * 1e-12:.2f} TB/s")

    def measure(self) -> None:
        """Measure all pieces."""
        from precision.kernels.gradient_norms import GradientNorms

        gradients: list[Tensor] = [p.grad for p in self._parameters if p.grad is not None]
        sizes, device = [g.numel() for g in gradients], gradients[0].device
        exact = torch.stack([g.double().norm() for g in gradients])
        for block, warps in NORM_CUTS:
            kernel = GradientNorms(sizes, device, block, warps)
            off = float(((kernel(gradients) - exact) / exact).abs().max())
            self.show(f"gradient norms {block} x {warps}, off {off:.0e}", lambda k=kernel: k(gradients), 4)
        foreach = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
        self.show("torch._foreach_norm", lambda: foreach(gradients), 4)
        for moments, bytes_ in ((torch.float32, 28), (torch.bfloat16, 20)):
            self._adamw(moments, bytes_)
            measure.release()

    def _adamw(self, moments: torch.dtype, bytes_: int) -> None:
        from precision.kernels.adamw import FusedAdamW

        first, second = ([torch.zeros_like(p, dtype=moments) for p in self._parameters] for _ in range(2))
        steps = [torch.zeros((), device="cuda") for _ in self._parameters]
        ok, lr = torch.tensor(True, device="cuda"), torch.tensor(LR, device="cuda")
        state = self._parameters, first, second, steps, [DECAY] * len(steps), BETAS, EPS
        name = str(moments).removeprefix("torch.")
        for block, blocks, warps in CUTS:
            for evict in ("evict_first", ""):
                kernel = FusedAdamW(*state, block=block, blocks=blocks, num_warps=warps, evict=evict)
                what = f"AdamW {name} {block} x {blocks} x {warps} {evict}"
                self.show(what, lambda k=kernel: k.step(ok, lr, lr), bytes_)
        kernel = FusedAdamW(*state)
        self.show(f"update norms {name}", lambda: kernel.norms(lr), bytes_ // 2 - 2)

    def show(self, name: str, run: Callable[[], object], bytes_: int) -> None:
        """Print a line of milliseconds, rate, and share of the copy's rate."""
        for seconds in measure.attempt(name, lambda: [(run(), run(), measure.short(run, self._repeat))[2]]):
            rate = bytes_ * self._count / seconds
            say(f"  {name:44} {1e3 * seconds:7.3f} ms {rate * 1e-12:5.2f} TB/s {rate / self._copy:4.0%} of a copy")


if __name__ == "__main__":
    sys.exit(guarded(run))
