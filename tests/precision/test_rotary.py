"""Queries, keys and values of attention: one operator each way against autograd through plain PyTorch."""

import pytest
import torch

from precision import attention_inputs

pytest.importorskip("triton", reason="Triton is missing")


@pytest.mark.parametrize("backend", ["none", "aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_gradients_of_queries_keys_and_values_are_those_of_plain_pytorch(backend: str) -> None:
    B, S, H, N, R, V = 2, 3, 5, 12, 8, 6
    shapes = (B, S, H, N + R), (B, S, H, N + V), (B, S, 1, R)
    leaves = [(torch.randn(shape) + 1).bfloat16().requires_grad_() for shape in shapes]
    angle = torch.randn(S, R // 2)
    rope = torch.stack([angle.cos(), angle.sin()])
    probes = [torch.randn(B, H, S, width).bfloat16().transpose(1, 2) for width in (N + R, N + R, V)]

    def run(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, kernels: str) -> tuple[torch.Tensor, ...]:
        return attention_inputs(q * 1, kv * 1, k_rope * 1, rope, kernels)

    step = run if backend == "none" else torch.compile(run, backend=backend)
    ours = step(leaves[0], leaves[1], leaves[2], "cuda")
    theirs = run(leaves[0].double(), leaves[1].double(), leaves[2].double(), "reference")
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2.0**-8, atol=2.0**-7)
    mine = torch.autograd.grad(ours, leaves, probes)
    exact = torch.autograd.grad(theirs, leaves, [probe.double() for probe in probes])
    for ours_, theirs_ in zip(mine, exact, strict=True):
        torch.testing.assert_close(ours_.double(), theirs_.double(), rtol=2.0**-7, atol=2.0**-6)
