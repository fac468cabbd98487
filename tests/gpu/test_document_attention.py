"""On a GPU attention within documents is a kernel of ours: the core in float64, in any shape, compiled or not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.documents import bounds_of
from precision import attention_core, document_mask
from trainer.parallel.blocks import _recompute_all_but_core

SCALE, HEADS = 192**-0.5, 3
Case = tuple[list[Tensor], Tensor]


def case(length: int, d_qk: int = 192, d_v: int = 128, mean: int = 100, dtype: torch.dtype = torch.bfloat16) -> Case:
    """q, k, v of two sequences as MLA makes them, and the bounds of documents of `mean` tokens (0: one a sequence)."""
    generator = torch.Generator("cuda").manual_seed(length)
    widths = d_qk, d_qk, 128 + d_v
    q, k, v = (torch.randn(2, length, HEADS, w, device="cuda", dtype=dtype, generator=generator) for w in widths)
    ends = torch.rand(2, length, device="cuda", generator=generator) * mean < (1 if mean else -1)
    return [t.detach().requires_grad_() for t in (q, k, v)], bounds_of(ends.cumsum(1, dtype=torch.int32))


def core(mask: Tensor | None) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_core(q.transpose(1, 2), k.transpose(1, 2), v[..., 128:].transpose(1, 2), SCALE, mask)

    return attend


def definition(bounds: Tensor) -> Callable[..., Tensor]:
    """In float64, with scores in memory."""
    mask = document_mask(bounds, torch.float64, 0, 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.double().transpose(1, 2) for t in (q, k, v[..., 128:]))
        return (q @ k.mT * SCALE).masked_fill(~mask, float("-inf")).softmax(-1) @ v

    return attend


def assert_close(function: Callable[..., Tensor], theirs: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """Results and gradients, row by row of each head: a block of wrong rows must not drown in the rest."""
    out, expected = function(*tensors), theirs(*tensors)
    probe = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(out.dtype)
    grads = [torch.autograd.grad((x * probe).sum(), tensors) for x in (out, expected)]
    for one, other in [(out, expected), *zip(*grads, strict=True)]:
        assert one.isfinite().all()
        gap = (one.double() - other.double()).norm(dim=-1)
        size = other.double().norm(dim=-1)  # 0 for the queries of a document of one token; rounding leaves some
        assert (gap <= 3e-2 * size + 1e-2 * size.mean() + 5e-2).all(), float((gap / (size + size.mean())).max())


@pytest.mark.parametrize("length", [1, 2, 77, 128, 192, 320, 1000, 2048])
@pytest.mark.parametrize("mean", [3, 100, 700, 0])
def test_equals_float64(length: int, mean: int) -> None:
    tensors, bounds = case(length, mean=mean)
    mask = document_mask(bounds, torch.bfloat16, 192, 128)
    assert mask.dtype is torch.int32, "the kernel serves this"
    assert_close(core(mask), definition(bounds), tensors)


@pytest.mark.parametrize(("d_qk", "d_v"), [(128, 128), (96, 64), (48, 24), (24, 16), (256, 256), (192, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_head_sizes(d_qk: int, d_v: int, dtype: torch.dtype) -> None:
    tensors, bounds = case(333, d_qk, d_v, dtype=dtype)
    assert_close(core(document_mask(bounds, dtype, d_qk, d_v)), definition(bounds), tensors)


def test_shapes_without_a_kernel_use_a_mask() -> None:
    tensors, bounds = case(200, dtype=torch.float32)
    mask = document_mask(bounds, torch.float32, 192, 128)
    assert mask.dtype is torch.bool
    assert_close(core(mask), definition(bounds), tensors)


def test_one_document_is_the_causal_core() -> None:
    tensors, bounds = case(512, mean=0)
    assert_close(core(document_mask(bounds, torch.bfloat16, 192, 128)), core(None), tensors)


def test_document_attention_gives_the_same_bits_each_time() -> None:
    tensors, bounds = case(1000)
    attend = core(document_mask(bounds, torch.bfloat16, 192, 128))
    first, again = (torch.autograd.grad(attend(*tensors).float().square().sum(), tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_compiled(recompute: str) -> None:
    """As blocks are, with other documents in each call and one compiled graph."""
    torch._dynamo.reset()

    def block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return core(mask)(q * 1, k * 1, v * 1) * 1

    def wrapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if recompute == "selective":
            return _recompute_all_but_core(block, q, k, v, mask)
        if recompute == "full":
            out = checkpoint(block, q, k, v, mask, use_reentrant=False)
            assert isinstance(out, Tensor)
            return out
        return block(q, k, v, mask)

    compiled = torch.compile(wrapped, fullgraph=True, dynamic=False)
    for mean in (40, 300):  # the second time, nothing is compiled
        tensors, bounds = case(640, mean=mean)
        mask = document_mask(bounds, torch.bfloat16, 192, 128)
        with torch.compiler.set_stance("default" if mean == 40 else "fail_on_recompile"):
            assert_close(lambda q, k, v, m=mask: compiled(q, k, v, m), definition(bounds), tensors)


def test_nothing_waits_for_the_host() -> None:
    tensors, _ = case(256)
    for _ in range(2):  # the first one loads the kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = bounds_of((tensors[0][..., 0, 0] > 1).cumsum(1, dtype=torch.int32))
            out = core(document_mask(again, torch.bfloat16, 192, 128))(*tensors)
            torch.autograd.grad(out.sum(), tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
