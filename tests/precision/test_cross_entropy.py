"""Cross entropy in slices equals PyTorch's, with its gradient; what is ignored leaves nothing behind."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from precision import IGNORED
from precision.cross_entropy import cross_entropy, cross_entropy_rows, mean_weight, plain_rows, split_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slice_elements", [1, 300, 1 << 20])
def test_equals_pytorch_with_its_gradient(
    dtype: torch.dtype, slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precision.cross_entropy._SLICE_ELEMENTS", slice_elements)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 7, 50, generator=generator) * 4).to(dtype).requires_grad_()
    before = logits.detach().clone()
    target = torch.randint(0, 50, (3, 7), generator=generator)
    target[:, 5:] = IGNORED
    ours = cross_entropy(logits, target)
    expected = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected)
    (ours_grad,), (theirs,) = (torch.autograd.grad(0.3 * x, logits) for x in (ours, expected))
    torch.testing.assert_close(ours_grad, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7)
    assert torch.equal(logits, before), "the caller's logits are left alone"


def test_a_nan_logit_makes_a_nan_loss() -> None:
    logits = torch.zeros(1, 3, 8)
    logits[0, 1, 2] = float("nan")
    assert cross_entropy(logits, torch.zeros(1, 3, dtype=torch.int64)).isnan()


def test_an_ignored_target_leaves_no_gradient_even_with_a_nan() -> None:
    logits = torch.full((2, 8), float("nan"))
    logits[0] = 0.0
    target = torch.tensor([3, IGNORED])
    losses = cross_entropy_rows(logits, target, mean_weight(target), True)
    torch.testing.assert_close(losses, torch.tensor([8.0, 1.0]).log())
    torch.testing.assert_close(logits[0], torch.full((8,), 0.125) - torch.eye(8)[3])
    assert (logits[1] == 0).all()


def test_targets_that_are_all_ignored_give_no_loss() -> None:
    logits = torch.randn(1, 3, 8, requires_grad=True)
    value = cross_entropy(logits, torch.full((1, 3), IGNORED))
    value.backward()
    assert value == 0 and logits.grad is not None and (logits.grad == 0).all()


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy(torch.zeros(1, 1, 8), torch.tensor([[8]]))


def test_backward_runs_once() -> None:
    logits = torch.zeros(1, 3, 8, requires_grad=True)
    value = cross_entropy(logits, torch.zeros(1, 3, dtype=torch.int64))
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_rows_are_an_operator_that_graphs_can_hold() -> None:
    logits, target = torch.randn(5, 16), torch.randint(0, 16, (5,))
    torch.library.opcheck(cross_entropy_rows, (logits, target, mean_weight(target), True))
    expected = cross_entropy_rows(logits.clone(), target, mean_weight(target), False)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(z: torch.Tensor) -> torch.Tensor:
        return cross_entropy_rows(z * 1, target, mean_weight(target), False)

    torch.testing.assert_close(compiled(logits), expected)


class Threads:
    """The place of a thread among others that stand for ranks with a part of the words each."""

    def __init__(self, rank: int, size: int, board: list[torch.Tensor | None], barrier: threading.Barrier):
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        self._board[self.rank] = x.clone()
        self._barrier.wait(60)
        together = torch.stack([each for each in self._board if each is not None])
        self._barrier.wait(60)
        return together

    def max(self, x: torch.Tensor) -> torch.Tensor:
        return self._all(x).amax(0)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._all(x).sum(0)

    def gather(self, x_BsD: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("largest", [1.0, 1e4])
def test_words_that_are_cut_over_ranks_give_the_same_losses_and_gradients(largest: float) -> None:
    T, V, size = 37, 24, 3
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, V, generator=generator) * largest
    target = torch.randint(0, V, (T,), generator=generator)
    target[::5] = IGNORED
    weight, whole = mean_weight(target), logits.clone()
    want = plain_rows(whole, target, weight, True)
    board: list[torch.Tensor | None] = [None] * size
    barrier, parts = threading.Barrier(size), [part.contiguous() for part in logits.chunk(size, 1)]

    def rank(i: int) -> torch.Tensor:
        return split_rows(parts[i], target, weight, True, Threads(i, size, board, barrier))

    with ThreadPoolExecutor(size) as pool:
        losses = list(pool.map(rank, range(size)))
    for loss in losses:
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-7)
