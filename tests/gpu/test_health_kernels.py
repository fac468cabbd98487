"""On a GPU the kernels behind the health metrics run at memory's speed, never wait, and reach beyond 2^31 numbers.

pytest tests/gpu/test_health_kernels.py -s          # prints what they reach

What they compute: tests/precision/kernels/test_update_norms.py and test_cast_statistics.py, which run here as well.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from precision.formats import E4M3
from trainer.health.casts import add_cast_sums, cast_sums, new_sums

SHAPES = [(64, 2816, 2048), (64, 2048, 1408)] * 2 + [(2048, 3072)] * 8 + [(2048,)] * 100


Reaches = Callable[[str, Callable[[], object], int], float]


@pytest.fixture(scope="module")
def reaches(milliseconds: Callable[[Callable[[], object]], float]) -> Reaches:
    """reaches(name, run, bytes): terabytes a second; nothing in `run` may wait for the device."""

    def measure(name: str, run: Callable[[], object], size: int) -> float:
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ms = milliseconds(run)
        print(f"{name:36s} {ms:7.3f} ms   {size / ms / 1e9:5.2f} TB/s")
        return size / ms / 1e9

    return measure


@pytest.fixture(scope="module")
def copying(reaches: Reaches) -> float:
    """What a copy reaches, TB/s."""
    x = torch.zeros(1 << 28, device="cuda")
    y = torch.empty_like(x)
    return reaches("copy", lambda: y.copy_(x), 8 << 28)


def test_norms(copying: float, reaches: Reaches) -> None:
    """Two layers of 64 experts, and many small tensors."""
    from precision.kernels.adamw import FusedAdamW

    parameters, first, second = ([torch.rand(shape, device="cuda") for shape in SHAPES] for _ in range(3))
    steps = [torch.ones((), device="cuda") for _ in SHAPES]
    kernel = FusedAdamW(parameters, first, second, steps, [0.1] * len(SHAPES), (0.9, 0.95), 1e-8)
    lr = torch.tensor(1e-3, device="cuda")
    norms = kernel.norms(lr)
    torch.testing.assert_close(norms[1].float(), torch.stack([p.norm() for p in parameters]), rtol=1e-4, atol=0)
    count = sum(math.prod(shape) for shape in SHAPES)
    assert reaches("norms, 12 bytes a parameter", lambda: kernel.norms(lr), 12 * count) > 0.7 * copying


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["master", "bf16"])
@pytest.mark.parametrize("kind", ["one", "rows", "blocks", "tiles"])
def test_statistics_of_casts(copying: float, reaches: Reaches, dtype: torch.dtype, kind: str) -> None:
    shape = G, R, C = 64, 2816, 2048
    x = torch.randn(shape, device="cuda").to(dtype)
    inv = {
        "one": lambda: torch.rand(G, device="cuda"),
        "rows": lambda: torch.rand(G, R, 1, device="cuda"),
        "blocks": lambda: torch.rand(C // 128, G, R, device="cuda").movedim(0, -1),
        "tiles": lambda: torch.rand(G, R // 128, C // 128, device="cuda"),
    }[kind]()
    data = x.to(E4M3.dtype)
    sums = new_sums(device=x.device)
    size = x.numel() * (x.element_size() + 1)
    assert reaches(f"casts, {kind}, {dtype}", lambda: add_cast_sums(sums, x, data, inv, E4M3), size) > 0.6 * copying


@pytest.mark.parametrize("k", [1, 7])
def test_statistics_of_every_kth_row(copying: float, reaches: Reaches, k: int) -> None:
    """A step's sample: rows where they lie, some of which do not count."""
    R, C = 16384, 8192  # long enough that the launch, from a host in Python, does not count
    x = torch.randn(k * R, C, device="cuda").bfloat16()
    data, live = x.to(E4M3.dtype), torch.zeros(k * R, dtype=torch.int32, device="cuda")
    live[-k * R // 4 :] = -1
    one, sums = torch.ones((), device="cuda"), new_sums(device=x.device)
    given = x[::k], data[::k], one, E4M3, live[::k]
    speed = reaches(f"casts, every {k}. row", lambda: add_cast_sums(sums, *given), 3 * R * C * 3 // 4)
    assert speed > 0.3 * copying
    sums.zero_()
    add_cast_sums(sums, *given)
    assert sums.sum(0)[0] == R * C * 3 // 4 and sums.sum(0)[1] == 0


def test_more_than_two_to_the_31() -> None:
    R, C = (1 << 20) + 8, 2048
    x, data = (torch.zeros(R, C, dtype=dtype, device="cuda") for dtype in (torch.bfloat16, E4M3.dtype))
    last: Tensor = x[-1]
    last[:3] = 500.0
    sums = cast_sums(x, data, torch.ones((), device="cuda"), E4M3).tolist()
    assert sums == [R * C, 3, 3, 3 * 500.0**2, 3 * 500.0**2]
