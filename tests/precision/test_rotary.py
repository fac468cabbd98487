"""Queries, keys and values of attention, normed or not, in BF16 or FP8: one operator each way against plain PyTorch."""

import pytest
import torch
from torch import Tensor

from precision import attention_inputs, rms_norm
from precision.formats import E4M3, saturating_cast
from precision.operand import Operand
from precision.rotary import StaticCast

pytest.importorskip("triton", reason="Triton is missing")
B, S, H, N, R, V = 2, 3, 5, 12, 8, 6
SCALE = 32.0


class HeadNorm:
    eps = 1e-2

    def __call__(self, x: Tensor) -> Tensor:
        normed = rms_norm(x, None, self.eps)
        assert isinstance(normed, Tensor)
        return normed


NORMS = HeadNorm(), HeadNorm()


def build(
    kernels: str,
    dtype: torch.dtype,
    normed: bool,
    cast: StaticCast | None = None,
    backend: str = "none",
    bad: float = 1,
) -> tuple[list[Tensor | Operand], list[Tensor]]:
    """q, k and v, and the gradients of q, kv and k_rope; numbers have a mean. bad: a factor of one query's and one
    key's."""
    g = torch.Generator().manual_seed(0)
    shapes = (B, S, H, N + R), (B, S, H, N + V), (B, S, 1, 2 * R)
    leaves = [(torch.randn(shape, generator=g) + 1).bfloat16() for shape in shapes]
    leaves[0][0, 1] = leaves[1][0, 1] = leaves[2][0, 1] = 0
    leaves[0][0, 2, 1, 5] *= bad
    leaves[2][1, 2, 0, -1] *= bad
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    angle = torch.randn(S, R // 2, generator=g)
    rope = torch.stack([angle.cos(), angle.sin()]).to(torch.promote_types(dtype, torch.float32))
    probes = [torch.randn(B, H, S, width, generator=g).bfloat16().transpose(1, 2) for width in (N + R, N + R, V)]

    def run(q: Tensor, kv: Tensor, k_rope: Tensor) -> tuple[Tensor | Operand, Tensor | Operand, Tensor]:
        key = (k_rope * 1)[..., R:]  # a part of a wider tensor, as in MLA
        return attention_inputs(q * 1, kv * 1, key, rope, kernels, NORMS if normed else None, cast)

    step = run if backend == "none" else torch.compile(run, backend=backend)
    made = list(step(leaves[0], leaves[1], leaves[2]))
    edges = [x.carrier if isinstance(x, Operand) else x for x in made]
    return made, list(torch.autograd.grad(edges, leaves, [probe.to(dtype) for probe in probes]))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("backend", ["none", "aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_queries_keys_values_and_gradients_are_those_of_plain_pytorch(backend: str, normed: bool) -> None:
    exact, exact_grads = build("reference", torch.float64, normed)
    ours, our_grads = build("cuda", torch.bfloat16, normed, backend=backend)
    for found, true, rtol in ((ours, exact, 2.0**-8), (our_grads, exact_grads, 2.0**-7)):
        for one, other in zip(found, true, strict=True):
            assert isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype is torch.bfloat16
            torch.testing.assert_close(one.double(), other, rtol=rtol, atol=2 * rtol)


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_in_fp8_they_are_the_cast_of_those_in_bf16(backend: str) -> None:
    rows = torch.zeros(2)
    plain, grads = build("cuda", torch.bfloat16, True)
    made, made_grads = build("cuda", torch.bfloat16, True, StaticCast(SCALE, rows[0], rows[1]), backend)
    for x, of, amax in zip(made[:2], plain[:2], rows, strict=True):
        assert isinstance(x, Operand) and isinstance(of, Tensor) and x.carrier.untyped_storage().nbytes() == 2
        assert torch.equal(x.data.float(), saturating_cast(of, torch.tensor(SCALE), E4M3).float())
        assert x.scale_inv == 1 / SCALE and amax == of.abs().max()
    assert all(map(torch.equal, grads, made_grads))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_nonfinite_number_reaches_the_amax(bad: float) -> None:
    rows = torch.zeros(2)
    build("cuda", torch.bfloat16, True, StaticCast(SCALE, rows[0], rows[1]), bad=bad)
    assert not bool(rows.isfinite().any())
