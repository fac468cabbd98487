"""Cross entropy in slices equals PyTorch's, and targets stop where the sequence does."""

import pytest
import torch
import torch.nn.functional as F

from models import loss
from models.loss import IGNORED, cross_entropy, targets_ahead


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slice_elements", [1, 300, 1 << 20])
def test_equals_pytorch_with_its_gradient(
    dtype: torch.dtype, slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_SLICE_ELEMENTS", {"cpu": slice_elements})
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 7, 50, generator=generator) * 4).to(dtype).requires_grad_()
    target = torch.randint(0, 50, (3, 7), generator=generator)
    target[:, 5:] = IGNORED
    ours = cross_entropy(logits, target)
    expected = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected)
    (ours_grad,), (theirs,) = (torch.autograd.grad(3 * x, logits) for x in (ours, expected))
    torch.testing.assert_close(ours_grad, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7)


def test_a_nan_logit_makes_a_nan_loss() -> None:
    logits = torch.zeros(1, 3, 8)
    logits[0, 1, 2] = float("nan")
    assert cross_entropy(logits, torch.zeros(1, 3, dtype=torch.int64)).isnan()


def test_backward_runs_once() -> None:
    logits = torch.zeros(1, 3, 8, requires_grad=True)
    value = cross_entropy(logits, torch.zeros(1, 3, dtype=torch.int64))
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_targets_end_with_the_sequence() -> None:
    tokens = torch.arange(5)[None]
    assert targets_ahead(tokens, 1).tolist() == [[1, 2, 3, 4]]
    assert targets_ahead(tokens, 3).tolist() == [[3, 4, IGNORED, IGNORED]]
