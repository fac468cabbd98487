"""The kernel counts and sums what `trainer.health.casts` does in plain PyTorch, whatever the scales and the shape."""

import pytest
import torch
from torch import Tensor

from precision.formats import E4M3, E5M2, Format, spread
from trainer.health import casts

kernels = pytest.importorskip("precision.kernels.cast_statistics", reason="Triton is missing")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of many sizes: some saturate under a scale near 1, some vanish, some are 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-8, 6, shape, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    return x.to(dtype).to(DEVICE)


def scales(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Inverse scales as the backends make them, strides too."""
    *stack, R, C = shape
    generator = torch.Generator().manual_seed(1)
    blocks = -(-R // 128), -(-C // 128)

    def new(*size: int) -> Tensor:
        return (0.3 + 3 * torch.rand(size, generator=generator)).to(DEVICE)

    if kind == "blocks":  # stored [C / 128, rows]
        return new(blocks[1], *stack, R).movedim(0, -1)
    made = {"one": (), "stack": (*stack,), "rows": (*stack, R, 1), "tiles": (*stack, *blocks)}
    return new(*made[kind])


def twin(x: Tensor, data: Tensor, inv: Tensor, fmt: Format) -> Tensor:
    return casts.plain_cast_sums(x.cpu(), data.cpu(), inv.cpu(), fmt)


def kernel(x: Tensor, data: Tensor, inv: Tensor, fmt: Format) -> Tensor:
    sums = kernels.new_sums(device=DEVICE)
    kernels.add_cast_statistics(sums, x, data, inv, fmt)
    return sums.sum(0).cpu()


def check(x: Tensor, inv: Tensor, fmt: Format) -> None:
    wide = x.bfloat16().float() / spread(inv[:, None, None] if inv.dim() == 1 else inv, *x.shape)
    data = wide.clamp(-fmt.max, fmt.max).to(fmt.dtype)
    ours, theirs = kernel(x, data, inv, fmt), twin(x, data, inv, fmt)
    assert ours[:3].tolist() == theirs[:3].tolist(), "counts are exact"
    assert min(theirs[1:3]) > 0 or x.numel() < 1000
    torch.testing.assert_close(ours[3:], theirs[3:], rtol=1e-5, atol=0)
    assert torch.equal(ours, kernel(x, data, inv, fmt)), "the same bits again"


@pytest.mark.parametrize(("fmt", "dtype"), [(E4M3, torch.float32), (E5M2, torch.bfloat16)], ids=["master", "gradient"])
@pytest.mark.parametrize("kind", ["one", "rows", "blocks", "tiles"])
def test_cast_statistics_of_a_matrix(fmt: Format, dtype: torch.dtype, kind: str) -> None:
    for shape in ((150, 336), (1, 130), (129, 7)):
        check(numbers(*shape, dtype=dtype), scales(kind, shape), fmt)


@pytest.mark.parametrize("kind", ["one", "stack", "rows", "blocks", "tiles"])
def test_a_stack_and_sequences(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 5)  # each of several tiles
    check(numbers(3, 130, 144, dtype=torch.float32), scales(kind, (3, 130, 144)), E4M3)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 130)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    check(numbers(*shape, dtype=torch.bfloat16), torch.tensor(0.7, device=DEVICE), E4M3)
    if len(shape) > 1:
        rows = 0.3 + torch.rand(*shape[:-1], 1, device=DEVICE)
        check(numbers(*shape, dtype=torch.bfloat16), rows, E4M3)


def test_memory_of_any_order_and_alignment() -> None:
    x = numbers(40, 300, dtype=torch.bfloat16).t()
    assert not x.is_contiguous()
    check(x, torch.ones((), device=DEVICE), E4M3)
    check(numbers(12001, dtype=torch.bfloat16)[1:].view(40, 300), torch.ones((), device=DEVICE), E5M2)


@pytest.mark.parametrize("kind", ["one", "rows", "blocks"])
def test_every_kth_row_and_rows_that_do_not_count(kind: str) -> None:
    shape, part = (211, 336), slice(None, None, 3)
    x, inv = numbers(*shape, dtype=torch.bfloat16), scales(kind, shape)
    data = (x.float() / spread(inv, *x.shape)).clamp(-448, 448).to(E4M3.dtype)
    live = torch.arange(211, dtype=torch.int32, device=DEVICE) % 5 - 1  # every fifth is none
    x[live < 0] = torch.nan
    sums = kernels.new_sums(device=DEVICE)
    some = inv[part] if inv.dim() else inv
    kernels.add_cast_statistics(sums, x[part], data[part], some, E4M3, live[part])
    rows = (live[part] >= 0).nonzero().flatten()
    theirs = twin(x[part][rows], data[part].float()[rows].to(E4M3.dtype), some[rows] if inv.dim() else inv, E4M3)
    assert sums.sum(0)[:3].tolist() == theirs[:3].tolist() and theirs[0] == len(rows) * 336 < 71 * 336
    torch.testing.assert_close(sums.sum(0)[3:].cpu(), theirs[3:], rtol=1e-5, atol=0)


def test_casts_add_up_and_nothing_is_nothing() -> None:
    sums = kernels.new_sums(2, device=DEVICE)
    x, one = numbers(70, 200, dtype=torch.bfloat16), torch.ones((), device=DEVICE)
    data = x.float().clamp(-448, 448).to(E4M3.dtype)
    for part in (slice(0, 70), slice(3, 20), slice(5, 5)):
        kernels.add_cast_statistics(sums[1], x[part], data[part], one, E4M3)
    expected = twin(x, data, one, E4M3) + twin(x[3:20], data[3:20], one, E4M3)
    torch.testing.assert_close(
        sums.sum(1).cpu(), torch.stack([torch.zeros_like(expected), expected]), rtol=1e-5, atol=0
    )


def test_nonfinite_elements_show_in_the_statistics() -> None:
    x = numbers(64, 128, dtype=torch.bfloat16)
    data = x.float().clamp(-448, 448).to(E4M3.dtype)
    x[5, 5] = torch.nan
    sums = kernel(x, data, torch.ones((), device=DEVICE), E4M3)
    assert sums.isfinite().tolist() == [True, True, True, False, False]
