"""The cross entropy kernel does what its twin does, in Triton's interpreter."""

import pytest
import torch

from precision import IGNORED
from precision.cross_entropy import mean_weight, plain_rows

kernels = pytest.importorskip("precision.kernels.cross_entropy", reason="Triton is missing")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_cross_entropy.py has the GPU")
SMALL_BLOCK = 64  # so that rows of a few hundred columns take several


def rows(tokens: int, words: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of very different sizes, targets with ignored ones, the first and the last word."""
    generator = torch.Generator().manual_seed(tokens * words)
    size = torch.logspace(-2, 2, tokens)[:, None]
    logits = (torch.randn(tokens, words, generator=generator) * size).to(dtype)
    target = torch.randint(0, words, (tokens,), generator=generator)
    target[1::3] = IGNORED
    target[0], target[-1] = 0, words - 1
    return logits, target


@pytest.mark.parametrize(
    ("tokens", "words", "dtype"),
    [(*size, dtype) for size in ((1, 7), (5, 64), (13, 333), (4, 1024)) for dtype in (torch.float32, torch.bfloat16)]
    + [(13, 333, torch.float16)],
)
def test_equals_the_twin(tokens: int, words: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", SMALL_BLOCK)
    logits, target = rows(tokens, words, dtype)
    weight = mean_weight(target)
    expected = logits.clone()
    losses = plain_rows(expected, target, weight, True)
    unread = logits.clone()
    unread[target == IGNORED] = float("nan")
    for z in (logits.clone(), unread):
        torch.testing.assert_close(kernels.cross_entropy_rows(z, target, weight, True, IGNORED), losses)
        rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(z, expected, rtol=rounding, atol=2**-23)  # two steps of FP16 near 0
        assert (z[target == IGNORED] == 0).all()
    z = logits.clone()
    torch.testing.assert_close(kernels.cross_entropy_rows(z, target, weight, False, IGNORED), losses)
    assert torch.equal(z, logits), "without gradient nothing is written"


def test_rows_of_a_wider_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", SMALL_BLOCK)
    logits, target = rows(3, 100, torch.float32)
    wide = torch.zeros(3, 130)
    wide[:, :100] = logits
    losses = kernels.cross_entropy_rows(wide[:, :100], target, mean_weight(target), True, IGNORED)
    torch.testing.assert_close(losses, plain_rows(logits, target, mean_weight(target), True))
    torch.testing.assert_close(wide[:, :100], logits)
    assert (wide[:, 100:] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_logits_show_in_the_loss(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", SMALL_BLOCK)
    logits, target = rows(3, 100, torch.float32)
    logits[0, 77] = bad
    losses = kernels.cross_entropy_rows(logits, target, mean_weight(target), True, IGNORED)
    assert losses[0].isnan() and losses[1:].isfinite().all()
    assert logits[0].isnan().any() and logits[1:].isfinite().all()


def test_minus_infinity_is_a_word_that_cannot_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", SMALL_BLOCK)
    logits = torch.zeros(1, 128)
    logits[0, :64] = float("-inf")  # the whole first block
    losses = kernels.cross_entropy_rows(logits, torch.tensor([100]), torch.ones(()), True, IGNORED)
    torch.testing.assert_close(losses, torch.tensor([64.0]).log())
    assert (logits[0, :64] == 0).all()


def test_a_target_outside_the_vocabulary_makes_a_nan_loss() -> None:
    logits = torch.zeros(2, 16)
    losses = kernels.cross_entropy_rows(logits, torch.tensor([16, -1]), torch.ones(()), True, IGNORED)
    assert losses.isnan().all()
