"""Muon's part of a step on a GPU: correctness and speed of its kernels.

    python scripts/bench/muon.py                     Moonlight cut to 5 blocks on one GPU, and V3's largest matrices
    python scripts/bench/muon.py --ranks 8           the share of one of 8 ranks
    python scripts/bench/muon.py --ranks 8 model=moonlight_16b        all of Moonlight

    errors       of the whole iteration against float64, of the kernels and of torch.baddbmm; and of the three products
    products     ms and TF/s of each product alone, by torch.baddbmm, and by kernels with several tilings
    iteration    ms of the batches of matrices that a step orthogonalises, both ways, and their sum
    batches      ms a matrix of batches of several sizes
    elementwise  the work before and after the iteration: ms, and TB/s against a copy's

TF/s count the FLOPs of whole products, 4 m^2 n + 2 m^3 a step, even if only a triangle of one is computed.
"""

import sys
from collections import Counter
from collections.abc import Callable

import frame
import measure
import torch
from measure import say
from torch import Tensor

from precision.errors import UserError
from trainer.config import Config
from trainer.forecast.preflight import check
from trainer.launch.command_line import Parser, guarded
from trainer.optim import muon as optimizer
from trainer.optim.build_optimizer import muon_layouts
from trainer.optim.muon import batches, canonical
from trainer.optim.orthogonalise import EPS, flops, orthogonalise, plain, polynomials
from trainer.optim.owners import assign
from trainer.parallel.mesh import Degrees

FIVE_BLOCKS = ["model=moonlight_16b", "model.num_layers=5", "model.vocab_size=32768"]
EXPERTS = (23, 1408, 2048)  # as many of Moonlight's as fit in a batch
V3 = (4, 2048, 7168), (1, 1536, 7168), (1, 7168, 16384)
Shape = tuple[int, int, int]


def run() -> None:
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=f"the model (default: {' '.join(FIVE_BLOCKS)})")
    parser.add_argument("--ranks", type=int, default=1, help="measure the share of one of this many ranks (default: 1)")
    parser.add_argument("--repeat", type=int, default=5, help="timed repetitions (default: 5)")
    options = parser.parse_intermixed_args()
    frame.check_positive(options, "ranks", "repeat")
    if not torch.cuda.is_available():
        raise UserError("scripts/bench/muon.py measures GPU kernels and there is no GPU")
    config = frame.composed([*(options.words or FIVE_BLOCKS), "optim=muon_wsd"])
    measure.header()
    torch.manual_seed(0)
    assert config.optim.muon is not None
    triples = polynomials(config.optim.muon.coefficients, config.optim.muon.steps)
    clock = Clock(options.repeat)
    errors(triples)
    products(clock)
    iteration(config, options.ranks, triples, clock)
    sizes(triples, clock)
    elementwise(clock)


class Clock:
    """Median milliseconds, and a table cell with them and TF/s."""

    def __init__(self, repeat: int):
        self._repeat = repeat

    def ms(self, run: Callable[[], object]) -> float:
        run()
        run()
        return 1e3 * measure.short(run, self._repeat)

    def cell(self, name: str, run: Callable[[], object], flop: float) -> float:
        """Return milliseconds; NaN, with a line about it, if the call fails."""
        for ms in measure.attempt(name, lambda: [self.ms(run)]):
            say(f"  {name:34} {ms:8.3f} ms {flop / ms * 1e-9:6.0f} TF/s")
            return ms
        return float("nan")


def draw(*shape: int, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device="cuda") + mean).bfloat16()


def exact(x: Tensor, triples: list[tuple[float, float, float]]) -> Tensor:
    """Run the iteration in float64."""
    wide = x.double()
    wide /= wide.norm(dim=(-2, -1), keepdim=True) + EPS
    for a, b, c in triples:
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide


