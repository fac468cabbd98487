"""Muon's elementwise kernels, in Triton's interpreter, do what `trainer.optim.muon` does in plain PyTorch."""

import pytest
import torch
from torch import Tensor

muon = pytest.importorskip("precision.kernels.muon", reason="Triton is missing")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU: tests/gpu/test_muon.py")
MU, DECAY, LR = 0.95, 0.1, 0.3
FP32_ROUNDING = 2.0**-23


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads(whole: Tensor) -> Tensor:
    """[3, 40, 50] of [3 * 70, 90]: rows 20 to 60 of each 70, columns 30 to 80."""
    return whole.as_strided((3, 40, 50), (70 * 90, 90, 1), 20 * 90 + 30)


def matrices(whole: Tensor) -> Tensor:
    """[2, 80, 65], all of [160, 65]."""
    return whole.view(2, 80, 65)


VIEWS = {"heads": (heads, (210, 90)), "matrices": (matrices, (160, 65))}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_advance(view: str, transposed: bool, moment: torch.dtype, nesterov: bool) -> None:
    """A skipped step keeps the momentum, whatever the gradient; what lies between the matrices stays in any case."""
    part, shape = VIEWS[view]
    g, whole = draw(0, *shape), draw(1, *shape).to(moment)
    gradient, momentum = part(g), part(whole)
    k, rows, columns = gradient.shape
    out = torch.empty(k, columns, rows).bfloat16().mT if transposed else torch.empty(k, rows, columns).bfloat16()
    before, divisor = whole.clone(), torch.tensor(4.0)
    bad = torch.full_like(g, torch.nan)
    muon.advance(part(bad), momentum, out, torch.tensor(False), divisor, MU, nesterov)
    assert torch.equal(whole, before)
    muon.advance(gradient, momentum, out, torch.tensor(True), divisor, MU, nesterov)
    clipped = gradient.double() / 4
    advanced = MU * part(before).double() + clipped
    expected = MU * advanced + clipped if nesterov else advanced
    steps = {torch.float32: 4 * FP32_ROUNDING, torch.bfloat16: 2.0**-8}
    for ours, exact in ((out, expected), (momentum, advanced)):
        assert ((ours.double() - exact).abs() <= steps[ours.dtype] * exact.abs() + 1e-6).all()
    part(before).copy_(momentum)
    assert torch.equal(whole, before)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_apply(view: str, transposed: bool) -> None:
    part, shape = VIEWS[view]
    whole, before = draw(0, *shape), draw(0, *shape)
    weight = part(whole)
    k, rows, columns = weight.shape
    update = draw(1, k, columns, rows).mT if transposed else draw(1, k, rows, columns)
    update, sums = update.bfloat16(), torch.full((muon.programs(weight),), torch.nan)
    lr = torch.tensor(LR)
    muon.apply(weight, torch.full_like(update, torch.nan), sums, torch.tensor(False), lr, 2.0, DECAY)
    assert torch.equal(whole, before) and not sums.any()
    muon.apply(weight, update, sums, torch.tensor(True), lr, 2.0, DECAY)
    change = LR * (2.0 * update.double() + DECAY * part(before).double())
    torch.testing.assert_close(weight.double(), part(before).double() - change, rtol=4 * FP32_ROUNDING, atol=1e-6)
    torch.testing.assert_close(sums.double().sum(), change.square().sum(), rtol=1e-5, atol=0)
    part(before).copy_(weight)
    assert torch.equal(whole, before)
