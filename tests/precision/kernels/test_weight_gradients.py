"""A weight gradient leaves its kernel in the dtype of the weight that autograd sees: BF16 is FP32 rounded once."""

from collections.abc import Callable

import pytest
import torch
from kernel_layers import DEVICE, Layers, build
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from precision import Feed, PrecisionConfig, expert_ffn, gated_ffn, gemm_layers
from precision.deferred import WeightGradientQueue

pytest.importorskip("triton", reason="Triton is missing")
Recipe = Callable[..., PrecisionConfig]
ON_GPU = torch.cuda.is_available()
RECIPES = ["bf16", "fp8_delayed", "fp8_jit", "fp8_block"]
KINDS = {"linear": ["up"], "grouped": ["ups"], "ffn": ["up", "down"], "experts": ["ups", "downs"]}
RUNS = [("cuda", kind) for kind in KINDS]
RUNS += [("reference", kind) for kind in ("linear", "grouped")]  # of which its feed-forward layers are composed
ROWS, WIDTH, INNER, EXPERTS = 7, 48, 32, 2


def run(layers: Layers, kind: str, x: Tensor) -> Tensor:
    if kind == "linear":
        return layers.up(x)
    if kind == "grouped":
        return layers.ups(x, torch.tensor([3, ROWS], device=DEVICE).int())
    if kind == "ffn":
        return gated_ffn(x, layers.up, layers.down, layers.down_feed)
    expert = torch.arange(ROWS, device=DEVICE)[:, None] % EXPERTS
    return expert_ffn(
        x, expert, torch.full((ROWS, 1), 0.5, device=DEVICE), layers.ups, layers.downs, down_feed=layers.downs_feed,
        rows_feed=Feed(layers.ups), combine=torch.bfloat16, accumulate=torch.float32, add=None,
    )  # fmt: skip


def gradients(
    config: PrecisionConfig, backend: str, kind: str, dtype: torch.dtype, queue: WeightGradientQueue | None = None
) -> dict[str, Tensor]:
    """Of weights, after one microbatch; autograd sees weights of a dtype, what multiplies is the same. queue: computes
    them after the backward pass."""
    layers, _ = build(config, backend, (WIDTH, INNER, EXPERTS), *KINDS[kind])
    for layer in gemm_layers(layers):
        layer.weight, layer.deferred = nn.Parameter(layer.weight.detach().to(dtype)), queue
    x = (torch.randn(ROWS, WIDTH) * torch.logspace(-1, 1, ROWS)[:, None]).to(DEVICE, torch.bfloat16).requires_grad_()
    y = run(layers, kind, x)
    with _Rounding({p.shape for p in layers.parameters()}) as rounding:
        y.backward((torch.randn(y.shape) * 1e-4).to(y))
    assert backend == "reference" or not rounding.casts, "it left its kernel in FP32, and took another pass"
    if queue is not None:
        assert x.grad is not None and all(p.grad is None for p in layers.parameters())
        queue.take()()
    return {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}


class _Rounding(TorchDispatchMode):
    """Counts casts of FP32 into BF16 of given shapes, autograd's too, which it does in silence."""

    def __init__(self, shapes: set[torch.Size]):
        super().__init__()
        self.shapes, self.casts = shapes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_to_copy" and out.shape in self.shapes:
            self.casts += (args[0].dtype, out.dtype) == (torch.float32, torch.bfloat16)
        return out


@pytest.mark.parametrize(("backend", "kind"), RUNS)
@pytest.mark.parametrize("name", RECIPES)
def test_bf16_is_fp32_rounded_once(recipe: Recipe, name: str, backend: str, kind: str) -> None:
    plain = backend == "cuda" and kind in ("linear", "ffn")  # cuBLAS
    if name == "fp8_block" and plain and not ON_GPU:
        pytest.skip("cuBLAS takes block scales on a GPU only")
    whole, rounded = (gradients(recipe(name), backend, kind, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert whole.keys() == rounded.keys() and len(whole) == len(KINDS[kind])
    for weight, dw in whole.items():
        assert dw.dtype == torch.float32 and dw.any() and rounded[weight].dtype == torch.bfloat16
        if ON_GPU and plain:  # which may sum in another order for another format
            torch.testing.assert_close(rounded[weight].float(), dw, rtol=2**-7, atol=1e-5 * float(dw.abs().max()))
        else:
            assert torch.equal(rounded[weight], dw.bfloat16())


@pytest.mark.parametrize(("backend", "kind"), RUNS)
@pytest.mark.parametrize("name", ["bf16", "fp8_delayed"])
def test_gradients_put_aside_are_those_of_a_whole_backward_pass(
    recipe: Recipe, name: str, backend: str, kind: str
) -> None:
    whole = gradients(recipe(name), backend, kind, torch.float32)
    later = gradients(recipe(name), backend, kind, torch.float32, WeightGradientQueue())
    assert whole.keys() == later.keys() and all(torch.equal(later[weight], dw) for weight, dw in whole.items())


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["", "e4m3:1:0:0:1", "e4m3:1:0:0:1 narrow"])
def test_hints_to_the_compiler_are_true(how: str, out: torch.dtype) -> None:
    """The operators' stand-ins give the dtype, too."""
    from precision.kernels import ffn_ops, gemm_ops

    how, *narrow = how.split() or [""]

    def some(*shape: int) -> Tensor:
        made = torch.randn(shape, device=DEVICE)
        return made.to(torch.float8_e4m3fn if how else torch.bfloat16)

    checks = "test_faketensor" if how else ("test_schema", "test_faketensor")  # the former adds FP8
    none, one, dy = torch.empty(0, device=DEVICE), torch.ones((), device=DEVICE), some(ROWS, WIDTH).bfloat16()
    inv = one if how else none
    y1 = torch.randn(ROWS, 2 * INNER, device=DEVICE).bfloat16()
    # FP8 has a copy for the input gradient, BF16 is seen transposed
    w1, w2 = (some(K, N) if how else some(N, K).mT for N, K in ((2 * INNER, WIDTH), (WIDTH, INNER)))
    y1_inv = torch.ones(2 * -(-INNER // 128), ROWS, device=DEVICE) if narrow else none
    y1 = y1.to(torch.float8_e4m3fn) if narrow else y1
    given = dy, some(ROWS, WIDTH), inv, y1, y1_inv, torch.ones(2, device=DEVICE) if how else none, none, [none] * 6
    hows = " ".join([how, how, *narrow]) if how else ""
    unused, back = torch.empty(0, dtype=torch.int64, device=DEVICE), (w.mT.contiguous() for w in (w1, w2))
    forward = given[1], inv, *(part for w in back for part in (w, inv)), unused, none, none.bfloat16(), one, one
    torch.library.opcheck(ffn_ops.ffn_forward, (*forward, hows, -1, None, none, False), test_utils=checks)
    torch.library.opcheck(
        ffn_ops.ffn_backward, (*given, w1, inv, w2, inv, one * 0, one * 0, hows, out), test_utils=checks
    )
    if how:
        ends = torch.tensor([3, ROWS], device=DEVICE).int()
        torch.library.opcheck(
            gemm_ops.grouped_wgrad, (given[1], one, dy, some(ROWS, INNER), one, ends, how, how, out), test_utils=checks
        )
