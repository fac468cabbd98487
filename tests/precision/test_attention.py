"""The attention core equals its definition with any head sizes, and can be compiled into one graph."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from precision import attention_core, latent_attention


def inputs(length: int, d_qk: int, d_v: int) -> list[Tensor]:
    """q, k, v of two sequences and three heads, v a view into a wider tensor as MLA's is."""
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(2, length, 3, d_qk, generator=generator) for _ in range(2))
    v = torch.randn(2, length, 3, 16 + d_v, generator=generator)[..., 16:]
    return [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]


def definition(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale Q K^T + mask) V in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT * scale).masked_fill(future, float("-inf")).softmax(-1) @ v


def lse(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Log-sum-exp of each row's logits in float64, [B, H, S]."""
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return (q.double() @ k.double().mT * scale).masked_fill(future, float("-inf")).logsumexp(-1)


@pytest.mark.parametrize("length", [1, 5, 77])
@pytest.mark.parametrize(("d_qk", "d_v"), [(24, 16), (16, 16), (16, 24)])
def test_equals_its_definition_with_gradients(length: int, d_qk: int, d_v: int) -> None:
    q, k, v = inputs(length, d_qk, d_v)
    tops = torch.full((3,), -torch.inf)
    out, expected = attention_core(q, k, v, 0.2, None, tops), definition(q, k, v, 0.2)
    torch.testing.assert_close(tops, lse(q, k, 0.2).amax((0, 2)).float(), msg="rows of lse bound each head's logits")
    torch.testing.assert_close(out, expected.float())
    probe = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad((x * probe).sum(), (q, k, v)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("queries", "length"), [(1, 1), (1, 9), (2, 9), (9, 9)])
def test_heads_that_share_a_latent(queries: int, length: int) -> None:
    """As if each head had keys and values of its own; the queries are the last of the positions."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(2, 3, length, 24, generator=generator)
    latent = torch.randn(2, length, 24, generator=generator)
    each = latent[:, None].expand(-1, 3, -1, -1)
    expected = definition(q, each, each[..., :16], 0.2)[:, :, -queries:]
    out = latent_attention(q[:, :, -queries:], latent, 16, 0.2)
    torch.testing.assert_close(out, expected.float())


def test_large_logits_of_scaled_keys_are_as_exact_as_others() -> None:
    """Every logit is near 30, where a rounding of BF16 would be an eighth; the softmax depends on differences."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(1, 40, 24, generator=generator)
    latent[..., 0] = 4 + torch.rand(40, generator=generator) / 16
    q, latent = F.one_hot(torch.zeros(1, 2, 1, dtype=torch.long), 24).bfloat16(), latent.bfloat16()
    q[..., 1], scale = 1 / 64, 7.5
    factor = 1 + torch.rand(1, 2, 40, generator=generator) / 20
    score = (q.double() @ latent.double()[:, None].mT) * scale * factor.double()[:, :, None]
    exact = score.softmax(-1) @ latent.double()[:, None, :, :16]
    out = latent_attention(q, latent, 16, scale, factor)
    assert float(score.min()) > 20
    # probabilities and the result are rounded once each
    assert (out.double() - exact).norm() < 2.0**-8 * exact.norm()


def test_a_core_in_fp32_stays_within_the_documents_of_its_neighbours_in_bf16() -> None:
    """Their kernel reads bounds, not a mask."""
    q, k, v = torch.randn(3, 1, 2, 9, 16, generator=torch.Generator().manual_seed(0)).unbind()
    bounds = torch.tensor([[[0] * 4 + [4] * 5], [[4] * 4 + [9] * 5]], dtype=torch.int32)
    parts = [attention_core(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], 0.2) for a, b in ((0, 4), (4, 9))]
    torch.testing.assert_close(attention_core(q, k, v, 0.2, bounds), torch.cat(parts, 2))
