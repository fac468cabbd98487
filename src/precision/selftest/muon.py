"""Checks of Muon's kernels: the elementwise ones, and the products of the Newton-Schulz iteration."""

import torch

from precision.kernels import muon, newton_schulz
from precision.selftest.operands import plain
from precision.selftest.twins import BF16_STEP, FP32_SUM, near, same

MU, TIMES, DECAY, LR = 0.95, 3.0, 0.1, 0.5
SHAPES = (2, 384, 768), (2, 40, 104)  # tiles of each kind on Hopper; partial tiles
FACTORS = 0.5, 2.0


def elementwise(device: torch.device) -> None:
    """Check momentum, U and weights of matrices that are parts of a weight, upright and transposed, with an earlier
    skipped step."""
    lr, divisor = torch.tensor(LR, device=device), torch.tensor(4.0, device=device)
    bad, good = torch.tensor(False, device=device), torch.tensor(True, device=device)
    for moment, transposed in ((torch.float32, True), (torch.bfloat16, False)):
        weight, gradient = (plain(device, 140, 90, dtype=torch.float32, seed=seed) for seed in (0, 1))
        momentum = plain(device, 140, 90, seed=2).to(moment)
        w, g, m = (t.as_strided((2, 40, 50), (70 * 90, 90, 1), 20 * 90 + 30) for t in (weight, gradient, momentum))
        out = torch.empty(2, 50, 40, device=device, dtype=torch.bfloat16).mT if transposed else g.bfloat16()
        sums, kept, before = torch.empty(muon.programs(w), device=device), weight.clone(), momentum.clone()
        muon.advance(g, m, out, bad, divisor, MU, True)
        muon.apply(w, out, sums, bad, lr, TIMES, DECAY)
        same(momentum, before, "momentum of a skipped step")
        same(weight, kept, "weight of a skipped step")
        advanced = MU * m.double() + g.double() / 4
        muon.advance(g, m, out, good, divisor, MU, True)
        near(m, advanced, FP32_SUM if moment == torch.float32 else BF16_STEP, f"momentum in {moment}")
        near(out, MU * advanced + g.double() / 4, BF16_STEP, f"update, transposed: {transposed}")
        change = LR * (TIMES * out.double() + DECAY * w.double())
        moved = w.double() - change
        muon.apply(w, out, sums, good, lr, TIMES, DECAY)
        near(w, moved, FP32_SUM, f"weight, transposed: {transposed}")
        near(sums.double().sum(), change.square().sum(), FP32_SUM, "square of the update")


def products(device: torch.device) -> None:
    """Check the three products of a step, on coherent rows: sums of one sign."""
    factors = torch.tensor(FACTORS, device=device)
    f = factors.double()[:, None, None]
    for shape in SHAPES:
        x = plain(device, *shape) + 1
        gram = x.new_empty(2, shape[1], shape[1])
        wide, polynomial, out = x.double(), torch.empty_like(gram), torch.empty_like(x)
        newton_schulz.product(x, x, gram, None, factors, 1.0, 0.0, True)
        near(gram, f * wide @ wide.mT, BF16_STEP, f"X X^T of {shape}")
        s = gram.double()
        newton_schulz.product(gram, gram, polynomial, gram, factors, 0.5, -2.0, True)
        near(polynomial, f * (0.5 * s @ s - 2 * s), BF16_STEP, f"b S + c S S of {shape}")
        newton_schulz.product(gram, x, out, x, factors, 1.0, 3.0, False)
        near(out, f * (s @ wide + 3 * wide), BF16_STEP, f"a X + B X of {shape}")
