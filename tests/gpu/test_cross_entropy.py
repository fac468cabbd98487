"""On a GPU the head's loss is right for vocabularies of any size, holds few logits, and never waits for the host."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision import IGNORED, GemmRow, Linear, linear_cross_entropy
from precision.config import ScalingConfig
from precision.cross_entropy import cross_entropy_rows, mean_weight, plain_rows
from precision.formats import BF16, FP32
from precision.rows import GemmRecipe

MIB = 2**20


def rows(tokens: int, words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of very different sizes, targets with ignored ones, the first and the last word."""
    generator = torch.Generator("cuda").manual_seed(tokens * words)
    size = torch.logspace(-2, 2, tokens, device="cuda")[:, None]
    logits = (torch.randn(tokens, words, device="cuda", generator=generator) * size).to(dtype)
    target = torch.randint(0, words, (tokens,), device="cuda", generator=generator)
    target[1::3] = IGNORED
    target[0], target[-1] = 0, words - 1
    return logits, target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "words"), [(1, 2), (37, 129), (1000, 4096), (65, 50257), (300, 32768), (129, 102400), (65, 163840)]
)
def test_rows_equal_float64_and_the_twin(tokens: int, words: int, dtype: torch.dtype) -> None:
    logits, target = rows(tokens, words, dtype)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, reduction="none") * mean_weight(target)
    expected.sum().backward()
    assert exact.grad is not None
    for gradient in (False, True):
        z = logits.clone()
        losses = cross_entropy_rows(z, target, mean_weight(target), gradient)
        torch.testing.assert_close(losses, expected.float(), rtol=2e-6, atol=1e-6)
        if not gradient:
            assert torch.equal(z, logits)
            continue
        assert (z[target == IGNORED] == 0).all()
        wide = z.double()
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 2e-5  # FP32: of exponents up to hundreds
        small = 3e-7 * mean_weight(target)  # p - 1 cancels
        assert ((wide - exact.grad).abs() <= rounding * exact.grad.abs() + small).all()
        twin = logits.clone()
        torch.testing.assert_close(losses, plain_rows(twin, target, mean_weight(target), True), rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(z, twin, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)


def test_more_than_two_to_the_31_logits() -> None:
    tokens, words = 13200, 163840
    logits = torch.zeros(tokens, words, device="cuda", dtype=torch.bfloat16)
    target = torch.zeros(tokens, device="cuda", dtype=torch.int64)
    losses = cross_entropy_rows(logits, target, torch.ones((), device="cuda"), True)
    torch.testing.assert_close(losses, torch.full_like(losses, float(torch.tensor(words).log())))
    torch.testing.assert_close(logits[-1, 0].float(), torch.tensor(1 / words - 1, device="cuda"), rtol=1e-2, atol=0)
    assert (logits[-1, 1:] > 0).all()


def head(hidden: int, words: int, backend: str, fmt=BF16) -> Linear:
    """A head with random weights, ready."""
    recipe = GemmRecipe(fmt, fmt, fmt, fmt, ScalingConfig(), backend)
    layer = Linear(GemmRow("lm_head", "lm_head", hidden, words, 1, 1.0, recipe, "test")).cuda()
    nn.init.normal_(layer.weight, std=hidden**-0.5, generator=torch.Generator("cuda").manual_seed(0))
    layer.refresh_weight()
    return layer


def batch(tokens: int, hidden: int, words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    h = torch.randn(1, tokens, hidden, device="cuda", generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, words, (1, tokens), device="cuda", generator=generator)
    target[0, 11::7] = IGNORED
    return h, target


@pytest.mark.parametrize("backend", ["cuda", "reference"])
@pytest.mark.parametrize("fmt", [BF16, FP32], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("chunk", [128, 1 << 20])
@pytest.mark.parametrize(("tokens", "hidden", "words"), [(333, 264, 5000), (640, 256, 4097)])
def test_head_equals_float64(
    backend: str, fmt, chunk: int, tokens: int, hidden: int, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precision.head._CHUNK_BYTES", 1)
    monkeypatch.setattr("precision.head._MIN_ROWS", chunk)
    layer = head(hidden, words, backend, fmt)
    h, target = batch(tokens, hidden, words, fmt.dtype)
    loss = linear_cross_entropy(h, layer, target)
    (0.3 * loss).backward()
    exact, weight = (t.detach().to(fmt.dtype).double().requires_grad_() for t in (h, layer.weight))
    expected = F.cross_entropy((exact @ weight.t()).flatten(0, 1), target.flatten())
    (0.3 * expected).backward()
    error = 2e-2 if fmt is BF16 else 1e-4
    torch.testing.assert_close(loss.double(), expected, rtol=error / 10, atol=0)
    for ours, theirs in ((h.grad, exact.grad), (layer.weight.grad, weight.grad)):
        assert ours is not None and theirs is not None
        assert (ours.double() - theirs).norm() < error * theirs.norm()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


@contextmanager
def peak() -> Iterator[list[float]]:
    """MiB that were allocated at most while inside, above what was there before."""
    measured: list[float] = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield measured
    torch.cuda.synchronize()
    measured.append((torch.cuda.max_memory_allocated() - before) / MIB)


def test_memory_is_that_of_a_chunk_and_of_the_gradients() -> None:
    tokens, hidden, words = 32768, 512, 65536  # 4 GiB of logits in BF16
    layer = head(hidden, words, "cuda")
    h, target = batch(tokens, hidden, words, torch.bfloat16)
    linear_cross_entropy(h, layer, target).backward()  # warm up: cuBLAS takes its workspace
    layer.weight.grad = h.grad = None
    dw, dh, chunk = 4 * words * hidden / MIB, 2 * tokens * hidden / MIB, 256
    with peak() as used:
        linear_cross_entropy(h, layer, target).backward()
    assert used[0] < dw + 4 * dh + chunk + 64, "dh once in BF16 and once in FP32"
    layer.weight.grad = h.grad = None
    with peak() as used, torch.no_grad():
        linear_cross_entropy(h, layer, target)
    assert used[0] < chunk + 64


def test_no_waiting_for_the_device_and_capture_in_a_cuda_graph() -> None:
    layer = head(256, 5000, "cuda")
    h, target = batch(4500, 256, 5000, torch.bfloat16)

    def step() -> Tensor:
        loss = linear_cross_entropy(h, layer, target)
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step().clone()
        assert h.grad is not None and layer.weight.grad is not None
        grads = [t.grad.clone() for t in (h, layer.weight) if t.grad is not None]
        torch.cuda.set_sync_debug_mode("error")
        try:
            h.grad = layer.weight.grad = None
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    h.grad = layer.weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(2):
        graph.replay()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip((h.grad, layer.weight.grad), grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rows_can_be_compiled() -> None:
    logits, target = rows(64, 5000, torch.bfloat16)
    weight = mean_weight(target)

    @torch.compile(fullgraph=True)
    def compiled(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z * 1
        return cross_entropy_rows(z, target, weight, True), z

    expected = logits.clone()
    losses = cross_entropy_rows(expected, target, weight, True)
    ours, dz = compiled(logits)
    torch.testing.assert_close(ours, losses)
    torch.testing.assert_close(dz, expected)