def off(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


def errors(triples: list[tuple[float, float, float]]) -> None:
    """Print relative errors, of noise, and of noise beside a large mean."""
    from precision.kernels import newton_schulz

    say("\nerrors against float64: iteration by kernels, baddbmm | products X X^T, b S + c S S, a X + B X; symmetric?")
    for shape in ((2, 1408, 2048), (2, 256, 384), (1, 2048, 11264), (1, 1536, 7168)):
        for mean in (0.0, 0.5):
            x = draw(*shape, mean=mean)
            right = exact(x, triples)
            both = [off(by(x.clone(), triples, torch.bfloat16), right) for by in (orthogonalise, plain)]
            one = torch.full((shape[0],), 0.5, device="cuda")
            gram, polynomial = (x.new_full((shape[0], shape[1], shape[1]), torch.nan) for _ in range(2))
            out, wide = torch.full_like(x, torch.nan), x.double()
            newton_schulz.product(x, x, gram, None, one, 1.0, 0.0, True)
            s = gram.double()
            newton_schulz.product(gram, gram, polynomial, gram, one, 2.0, -1.5, True)
            newton_schulz.product(gram, x, out, x, one, 1.0, 3.4, False)
            want = 0.5 * wide @ wide.mT, 0.5 * (2 * s @ s - 1.5 * s), 0.5 * (s @ wide + 3.4 * wide)
            each = [off(o, w) for o, w in zip((gram, polynomial, out), want, strict=True)]
            same = torch.equal(gram, gram.mT) and torch.equal(polynomial, polynomial.mT)
            rest = " ".join(f"{error:.1e}" for error in each)
            say(f"  {shape!s:18} mean {mean}:  {both[0]:.1e} {both[1]:.1e} | {rest}; {same}")


def products(clock: Clock) -> None:
    """Time each product alone, for a batch of Moonlight's experts."""
    from precision.kernels import newton_schulz
    from precision.kernels.newton_schulz import Cut, product

    k, m, n = EXPERTS
    x, out = draw(*EXPERTS), draw(*EXPERTS)
    s, t, one = draw(k, m, m), draw(k, m, m), torch.ones(k, device="cuda")
    cuts = [Cut(128, 128, 64, 4, 8), Cut(128, 128, 64, 4, 4), Cut(128, 256, 64, 2, 8), Cut(128, 256, 64, 3, 8)]
    ways: list[tuple[str, Cut | None]] = [(f"Triton {c.rows} x {c.columns}, {c.stages}, {c.warps}", c) for c in cuts]
    if newton_schulz.serves_hopper(x.device):
        ways.insert(0, ("hopper_triangle", None))
    for title, flop, theirs, ours in (
        ("X X^T", 2.0 * k * m * m * n, lambda: torch.bmm(x, x.mT, out=s),
         lambda c: product(x, x, s, None, one, 1.0, 0.0, True, c)),
        ("b S + c S S", 2.0 * k * m**3, lambda: torch.baddbmm(s, s, s, beta=-4.8, alpha=2.0, out=t),
         lambda c: product(s, s, t, s, one, 2.0, -4.8, True, c)),
        ("a X + B X", 2.0 * k * m * m * n, lambda: torch.baddbmm(x, s, x, beta=3.4, out=out),
         lambda c: product(s, x, out, x, one, 1.0, 3.4, False, c)),
    ):  # fmt: skip
        say(f"\n{title} of {list(EXPERTS)}")
        clock.cell("torch", theirs, flop)
        for name, cut in ways:
            clock.cell(name, lambda ours=ours, cut=cut: ours(cut), flop)


def iteration(config: Config, ranks: int, triples: list[tuple[float, float, float]], clock: Clock) -> None:
    """Time the batches of a rank in one step."""
    say(f"\niteration of {config.model.num_layers} blocks, {ranks} ranks: batches x [matrices, m, n], baddbmm, kernels")
    layouts = muon_layouts(config, check(config), Degrees(1, ranks))
    runs, _ = assign(layouts, len(triples), ranks)
    pieces = [piece for run in runs if run.owner == 0 for piece in run.cut(optimizer.AT_ONCE)]
    shapes = Counter((sum(r.count for r in b), *canonical(b[0])) for b in batches(pieces, optimizer.AT_ONCE))
    sums, work = [0.0, 0.0, 0.0], 0.0
    for shape, count in [*shapes.items(), *((shape, 0) for shape in V3)]:
        k, m, n = shape
        x, flop = draw(*shape), k * flops(m, n, len(triples))
        say(f" {count} x {list(shape)}" + ("" if count else " (of V3)"))
        old = clock.cell("baddbmm", lambda x=x: plain(x, triples, torch.bfloat16), flop)
        new = clock.cell("as a step does", lambda x=x: orthogonalise(x, triples, torch.bfloat16), flop)
        if m % 128 == 0 and n % 256 == 0:
            from precision.kernels import newton_schulz

            one = torch.full((k,), 1e-3, device="cuda")
            clock.cell("kernels", lambda x=x, one=one: newton_schulz.iterate(x, one, triples), flop)
        sums[0], sums[1], work = sums[0] + count * old, sums[1] + count * new, work + count * flop
    say(f" a step: {work * 1e-12:.1f} TFLOP, baddbmm {sums[0]:.1f} ms, as a step does {sums[1]:.1f} ms")


def sizes(triples: list[tuple[float, float, float]], clock: Clock) -> None:
    """Time Moonlight's experts by batch size."""
    say(f"\nbatches of {list(EXPERTS[1:])}: matrices, ms a matrix")
    for k in (4, 8, 12, 16, 23, 24, 32, 46, 64):
        x = draw(k, *EXPERTS[1:])
        say(f"  {k:3} {clock.ms(lambda x=x: orthogonalise(x, triples, torch.bfloat16)) / k:.4f}")


def elementwise(clock: Clock) -> None:
    """Time the work before and after the iteration, for 64 experts' gate and down."""
    g, m, w = (torch.randn(64, 2816, 2048, device="cuda") for _ in range(3))
    half = g.numel() // 2
    copy = clock.ms(lambda: m[:32].copy_(g[:32]))
    say(f"\nelementwise, {half / 1e6:.0f} M elements: a copy of FP32 {8 * half / copy * 1e-9:.2f} TB/s")
    for name, parts in (
        ("gate, of gate_up", [t[:, :1408] for t in (g, m, w)]),
        ("down, transposed", [t.view(-1)[:half].view(64, 2048, 1408) for t in (g, m, w)]),
    ):
        x = torch.empty(64, 1408, 2048, device="cuda", dtype=torch.bfloat16)
        slot = x if parts[0].shape[1] == 1408 else x.mT
        first, last = (clock.ms(run) for run in halves(parts, slot))
        rates = f"{14 * half / first * 1e-9:.2f} TB/s", f"{10 * half / last * 1e-9:.2f} TB/s"
        say(f"  {name}: advance {first:.3f} ms {rates[0]}, apply {last:.3f} ms {rates[1]}")


def halves(parts: list[Tensor], slot: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the work before the iteration, and after it. parts: gradient, momentum, weight."""
    from precision.kernels import muon

    ok, number = torch.tensor(True, device="cuda"), torch.tensor(1.5, device="cuda")
    gradient, momentum, weight = parts
    sums = torch.empty(muon.programs(weight), device="cuda")
    return (
        lambda: muon.advance(gradient, momentum, slot, ok, number, 0.95, True),
        lambda: muon.apply(weight, slot, sums, ok, number, 1e-3, 0.1),
    )


if __name__ == "__main__":
    sys.exit(guarded(run))
