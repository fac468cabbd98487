"""The pass that takes a tensor's own amax: its programs are few, and go over many tiles each."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is missing")

from precision.formats import E4M3
from precision.kernels import cast, norm, swiglu, weights
from precision.kernels.common import Cast
from precision.kernels.const import ROW, TENSOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OWN = Cast(E4M3, TENSOR.value, False, 0, False)  # no history: each tensor's own amax
R, C = 200, 272  # more than three tiles of any kind; the last ones are not whole


def rising(*shape: int) -> Tensor:
    """BF16, the largest at the end: a pass that leaves out its last tiles finds another amax."""
    torch.manual_seed(5)
    x = torch.randn(*shape)
    x = x * torch.linspace(0.1, 4, x.numel()).view(shape)
    x[..., -1, -1] = 100  # rows that are normalised are all as large as each other, but for this
    return x.to(DEVICE, torch.bfloat16)


def row() -> Tensor:
    return torch.zeros((), device=DEVICE)


def backward() -> tuple[Tensor, ...]:
    h_scale = torch.tensor([0.5, 2.0], device=DEVICE)
    return swiglu.swiglu_backward_tensor(rising(R, C), rising(R, 2 * C), None, None, h_scale, row(), row(), OWN, OWN)


PASSES: dict[str, Callable[[], tuple[Tensor | None, ...]]] = {
    "cast": lambda: cast.cast(rising(R, C), row(), row(), OWN),
    "cast, transposed": lambda: cast.cast(rising(R, C), row(), row(), OWN, transposed=True),
    "norm": lambda: norm.rms_norm(
        rising(R, C), torch.linspace(0.5, 2, C, device=DEVICE), 1e-6, row(), row(), OWN, True
    ),
    "swiglu": lambda: swiglu.swiglu(rising(R, 2 * C), None, None, row(), row(), OWN),
    "swiglu, backward": backward,
    "weight": lambda: weights.cast_weight(rising(208, C).float(), row(), row(), OWN, None),
    "weights": lambda: weights.cast_weight(
        rising(3, 208, 2 * C).float(), torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE), OWN, None
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_few_programs_see_all_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PASSES[name]()
    for module in (cast, norm, swiglu, weights):
        monkeypatch.setattr(module, "STRIPS", 3)
    for ours, theirs in zip(PASSES[name](), whole, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.float().equal(theirs.float()) and ours.float().isfinite().all()


def test_rows_of_zeros_stay_zeros_when_transposed() -> None:
    how = Cast(E4M3, ROW.value, False, 0, True)
    data, inv, data_t, inv_t = cast.cast(
        torch.zeros(R, C, device=DEVICE, dtype=torch.bfloat16), row(), row(), how, True
    )
    assert data_t is not None and inv_t is not None
    for each in (data, inv, data_t, inv_t):
        assert (each.float() == 0).all()
