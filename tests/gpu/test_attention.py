"""On a GPU attention is cuDNN's, with MLA's head sizes and any length, forward and backward, compiled and not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from models.documents import bounds_of
from precision import attention_core, document_mask, returns_lse

SCALE = 192**-0.5
CUDNN = "_scaled_dot_product_cudnn_attention"


def inputs(length: int, dtype: torch.dtype, d_qk: int = 192, d_v: int = 128) -> list[Tensor]:
    """q, k, v of two sequences and three heads as MLA makes them: transposed views, v one of a wider tensor."""
    generator = torch.Generator("cuda").manual_seed(length)
    widths = d_qk, d_qk, 128 + d_v
    q, k, kv = (torch.randn(2, length, 3, w, device="cuda", dtype=dtype, generator=generator) for w in widths)
    return [t.detach().requires_grad_() for t in (q, k, kv)]


def core(q: Tensor, k: Tensor, kv: Tensor) -> Tensor:
    return attention_core(q.transpose(1, 2), k.transpose(1, 2), kv[..., 128:].transpose(1, 2), SCALE)


def definition(q: Tensor, k: Tensor, kv: Tensor) -> Tensor:
    """softmax(scale Q K^T + mask) V in float64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, kv[..., 128:]))
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device="cuda").triu(1)
    return (q @ k.mT * SCALE).masked_fill(future, float("-inf")).softmax(-1) @ v


def assert_close(function: Callable[..., Tensor], tensors: list[Tensor], error: float) -> None:
    """Result and gradients of `function` are the definition's, by their norms."""
    out, expected = function(*tensors), definition(*tensors)
    probe = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(out.dtype)
    pairs = [(out, expected)]
    grads = [torch.autograd.grad((x * probe).sum(), tensors) for x in (out, expected)]
    for ours, theirs in pairs + list(zip(*grads, strict=True)):
        assert ours.isfinite().all()
        assert (ours.double() - theirs.double()).norm() <= error * theirs.double().norm() + 1e-2


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", [1, 2, 77, 192, 320, 1000])
def test_equals_float64(length: int) -> None:
    assert_close(core, inputs(length, torch.bfloat16), 1e-2)


@pytest.mark.parametrize(("d_qk", "d_v"), [(192, 128), (128, 128), (96, 64), (256, 256)])
def test_cudnn_serves_low_precision(d_qk: int, d_v: int) -> None:
    with _Ops() as ops:
        core(*inputs(77, torch.bfloat16, d_qk, d_v)).sum()
    assert CUDNN in ops.names


@pytest.mark.parametrize(("length", "dtype", "d_qk"), [(77, torch.float32, 192), (1, torch.bfloat16, 192)])
def test_shapes_that_cudnn_refuses_use_another_backend(length: int, dtype: torch.dtype, d_qk: int) -> None:
    tensors = inputs(length, dtype, d_qk)
    with _Ops() as ops:
        core(*tensors)
    assert CUDNN not in ops.names
    assert_close(core, tensors, 1e-2)


@pytest.mark.parametrize("documents", [False, True])
def test_max_logits_are_the_largest_log_sum_exp_in_nats(documents: bool) -> None:
    q, k, v = (t.detach().transpose(1, 2) for t in inputs(320, torch.bfloat16))
    mask, tops = None, torch.full((3,), -torch.inf, device="cuda")
    seen = torch.ones(320, 320, dtype=torch.bool, device="cuda").tril()
    if documents:
        bounds = bounds_of(torch.arange(320, device="cuda").div(100).int().expand(2, -1))
        mask, seen = document_mask(bounds, torch.bfloat16, 192, 128), document_mask(bounds, torch.float64, 0, 0)
    attention_core(q, k, v[..., 128:], SCALE, mask, tops)
    exact = (q.double() @ k.double().mT * SCALE).masked_fill(~seen, -torch.inf).logsumexp(-1).amax((0, 2))
    torch.testing.assert_close(tops.double(), exact, rtol=0, atol=2e-2)
    assert returns_lse(q.device, q.dtype, 192, 128, documents)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_it_is_cudnn_too(recompute: bool) -> None:
    def block(q: Tensor, k: Tensor, kv: Tensor) -> Tensor:
        args = q * 1, k, kv
        out = checkpoint(core, *args, use_reentrant=False) if recompute else core(*args)
        assert isinstance(out, Tensor)
        return out * 1

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    assert_close(compiled, inputs(192, torch.bfloat16), 1e-2)
    tensors = inputs(192, torch.bfloat16)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        compiled(*tensors).sum().backward()
        torch.cuda.synchronize()
    kernels = [event.key for event in seen.key_averages() if "sdpa" in event.key or "flash" in event.key]
    assert any("cudnn" in name and "fprop" in name for name in kernels), kernels
    assert any("cudnn" in name and "bprop" in name for name in kernels), kernels
