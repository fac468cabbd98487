"""On a GPU Muon's kernels are as exact as plain PyTorch, skip a step to the bit, and never wait for the host."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from models.matrices import Division
from trainer.config import Coefficients, Iteration, Moments, MuonConfig, OptimConfig, OptimizerName, Schedule
from trainer.optim import muon as muon_module
from trainer.optim.adamw import LearningRate
from trainer.optim.muon import Muon
from trainer.optim.orthogonalise import EPS, orthogonalise, plain, polynomials
from trainer.optim.owners import layout

TRIPLES = polynomials(Coefficients.quintic)
CONFIG = OptimConfig(
    name=OptimizerName.muon, lr=1e-2, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, clip=1.0, moments=Moments.fp32,
    schedule=Schedule.wsd, warmup_steps=0, decay_fraction=0.0, min_lr_ratio=1.0,
    muon=MuonConfig(momentum=0.95, nesterov=True, coefficients=Coefficients.quintic, steps=None, scale=0.2,
                    iteration=Iteration.bf16, router=False),
)  # fmt: skip
# two of each kind of tile; more tiles than multiprocessors; a column of half tiles; one matrix, wide
SHAPES = [(2, 384, 512), (3, 1408, 2048), (2, 1536, 1536), (1, 256, 7168), (5, 192, 2048)]


def draw(*shape: int, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) + mean).bfloat16()


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_float64(shape: tuple[int, int, int], mean: float) -> None:
    """Every number is written, once, rounded once; what is symmetric is so to the bit but within tiles."""
    from precision.kernels.newton_schulz import product

    k, m, _ = shape
    x, factors = draw(*shape, mean=mean), torch.linspace(0.5, 2.0, k, device="cuda")
    wide, f = x.double(), factors.double()[:, None, None]
    gram, polynomial = (torch.full((k, m, m), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product(x, x, gram, None, factors, 1.0, 0.0, True)
    s, out = gram.double(), torch.full_like(x, torch.nan)
    product(gram, gram, polynomial, gram, factors, 0.5, -2.0, True)
    product(gram, x, out, x, factors, 1.0, 3.0, False)
    for ours, exact, terms in (
        (gram, f * wide @ wide.mT, f * wide.abs() @ wide.abs().mT),
        (polynomial, f * (0.5 * s @ s - 2 * s), f * (s.abs() @ s.abs() + 2 * s.abs())),
        (out, f * (s @ wide + 3 * wide), f * (s.abs() @ wide.abs() + 3 * wide.abs())),
    ):
        assert ((ours.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-16 * terms).all()
    for ours in (gram, polynomial):
        assert relative(ours, ours.double().mT) < 2.0**-9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_the_iteration_is_as_near_to_float64_as_plain_products(shape: tuple[int, int, int], size: float) -> None:
    x = draw(*shape, mean=0.3) * size
    x[0] = 0
    exact = x.double()
    exact = exact / (exact.norm(dim=(-2, -1), keepdim=True) + EPS)
    for a, b, c in TRIPLES:
        gram = exact @ exact.mT
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    ours, theirs = (by(x.clone(), TRIPLES, torch.bfloat16) for by in (orthogonalise, plain))
    assert not ours[0].any()
    if shape[0] > 1:
        assert relative(ours, exact) < 1.5 * relative(theirs, exact)
    if shape[1] < shape[2]:  # square ones are iterated on as they lie
        tall = orthogonalise(x.mT.contiguous(), TRIPLES, torch.bfloat16)
        assert torch.equal(tall.mT, ours)


@pytest.mark.parametrize("moments", Moments)
def test_the_optimizer_uses_them(moments: Moments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same weights and momentum as with plain PyTorch, within BF16's roundings of an update; a skipped step keeps all
    bits; no step waits for the host."""

    def made() -> tuple[nn.Module, Muon]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 768), nn.Linear(768, 512)).cuda()  # biases are AdamW's
        divisions = {"0.weight": Division((256, 128)), "1.weight": Division((512,))}
        layouts = {name: layout(tuple(model.get_parameter(name).shape), each) for name, each in divisions.items()}
        config = replace(CONFIG, moments=moments)
        return model, Muon(model, set(), config, LearningRate(config, 100), torch.device("cuda"), layouts)

    (model, optimizer), (twin, other) = made(), made()
    other._kernels = False
    monkeypatch.setattr(muon_module, "orthogonalise", lambda u, t, d: (orthogonalise if now else plain)(u, t, d))
    for step in range(4):
        x = torch.randn(64, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        before = [p.detach().clone() for p in model.parameters()]
        for now, m, o in ((True, model, optimizer), (False, twin, other)):
            m(x).square().sum().backward()
            norm, ok = o.grad_norms().norm(), torch.tensor(step != 2, device="cuda")
            if step == 2:
                norm = norm * torch.nan
            committed = torch.tensor(step, device="cuda")
            torch.cuda.set_sync_debug_mode("error" if now and step > 0 else "default")
            try:
                o.step(ok, committed, norm)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            o.zero_grad()
        moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert moved == [step != 2] * 4
        ours, theirs = optimizer.norms(torch.tensor(True)), other.norms(torch.tensor(True))
        torch.testing.assert_close(ours, theirs, rtol=2.0**-6, atol=0)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p - q).square().mean().sqrt() < 4 * CONFIG.lr * 10 * 2.0**-8
    for name in ("0.weight", "1.weight"):  # gradients follow weights that differ a little
        ours, theirs = (o.state_dict()[name]["momentum"] for o in (optimizer, other))
        assert relative(ours, theirs.double()) < 0.02
