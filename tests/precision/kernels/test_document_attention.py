"""The kernel of attention within documents is its definition, forward and backward, in Triton's interpreter; as an
operator it has the shapes, layouts and gradients that it says it has."""

import pytest
import torch
from torch import Tensor

from precision.attention import attention_core, document_mask

kernels = pytest.importorskip("precision.kernels.document_attention", reason="Triton is missing")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_document_attention.py has the GPU")
TILES = {"forward": (32, 16, 4, 1), "keys": (16, 32, 4, 1), "queries": (16, 16, 4, 1)}
HEADS, SCALE = 2, 0.2


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences take several blocks: masked, whole and diagonal ones."""
    monkeypatch.setattr(kernels, "TILES", TILES)


def bounds_of(starts: list[list[int]], length: int) -> Tensor:
    rows = []
    for row in starts:
        sides = zip(row, [*row[1:], length], strict=True)
        rows.append([[a, b] for a, b in sides for _ in range(b - a)])
    return torch.tensor(rows, dtype=torch.int32).permute(2, 0, 1).contiguous()


def inputs(length: int, d_qk: int, d_v: int, dtype: torch.dtype, batch: int) -> list[Tensor]:
    """q, k, v as MLA makes them: transposed views, v one of a wider tensor."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(batch, length, HEADS, d, generator=generator) for d in (d_qk, d_qk, 8 + d_v))
    return [t.to(dtype).transpose(1, 2).requires_grad_() for t in (q, k, v[..., 8:])]


STARTS = [[0, 1, 2, 20, 50], [0]]  # short documents, one over several blocks, and a whole sequence


@pytest.mark.parametrize(
    ("length", "d_qk", "d_v", "dtype"),
    [(61, 24, 16, torch.float32), (64, 48, 16, torch.bfloat16)],
)
def test_equals_the_masked_core_forward_and_backward(length: int, d_qk: int, d_v: int, dtype: torch.dtype) -> None:
    bounds = bounds_of(STARTS, length)
    tensors = inputs(length, d_qk, d_v, dtype, 2)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    mask = document_mask(bounds, torch.float64, d_qk, d_v)
    expected = attention_core(wide[0], wide[1], wide[2], SCALE, mask)
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        out, lse = kernels.forward(*tensors, bounds, SCALE)
        ours = kernels.backward(probe, *tensors, bounds, out, lse, SCALE)
    assert out.dtype is dtype
    assert out.transpose(1, 2).is_contiguous()
    error = 1e-5 if dtype is torch.float32 else 3e-2
    theirs = torch.autograd.grad((expected * probe).sum(), wide)
    for one, other in zip((out, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=error, atol=error)


def test_not_a_number_stays_in_its_document() -> None:
    bounds = bounds_of([[0, 20, 50]], 64)
    q, k, v = (t.detach() for t in inputs(64, 16, 16, torch.float32, 1))
    k[0, 1, 30] = torch.nan
    out, _ = kernels.forward(q, k, v, bounds, SCALE)
    bad = out.isnan().any(-1)[0]
    assert bad[1, 30:50].all()
    assert bad.sum() == 20


def test_operator_passes_opcheck() -> None:
    """Fake results, layouts, autograd: checked by PyTorch."""
    from precision.kernels.attention_ops import document_attention

    q, k, v = inputs(20, 24, 16, torch.float32, 1)
    bounds = bounds_of([[0, 7, 15]], 20)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(document_attention, (q, k, v, bounds, SCALE), test_utils=checks)
    with torch.no_grad():
        tops, expected_tops = torch.full((2, HEADS), -torch.inf)
        expected = attention_core(q, k, v, SCALE, document_mask(bounds, torch.float32, 24, 16), expected_tops)
        torch.testing.assert_close(attention_core(q, k, v, SCALE, bounds, tops), expected)
        torch.testing.assert_close(tops, expected_tops)
