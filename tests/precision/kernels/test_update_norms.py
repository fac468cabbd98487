"""The kernels return the same norms of an AdamW step as `trainer.optim.update_norms` and torch."""

import math

import pytest
import torch
from torch import Tensor

from trainer.optim.update_norms import update_norms

adamw = pytest.importorskip("precision.kernels.adamw", reason="Triton is missing")
kernels = pytest.importorskip("precision.kernels.update_norms", reason="Triton is missing")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# chunks of 256: less than one, exactly one, many; more sums than are read at a time; nothing
SHAPES = [(1,), (37,), (16, 16), (50, 101), (0, 7), (200,), (3, 64, 5)]
DECAYS = (0.0, 0.1, 0.1, 0.3, 0.1, 0.0, 0.1)
LR, BETAS, EPS = 1e-2, (0.9, 0.95), 1e-8


class Run:
    """P tensors, what AdamW keeps of them, and its kernel."""

    def __init__(self, betas: tuple[float, float] = BETAS, eps: float = EPS):
        self.generator = torch.Generator(DEVICE).manual_seed(0)
        self.parameters = [self.random(shape) for shape in SHAPES]
        self.first, self.second = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.steps = [torch.zeros((), device=DEVICE) for _ in SHAPES]
        self.lr, self.betas, self.eps = torch.tensor(LR, device=DEVICE), betas, eps
        self.kernel = adamw.FusedAdamW(self.parameters, self.first, self.second, self.steps, DECAYS, betas, eps)
        sizes = [p.numel() for p in self.parameters]
        self.kernel._norms = kernels.UpdateNorms(sizes, betas, eps, torch.device(DEVICE), block=256)

    def random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE)

    def step(self, missing: int | None = None) -> Tensor:
        """A step; returns the norms of what it changed."""
        before = [p.double() for p in self.parameters]
        for i, p in enumerate(self.parameters):
            p.grad = None if i == missing else self.random(tuple(p.shape)) * 10.0 ** (i - 3)
        self.kernel.step(torch.tensor(True, device=DEVICE), self.lr)
        for p in self.parameters:
            p.grad = None
        return torch.stack([(p.double() - b).norm() for p, b in zip(self.parameters, before, strict=True)])

    def twin(self) -> Tensor:
        rows = zip(self.parameters, self.first, self.second, self.steps, DECAYS, strict=True)
        updates = [
            update_norms([p], [{"exp_avg": m, "exp_avg_sq": v, "step": t}], self.lr, self.betas, self.eps, decay)
            for p, m, v, t, decay in rows
        ]
        return torch.stack([torch.cat(updates), torch.stack([p.double().norm() for p in self.parameters])])


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999)])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_equals_the_twin_and_what_changed(monkeypatch: pytest.MonkeyPatch, betas, eps: float) -> None:
    monkeypatch.setattr(kernels, "_AT_ONCE", 8)
    run = Run(betas, eps)
    for _ in range(3):
        changed = run.step()
        norms = run.kernel.norms(run.lr)
        torch.testing.assert_close(norms, run.twin(), rtol=2e-6, atol=0)
        torch.testing.assert_close(norms[0], changed, rtol=1e-4, atol=1e-12)
    assert torch.equal(norms, run.kernel.norms(run.lr)), "the same bits again"


def test_nothing_was_changed_before_the_first_step() -> None:
    run = Run()
    norms = run.kernel.norms(run.lr)
    assert norms[0].tolist() == [0.0] * len(SHAPES)
    torch.testing.assert_close(norms[1], run.twin()[1], rtol=2e-6, atol=0)
    run.step(missing=3)
    norms = run.kernel.norms(run.lr)
    torch.testing.assert_close(norms, run.twin(), rtol=2e-6, atol=0)
    assert [i for i, norm in enumerate(norms[0].tolist()) if norm == 0] == [3, 4], "no step; no elements"


def test_parameters_that_moved_are_found_and_steps_continue() -> None:
    run = Run()
    run.step()
    for i, p in enumerate(run.parameters):  # to addresses that are no multiples of 16
        p.data = torch.cat([p.flatten().new_zeros(1), p.flatten()])[1:].view(p.shape) + i
    torch.testing.assert_close(run.kernel.norms(run.lr), run.twin(), rtol=2e-6, atol=0)
    changed = run.step()
    torch.testing.assert_close(run.kernel.norms(run.lr)[0], changed, rtol=1e-4, atol=1e-12)


def test_nonfinite_updates_show_in_the_norms() -> None:
    run = Run()
    run.step()
    run.parameters[3].view(-1)[7] = math.nan
    norms = run.kernel.norms(run.lr)
    assert norms.isfinite().tolist() == [[i != 3 for i in range(len(SHAPES))]] * 2
